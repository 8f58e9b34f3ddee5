"""Projections and RMS norms for a few rows, where the cost is reading the weights.

    linear(x, weight, bias) -> x Wᵀ + b
    swiglu(x, gate, up) -> silu(x Gᵀ) · (x Uᵀ)
    rms_norm(x, weight, eps) -> x / sqrt(mean(x²) + eps) · weight

x: (…, in); weight, gate and up: (out, in); result: (…, out).

The C++ versions sum over the input channels in an order that does not depend on the other rows: the
result of a row is bitwise the same in any batch of at most `MAX_ROWS` rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from std_core.kernels.cpu import linear as cpu_linear

MAX_ROWS = 128  # with more rows PyTorch's matrix products are faster


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b."""
    parameters = (weight,) if bias is None else (weight, bias)
    if _few_rows(x) and cpu_linear.supports(x, *parameters):
        return cpu_linear.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(x Gᵀ) · (x Uᵀ)."""
    if _few_rows(x) and cpu_linear.supports(x, gate, up):
        return cpu_linear.swiglu(x, gate, up)
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension; weight: (in,)."""
    if cpu_linear.supports_rms_norm(x, weight):
        return cpu_linear.rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def _few_rows(x: torch.Tensor) -> bool:
    return x.numel() // x.shape[-1] <= MAX_ROWS
