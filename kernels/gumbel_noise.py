"""Sampling by the Gumbel-max trick with counter-based noise.

    keyed_sample(scores, seeds, seeded, positions) -> tokens
    keyed_noise(seeds, seeded, positions, vocabulary) -> noise
    noisy_argmax(scores, positions, noise) -> tokens

The noise of a token is a pure function of (seed, position in the output, token): it depends on no
generator's state, no shape and no device.

scores: (B, T, vocabulary); seeds: (B,) int64; seeded: (B,) bool; positions and tokens: (B, T)
int64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from std_core.kernels.cpu import gumbel_noise as cpu_gumbel_noise


def keyed_sample(
    scores: torch.Tensor, seeds: torch.Tensor, seeded: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Sample tokens (B, T) of rows that have a seed; take the maximum score of the others.

    As with `argmax`, NaN counts as the maximum, and the first of equal values wins. The C++
    version (float32 scores only) computes noise only for tokens that can win.
    """
    if cpu_gumbel_noise.supports(scores):
        return cpu_gumbel_noise.keyed_sample(scores, seeds, seeded, positions)
    return noisy_argmax(scores, positions, lambda column, n: keyed_noise(seeds, seeded, column, n))


def noisy_argmax(
    scores: torch.Tensor,
    positions: torch.Tensor,
    noise: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """Argmax (B, T) of scores plus noise.

    Args:
        scores: (B, T, vocabulary).
        positions: (B, T).
        noise: called with (B, 1) positions and the vocabulary size, returns (B, 1, vocabulary).
            One position at a time, since computing noise needs ten times the memory of a score.
    """
    tokens = [
        (score + noise(position, score.shape[-1])).argmax(-1)
        for score, position in zip(scores.split(1, 1), positions.split(1, 1), strict=True)
    ]
    return torch.cat(tokens, dim=1)


def keyed_noise(
    seeds: torch.Tensor, seeded: torch.Tensor, positions: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """Gumbel noise (B, T, vocabulary) of rows that have a seed, zeros for the others."""
    return keyed_gumbel(seeds, positions, vocabulary) * seeded[:, None, None]


def gumbel_from_uniform(uniform: torch.Tensor) -> torch.Tensor:
    """Gumbel noise from uniform numbers in (0, 1)."""
    return -torch.log(-torch.log(uniform))


def keyed_gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Gumbel noise (B, T, vocabulary), float32, from seeds (B,) and positions (B, T), int64.

    The uniform numbers are a counter through two rounds of a 64-bit mixer. kernels/cpu/
    gumbel_noise.cpp computes the same bits.
    """
    token = torch.arange(vocabulary, device=positions.device)
    key = _mix(_mix(seeds[:, None] * _GOLDEN + 1) + positions * _GOLDEN)
    bits = _mix(key[..., None] + token * _GOLDEN)
    uniform = (((bits >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53
    return gumbel_from_uniform(uniform).float()


_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed number


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer: a bijection in which each input bit flips half of the output bits."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & ((1 << 33) - 1))
