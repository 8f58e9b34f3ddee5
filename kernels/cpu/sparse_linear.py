"""The product of `sparse_linear` in C++ (draft_linear.cpp)."""

from __future__ import annotations

import torch

from std_core.kernels.cpu import loader

OUTPUT_MULTIPLE = 32  # output channels that are summed at a time


def supports(weight: torch.Tensor) -> bool:
    """Whether there is a product for the weight's device, dtype and output channels."""
    return weight.shape[0] % OUTPUT_MULTIPLE == 0 and loader.supports("sparse", weight)


def sparse_product(x: torch.Tensor, weight: torch.Tensor, threshold: float) -> torch.Tensor:
    """x Wᵀ over the channels above the threshold; the weight must be channel-major."""
    x = x.contiguous()
    out, width = weight.shape
    y = x.new_empty(*x.shape[:-1], out)
    loader.kernel("sparse", x.dtype)(
        x.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        x.numel() // width,
        width,
        out,
        threshold,
        torch.get_num_threads(),
    )
    return y
