"""`linear`, `swiglu` and `rms_norm` in C++ (linear.cpp)."""

from __future__ import annotations

import torch

from std_core.kernels.cpu import loader


def supports(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether the product accepts these tensors: contiguous weights of x's dtype."""
    if x.shape[-1] % 2 or not loader.supports("linear", x):
        return False
    return all(weight.dtype == x.dtype and weight.is_contiguous() for weight in weights)


def supports_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `rms_norm` accepts these tensors."""
    return loader.supports("rms_norm", x) and weight.dtype == x.dtype


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `std_core.kernels.linear.linear`."""
    return _product(x, weight, bias=bias)


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `std_core.kernels.linear.swiglu`."""
    return _product(x, gate, up=up)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    x = x.contiguous()
    out, width = weight.shape
    y = x.new_empty(*x.shape[:-1], out)
    loader.kernel("linear", x.dtype)(
        x.data_ptr(),
        weight.data_ptr(),
        0 if up is None else up.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // width,
        width,
        out,
        torch.get_num_threads(),
    )
    return y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `std_core.kernels.linear.rms_norm`."""
    x = x.contiguous()
    y = torch.empty_like(x)
    width = x.shape[-1]
    loader.kernel("rms_norm", x.dtype)(
        x.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        x.numel() // width,
        width,
        eps,
    )
    return y
