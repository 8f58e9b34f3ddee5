"""Projections and norms of a few rows, whose cost is reading the weights.

    linear(x, weight, bias) -> x Wᵀ + b
    gated(x, gate, up) -> silu(x Gᵀ) · (x Uᵀ)
    rms_norm(x, weight, eps) -> x / sqrt(mean(x²) + eps) · weight

x: (…, in); weight, gate, up: (out, in); y: (…, out). The C++ versions sum over the input channels
in the same order whatever the other rows are: a row's result is the same bit for bit in any company
of at most `FEW` rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from std_core.kernels.cpu import loader

FEW = 128  # rows from which on the products of a large matrix are faster


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _product(x, weight, None, bias) if _few(x, weight) else F.linear(x, weight, bias)


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (
        _product(x, gate, up, None)
        if _few(x, gate, up)
        else F.silu(F.linear(x, gate)) * F.linear(x, up)
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if not loader.serves("rms_norm", x) or weight.dtype != x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    x = x.contiguous()
    y = torch.empty_like(x)
    width = x.shape[-1]
    loader.call(
        "rms_norm",
        x.dtype,
        x.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        x.numel() // width,
        width,
        eps,
    )
    return y


def _few(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether the C++ product takes these rows; it reads weights as they lie, row by row and of the
    rows' own type."""
    fits = x.numel() // x.shape[-1] <= FEW and x.shape[-1] % 2 == 0 and loader.serves("linear", x)
    return fits and all(weight.dtype == x.dtype and weight.is_contiguous() for weight in weights)


def _product(
    x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    x = x.contiguous()
    out, width = weight.shape
    y = x.new_empty(*x.shape[:-1], out)
    tensors = (0 if t is None else t.data_ptr() for t in (x, weight, up, bias, y))
    loader.call(
        "linear", x.dtype, *tensors, x.numel() // width, width, out, torch.get_num_threads()
    )
    return y
