"""A projection that computes with the largest of its input channels alone (activation sparsity, TEAL).

    sparse_linear(x, weight, bias, threshold) -> y

x: (…, in); weight: (out, in); channels whose magnitude is not above the threshold count as 0. The weights of a channel
that no row of x activates need not be read; this version reads them all and defines the result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from std_core.kernels.devices import TRITON


def sparse_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, threshold: float) -> torch.Tensor:
    if x.device.type in TRITON:
        from std_core.kernels import gpu_sparse_linear

        return gpu_sparse_linear.sparse_linear(x, weight, bias, threshold)
    return F.linear(sparsified(x, threshold), weight, bias)


def laid_out(weight: torch.Tensor) -> torch.Tensor:
    """The weight as the product reads it best."""
    if weight.device.type in TRITON:
        from std_core.kernels import gpu_sparse_linear

        return gpu_sparse_linear.by_channel(weight)
    return weight


def sparsified(x: torch.Tensor, threshold: float) -> torch.Tensor:
    return x * (x.abs() > threshold)
