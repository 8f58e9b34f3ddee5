from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from std_core.decoding.accept import accept_equal, accept_sampled

DRAWS = 40_000


@given(st.integers(1, 5), st.integers(0, 8), st.randoms(use_true_random=False))
def test_accept_equal_counts_the_leading_equal_tokens(rows: int, gamma: int, rng) -> None:
    drafted = [[rng.randint(0, 2) for _ in range(gamma)] for _ in range(rows)]
    target = [[rng.randint(0, 2) for _ in range(gamma + 1)] for _ in range(rows)]
    expected = []
    for d, t in zip(drafted, target, strict=True):
        n = 0
        while n < gamma and d[n] == t[n]:
            n += 1
        expected.append(n)
    n = accept_equal(torch.tensor(drafted).reshape(rows, gamma), torch.tensor(target))
    assert n.tolist() == expected


def distribution_error(broken: bool) -> float:
    """χ² per degree of freedom of the first two tokens, against the full model's distribution.

    Args:
        broken: accept with the wrong q.
    """
    rng = torch.Generator().manual_seed(3)
    vocabulary = 5
    gamma = 2
    q = torch.rand(1, gamma, vocabulary, generator=rng).softmax(-1).pow(3)
    p = torch.rand(1, gamma + 1, vocabulary, generator=rng).mul(3).softmax(-1)
    q /= q.sum(-1, keepdim=True)
    many_q = q.expand(DRAWS, -1, -1)
    many_p = p.expand(DRAWS, -1, -1)
    drafted = torch.stack(
        [torch.multinomial(q[0, i], DRAWS, True, generator=rng) for i in range(gamma)], dim=1
    )
    n, tokens = accept_sampled(drafted, many_q if not broken else many_q.flip(-1), many_p, rng)
    # after a rejection the second token is the next round's: draw it from p
    fresh = torch.multinomial(p[0, 1], DRAWS, True, generator=rng)
    second = torch.where(n > 0, tokens[:, 1], fresh)
    counts = torch.bincount(tokens[:, 0] * vocabulary + second, minlength=vocabulary**2).double()
    expected = (p[0, 0, :, None] * p[0, 1]).flatten().double() * DRAWS
    return float(((counts - expected) ** 2 / expected).sum() / (vocabulary**2 - 1))


def test_speculative_sampling_has_the_full_models_distribution() -> None:
    # χ²(24) is above 43 with a probability of 0.01; the seed is fixed
    assert distribution_error(broken=False) < 1.8


def test_the_statistic_detects_wrong_acceptance() -> None:
    assert distribution_error(broken=True) > 20


@pytest.mark.parametrize("same", [True, False])
def test_a_draft_of_the_same_distribution_is_always_accepted(same: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    p = torch.rand(500, 4, 7, generator=rng).softmax(-1)
    q = p[:, :3] if same else p[:, :3].roll(1, -1)
    drafted = torch.stack(
        [torch.multinomial(q[:, i], 1, generator=rng)[:, 0] for i in range(3)], dim=1
    )
    n, tokens = accept_sampled(drafted, q, p, rng)
    assert bool((n == 3).all()) is same
    rows = torch.arange(500)
    for i in range(3):
        assert torch.equal(tokens[rows[n > i], i], drafted[n > i, i])
