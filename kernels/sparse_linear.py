"""Projections that use only the input channels with large activations (activation sparsity, TEAL).

    sparse_linear(x, weight, bias, threshold) -> y
    sparsify(x, threshold) -> x with small activations set to 0
    kernel_layout(weight) -> the weight in the memory layout that `sparse_linear` reads least of

x: (…, in); weight: (out, in); y: (…, out).

The kernels do not read the weights of a channel that is inactive in every row. With more than
`MAX_ROWS` rows on a CPU hardly a channel is inactive in all of them, and the dense product of
sparsified activations is faster.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from std_core.kernels.cpu import sparse_linear as cpu_sparse_linear
from std_core.kernels.dispatch import uses_triton

MAX_ROWS = 4  # 4 sequences together activate 92% of the weights (Crossover §4)


def sparse_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    """x Wᵀ + b, where activations of magnitude at or below the threshold count as 0."""
    if uses_triton(x):
        from std_core.kernels.triton import sparse_linear as triton_sparse_linear

        return triton_sparse_linear.sparse_linear(x, weight, bias, threshold)
    supported = x.dtype == weight.dtype and cpu_sparse_linear.supports(weight)
    if supported and skips_channels(x) and weight.T.is_contiguous():
        y = cpu_sparse_linear.sparse_product(x, weight, threshold)
        return y if bias is None else y + bias
    return F.linear(sparsify(x, threshold), weight, bias)


def sparsify(x: torch.Tensor, threshold: float) -> torch.Tensor:
    """Set activations of magnitude at or below the threshold to 0."""
    return x * (x.abs() > threshold)


def skips_channels(x: torch.Tensor) -> bool:
    """Whether x has few enough rows that skipping inactive channels is worth it."""
    return uses_triton(x) or x.numel() // x.shape[-1] <= MAX_ROWS


def kernel_layout(weight: torch.Tensor) -> torch.Tensor:
    """A channel-major copy where a kernel reads it, else the weight itself."""
    if uses_triton(weight) or cpu_sparse_linear.supports(weight):
        return channel_major(weight)
    return weight


def channel_major(weight: torch.Tensor) -> torch.Tensor:
    """A copy of the weight, of the same shape, with each input channel contiguous in memory.

    In a checkpoint's row-major layout the weights of an input channel share cache lines with other
    channels', so that skipping the channel saves no memory traffic.
    """
    return weight.T.contiguous().T
