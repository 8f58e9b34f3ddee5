"""The text stack with its projections, gated MLPs and norms on our kernels; parameters and
structure stay the model's.

What stands here are other module objects over the same parameters, under the same names, so
drafters find the projections where they were."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from std_core.kernels.cpu import loader
from std_core.kernels.linear import linear, rms_norm, swiglu


class CpuLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class CpuRMSNorm(nn.Module):
    def __init__(self, norm: Any):
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class CpuGatedMLP(nn.Module):
    """silu(gate) · up → down; as the model has it where a drafter has put something else in a
    projection's place."""

    def __init__(self, mlp: Any):
        super().__init__()
        self.gate_proj = mlp.gate_proj
        self.up_proj = mlp.up_proj
        self.down_proj = mlp.down_proj
        self.act_fn = mlp.act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_proj, self.up_proj
        if all(
            isinstance(m, CpuLinear) and not m._forward_pre_hooks for m in both
        ):  # hooks: a sample being taken
            return self.down_proj(swiglu(x, self.gate_proj.weight, self.up_proj.weight))
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def clone_sharing_parameters(module: nn.Module) -> Any:
    """Other module objects over the same parameters and buffers."""
    shared = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, shared)


def use_cpu_kernels(module: nn.Module) -> Any:
    """The module as other objects over the same parameters, with what our kernels serve in place.

    Only what is known to compute the same is exchanged: plain linear layers, RMS norms without an
    offset, MLPs of three projections without bias around a SiLU. Where no kernel serves the
    parameters' type and device, it is the module itself."""
    parameter = next(module.parameters())
    if not loader.supports("linear", parameter) or any(
        hasattr(m, "_hf_hook") for m in module.modules()
    ):
        return module  # accelerate's hooks move layers' inputs between devices
    tree = clone_sharing_parameters(module)
    for part in list(tree.modules()):
        if type(part) is nn.Linear:
            part.__class__ = CpuLinear
        for name, child in list(part.named_children()):
            if type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                setattr(part, name, CpuRMSNorm(child))
            elif _gated(child):
                setattr(part, name, CpuGatedMLP(child))
    return tree


def _gated(module: Any) -> bool:
    names = {name for name, _ in module.named_children()}
    if names != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    plain = module.gate_proj.bias is None and module.up_proj.bias is None
    return plain and isinstance(module.act_fn, (nn.SiLU, SiLUActivation))
