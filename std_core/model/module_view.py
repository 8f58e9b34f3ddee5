"""A module tree of our own over the tensors of a user's model.

What the engine sets (attention, evaluation mode, CPU kernels) it sets on its own modules and on
its own copy of the configuration. The user's model is only read, so its `generate` works as before
at any time and in any thread.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from types import MethodType
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from transformers import PreTrainedConfig


def private_view(hf: Any) -> Any:
    """Copy a model's modules and configuration, in evaluation mode and without hooks.

    Parameters, buffers and everything else that is neither a module nor a configuration are shared.
    Parts compiled by `torch.compile` are copied as they were before.
    """
    return _Copier().copy(hf).eval()


def uncompiled(module: Any) -> Any:
    """Return the module inside `torch.compile(module)`; other modules as they are."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def is_compiled(function: Any) -> bool:
    """Whether a function was made by `torch.compile`."""
    return hasattr(function, "_torchdynamo_orig_callable")


class _Copier:
    """Copies modules, so that each is copied once however often it is referred to."""

    def __init__(self) -> None:
        self._modules: dict[int, nn.Module] = {}
        self._configs: dict[int, Any] = {}  # the memo of `copy.deepcopy`

    def copy(self, value: Any) -> Any:
        """Copy modules and configurations in a value; return anything else itself."""
        if isinstance(value, nn.Module):
            return self._copy_module(uncompiled(value))
        if isinstance(value, PreTrainedConfig):
            return copy.deepcopy(value, self._configs)
        if type(value) in (list, tuple):
            return type(value)(self.copy(item) for item in value)
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self.copy(item)) for key, item in value.items())
        if isinstance(value, MethodType):  # accelerate keeps the method that it replaces
            return MethodType(value.__func__, self.copy(value.__self__))
        if isinstance(value, functools.partial):  # accelerate's replacement of `forward`
            keywords = self.copy(value.keywords)
            return functools.partial(self.copy(value.func), *self.copy(value.args), **keywords)
        return value

    def _copy_module(self, module: nn.Module) -> nn.Module:
        if id(module) in self._modules:
            return self._modules[id(module)]
        view = module.__new__(type(module))
        self._modules[id(module)] = view
        for name, value in module.__getstate__().items():
            if name.endswith("_hooks") and isinstance(value, dict):
                view.__dict__[name] = type(value)()
            elif name == "_output_capturing_hooks_installed":
                continue  # transformers puts its hooks on again where it needs them
            elif name != "forward" or not is_compiled(value):
                view.__dict__[name] = self.copy(value)
        return view
