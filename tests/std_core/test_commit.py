from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from std_core.cache import Cache
from std_core.decode import Slots, commit

STOP = 9


@given(st.integers(1, 4), st.integers(0, 6), st.randoms(use_true_random=False))
def test_commit_keeps_what_a_row_may_keep(rows: int, gamma: int, rng) -> None:
    """Against the same rule written for one row at a time."""
    none = Cache(1, rows, 1, 1, torch.float32, "cpu")
    length = torch.tensor([rng.randint(1, 50) for _ in range(rows)])
    left = torch.tensor([rng.randint(1, 9) for _ in range(rows)])
    active = torch.tensor([rng.random() < 0.8 for _ in range(rows)])
    slots = Slots(
        none, none, length.clone(), length.clone(), length.clone(), torch.zeros(rows).long(), left.clone(), active
    )
    target = torch.tensor([[rng.choice((1, 2, 3, STOP)) for _ in range(gamma + 1)] for _ in range(rows)])
    accepted = torch.tensor([rng.randint(0, gamma) for _ in range(rows)])
    done = commit(slots, target, accepted, torch.tensor([STOP]), torch.zeros(rows, dtype=torch.bool))
    for row in range(rows):
        new = target[row, : accepted[row] + 1].tolist() if active[row] else []
        if STOP in new:
            new = new[: new.index(STOP) + 1]
        new = new[: left[row]]
        assert done.kept[row] == len(new)
        assert bool(done.stopped[row]) == (STOP in new)
        assert slots.length[row] == length[row] + len(new) and slots.left[row] == left[row] - len(new)
        assert slots.position[row] == slots.draft_length[row] == slots.length[row]
        if new:
            assert slots.last[row] == new[-1]
        assert done.accepted[row] <= done.proposed[row] <= gamma
