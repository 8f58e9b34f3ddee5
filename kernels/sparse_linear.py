"""A projection that computes with the largest of its input channels alone (activation sparsity, TEAL).

    sparse_linear(x, turned, threshold) -> y
    turned(weight) -> the weight as that takes it, a copy, or None where nothing would read less

x: (…, in); weight: (out, in); channels whose magnitude is not above the threshold count as 0. The weights of a channel
that no row of x activates are not read; with more than `FEW` rows hardly one is left out, and the plain product of
`sparsified` activations is the faster one.
"""

from __future__ import annotations

import torch

from std_core.kernels import cpu

FEW = 4  # rows; at 4 sequences 92% of the weights are active (Crossover §4)
OUTPUTS = 32  # the C++ product sums so many outputs at a time


def turned(weight: torch.Tensor) -> torch.Tensor | None:
    """(in, out): a channel's weights in one piece."""
    fits = weight.shape[0] % OUTPUTS == 0 and cpu.serves("sparse", weight)
    return weight.T.contiguous() if fits else None


def sparse_linear(x: torch.Tensor, turned: torch.Tensor, threshold: float) -> torch.Tensor:
    x = x.contiguous()
    width, out = turned.shape
    y = x.new_empty(*x.shape[:-1], out)
    tensors = x.data_ptr(), turned.data_ptr(), y.data_ptr()
    cpu.call("sparse", x.dtype, *tensors, x.numel() // width, width, out, threshold, torch.get_num_threads())
    return y


def few(x: torch.Tensor) -> bool:
    """Whether so few rows activate part of the channels only."""
    return x.numel() // x.shape[-1] <= FEW


def sparsified(x: torch.Tensor, threshold: float) -> torch.Tensor:
    return x * (x.abs() > threshold)
