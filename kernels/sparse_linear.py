"""A projection that computes with the largest of its input channels alone (activation sparsity,
TEAL).

    sparse_linear(x, weight, bias, threshold) -> y
    laid_out(weight) -> the weight as that reads least of it

x: (…, in); weight: (out, in); channels whose magnitude is not above the threshold count as 0. The
weights of a channel that no row of x activates are not read; with more than `FEW` rows hardly one
is left out, and the plain product of `sparsified` activations is the faster one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from std_core.kernels.cpu import loader
from std_core.kernels.devices import TRITON

FEW = 4  # rows; at 4 sequences 92% of the weights are active (Crossover §4)
OUTPUTS = 32  # the C++ product sums so many outputs at a time


def sparse_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    if x.device.type in TRITON:
        from std_core.kernels.triton import sparse_linear as triton_sparse_linear

        return triton_sparse_linear.sparse_linear(x, weight, bias, threshold)
    if not (_served(weight) and weight.T.is_contiguous() and reads_less(x)):
        return F.linear(sparsified(x, threshold), weight, bias)
    x = x.contiguous()
    out, width = weight.shape
    y = x.new_empty(*x.shape[:-1], out)
    tensors = x.data_ptr(), weight.data_ptr(), y.data_ptr()
    loader.call(
        "sparse",
        x.dtype,
        *tensors,
        x.numel() // width,
        width,
        out,
        threshold,
        torch.get_num_threads(),
    )
    return y if bias is None else y + bias


def laid_out(weight: torch.Tensor) -> torch.Tensor:
    """The weight, its shape as before, with the numbers of an input channel side by side where that
    is read: a copy."""
    return weight.T.contiguous().T if weight.device.type in TRITON or _served(weight) else weight


def reads_less(x: torch.Tensor) -> bool:
    """Whether so few rows leave channels out."""
    return x.device.type in TRITON or x.numel() // x.shape[-1] <= FEW


def _served(weight: torch.Tensor) -> bool:
    return weight.shape[0] % OUTPUTS == 0 and loader.serves("sparse", weight)


def sparsified(x: torch.Tensor, threshold: float) -> torch.Tensor:
    return x * (x.abs() > threshold)
