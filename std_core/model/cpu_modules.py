"""Linear layers, gated MLPs and RMS norms of the text stack on our CPU kernels.

They are other module objects over the model's own parameters and keep the modules' names, so
drafters find the projections by the same names.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from std_core.kernels.cpu import loader
from std_core.kernels.linear import linear, rms_norm, swiglu


class CpuLinear(nn.Linear):
    """A linear layer on our kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class CpuRMSNorm(nn.Module):
    """An RMS norm on our kernel."""

    def __init__(self, norm: Any):
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class CpuGatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)), with gate and up in one kernel."""

    def __init__(self, mlp: Any):
        super().__init__()
        self.gate_proj = mlp.gate_proj
        self.up_proj = mlp.up_proj
        self.down_proj = mlp.down_proj
        self.act_fn = mlp.act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _is_unmodified(self.gate_proj) and _is_unmodified(self.up_proj):
            return self.down_proj(swiglu(x, self.gate_proj.weight, self.up_proj.weight))
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _is_unmodified(module: nn.Module) -> bool:
    """Whether no drafter has replaced the projection and no hook records its inputs."""
    return isinstance(module, CpuLinear) and not module._forward_pre_hooks


def clone_sharing_parameters(module: nn.Module) -> Any:
    """Copy a tree of modules; the copy shares all parameters and buffers."""
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, shared)


def use_cpu_kernels(module: nn.Module) -> Any:
    """Return a copy of a module, over the same parameters, whose parts run on our CPU kernels.

    Replaced are only parts that are known to compute the same: plain linear layers, RMS norms
    without an offset, and MLPs of three projections without bias around a SiLU. The module itself
    is returned where no kernel supports the parameters' dtype and device, and where accelerate's
    hooks move activations between devices.
    """
    parameter = next(module.parameters())
    has_hooks = any(hasattr(part, "_hf_hook") for part in module.modules())
    if has_hooks or not loader.supports("linear", parameter):
        return module
    clone = clone_sharing_parameters(module)
    for part in list(clone.modules()):
        if type(part) is nn.Linear:
            part.__class__ = CpuLinear
        for name, child in list(part.named_children()):
            if type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                setattr(part, name, CpuRMSNorm(child))
            elif _is_gated_mlp(child):
                setattr(part, name, CpuGatedMLP(child))
    return clone


def _is_gated_mlp(module: Any) -> bool:
    names = {name for name, _ in module.named_children()}
    if names != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    has_bias = module.gate_proj.bias is not None or module.up_proj.bias is not None
    return not has_bias and isinstance(module.act_fn, (nn.SiLU, SiLUActivation))
