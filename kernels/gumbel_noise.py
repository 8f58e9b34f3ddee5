"""Keyed draws: a token of each place by Gumbel noise that is a pure function of (seed, place in the
output, token).

    draw(scores, seeds, seeded, places) -> tokens
    keyed_noise(seeds, seeded, places, vocabulary) -> noise

scores: (B, T, vocabulary); seeds: (B,) int64; seeded: (B,) bool, the others take the maximum;
places, tokens: (B, T) int64. What is no number counts as the maximum, and the first of equals wins,
as with `argmax`. The C++ version, float32 scores only, finds the token without making the noise of
those that cannot win."""

from __future__ import annotations

from collections.abc import Callable

import torch

from std_core.kernels.cpu import loader


def draw(
    scores: torch.Tensor, seeds: torch.Tensor, seeded: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    if not loader.serves("draw", scores):
        return noisy_argmax(scores, places, lambda place, n: keyed_noise(seeds, seeded, place, n))
    inputs = [x.contiguous() for x in (scores, seeds, seeded, places)]
    tokens = torch.empty_like(inputs[-1])
    pointers = (x.data_ptr() for x in (*inputs, tokens))
    loader.call("draw", scores.dtype, *pointers, *scores.shape, torch.get_num_threads())
    return tokens


def noisy_argmax(
    scores: torch.Tensor, places: torch.Tensor, noise: Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    """(B, T) the maxima of scores and `noise(places, vocabulary)`, (B, T, vocabulary): asked for
    one column of places at a time, since making it takes ten times a score's bytes."""
    each = zip(scores.split(1, dim=1), places.split(1, dim=1), strict=True)
    return torch.cat(
        [(score + noise(place, score.shape[-1])).argmax(-1) for score, place in each], dim=1
    )


def keyed_noise(
    seeds: torch.Tensor, seeded: torch.Tensor, places: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """(B, T, vocabulary): keyed Gumbel noise for rows with a seed, none for the others."""
    return keyed_gumbel(seeds, places, vocabulary) * seeded[:, None, None]


def gumbel(uniform: torch.Tensor) -> torch.Tensor:
    """Gumbel noise from uniform numbers in (0, 1)."""
    return -torch.log(-torch.log(uniform))


def keyed_gumbel(seeds: torch.Tensor, places: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Gumbel noise (B, T, vocabulary), float32, that depends on (seed, place, token) alone: on no
    generator's state, no shape, no device. Two rounds of a 64-bit mixer over a counter.

    seeds: (B,) int64; places: (B, T) int64.
    """
    token = torch.arange(vocabulary, device=places.device)
    key = _mix(_mix(seeds[:, None] * _GOLDEN + 1) + places * _GOLDEN)
    bits = _mix(key[..., None] + token * _GOLDEN)
    uniform = (((bits >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53
    return gumbel(uniform).float()


_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed number


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 64-bit numbers; every bit of the input moves half of the output's (xor-shift,
    multiply)."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & ((1 << 33) - 1))
