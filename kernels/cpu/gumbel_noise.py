"""`keyed_sample` in C++ (gumbel_noise.cpp)."""

from __future__ import annotations

import torch

from std_core.kernels.cpu import loader


def supports(scores: torch.Tensor) -> bool:
    """Whether there is a kernel for the scores' device and dtype."""
    return loader.supports("draw", scores)


def keyed_sample(
    scores: torch.Tensor, seeds: torch.Tensor, seeded: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """See `std_core.kernels.gumbel_noise.keyed_sample`."""
    scores = scores.contiguous()
    seeds = seeds.contiguous()
    seeded = seeded.contiguous()
    positions = positions.contiguous()
    rows, width, vocabulary = scores.shape
    tokens = torch.empty_like(positions)
    loader.kernel("draw", scores.dtype)(
        scores.data_ptr(),
        seeds.data_ptr(),
        seeded.data_ptr(),
        positions.data_ptr(),
        tokens.data_ptr(),
        rows,
        width,
        vocabulary,
        torch.get_num_threads(),
    )
    return tokens
