"""What an attached engine depends on in a user's model, which the user may change later."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from std_core.model.module_view import is_compiled

# Hooks that leave a forward pass as it is: capturing of outputs, which returns without a request,
# and gradients of embeddings for training (`enable_input_require_grads`).
_HARMLESS_HOOKS = ("transformers.utils.output_capturing", "transformers.modeling_utils")
# Attributes that change nothing in evaluation mode, or that `model.generate` itself may set.
_IGNORED_ATTRIBUTES = {
    *vars(nn.Module()),  # hooks and the like; tensors and child modules are compared by identity
    "gradient_checkpointing",
    "_output_capturing_hooks_installed",
}


class ModelState:
    """A model's modules, tensors and settings at one time; two are equal if an engine that was
    built for one computes what the other does.

    Values written into a tensor in place are no change, since an engine shares the tensors. The
    objects are kept, so that none of a later state can have the identity of one that is gone.
    """

    def __init__(self, hf: Any):
        self._objects: list[Any] = []
        self._facts: list[Any] = [hf.config.to_dict()]
        for module in hf.modules():
            self._add(module)

    def _add(self, module: nn.Module) -> None:
        attributes = vars(module)
        tensors = [*module._parameters.values(), *module._buffers.values()]
        self._objects += [module, type(module), attributes.get("forward"), *tensors]
        self._facts += [(t.dtype, t.device) for t in tensors if t is not None]
        self._facts.append(
            {
                name: _copied(value)
                for name, value in attributes.items()
                if name not in _IGNORED_ATTRIBUTES and _is_setting(value)
            }
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ModelState)
            and len(self._objects) == len(other._objects)
            and all(a is b for a, b in zip(self._objects, other._objects, strict=True))
            and self._facts == other._facts
        )

    __hash__ = None  # type: ignore[assignment]


def _is_setting(value: Any) -> bool:
    """Whether an attribute is a number, a name, or a collection of such."""
    if isinstance(value, dict):
        return all(_is_setting(item) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return all(_is_setting(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _copied(value: Any) -> Any:
    """Copy a setting, so that a later change in place shows."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(value) if isinstance(value, (list, set)) else value


def unfaithful_reason(hf: Any) -> str | None:
    """Return why an engine's forward pass would not be the model's own, as a predicate.

    None if it would.
    """
    if torch.is_autocast_enabled(hf.device.type):
        return (
            "runs under torch.autocast, which the engine does not follow: leave it, or convert the"
            " model itself (model.to(torch.bfloat16))"
        )
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "has global forward hooks of torch.nn, which the engine would not run"
    for name, module in hf.named_modules():
        where = f"its module {name!r}" if name else "it"
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(getattr(hook, "__module__", "") not in _HARMLESS_HOOKS for hook in hooks):
            return f"has a forward hook ({where}), which the engine would not run: remove it"
        forward = vars(module).get("forward")
        if forward is not None and not is_compiled(forward) and not _is_bound_to(forward, module):
            return f"has a `forward` that was replaced ({where}), which the engine would not run"
    return None


def _is_bound_to(function: Any, module: nn.Module) -> bool:
    """Whether a function belongs to a module, so that a copy of the module can have its own."""
    if isinstance(function, functools.partial):  # as accelerate replaces `forward`
        return any(argument is module for argument in function.args)
    return isinstance(function, MethodType) and function.__self__ is module
