from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from std_core.accept import accept_greedy


@given(st.integers(1, 5), st.integers(0, 8), st.randoms(use_true_random=False))
def test_accept_greedy_counts_the_leading_equal_tokens(rows: int, gamma: int, rng) -> None:
    drafted = [[rng.randint(0, 2) for _ in range(gamma)] for _ in range(rows)]
    target = [[rng.randint(0, 2) for _ in range(gamma + 1)] for _ in range(rows)]
    wanted = []
    for d, t in zip(drafted, target, strict=True):
        n = 0
        while n < gamma and d[n] == t[n]:
            n += 1
        wanted.append(n)
    got = accept_greedy(torch.tensor(drafted).reshape(rows, gamma), torch.tensor(target))
    assert got.tolist() == wanted
