from __future__ import annotations

import random
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from std_core.decoding.round import Slots, commit, prompt_lookup
from std_core.model.cache import KVCache

STOP = 9


def slots_of(rows: int) -> Slots:
    """Slots of a model that is nothing but its sizes."""
    model = SimpleNamespace(
        device="cpu",
        vocabulary=10,
        new_cache=lambda count: KVCache(
            ["cpu"], rows=count, kv_heads=1, head_dim=1, dtype=torch.float32
        ),
    )
    return Slots.empty(model, rows, torch.Generator())  # type: ignore[arg-type]


@given(st.integers(1, 4), st.integers(0, 6), st.randoms(use_true_random=False))
def test_commit_keeps_what_a_row_may_keep(rows: int, gamma: int, rng: random.Random) -> None:
    """Against the same rule written for one row at a time."""
    slots = slots_of(rows)
    length = torch.tensor([rng.randint(1, 50) for _ in range(rows)])
    left = torch.tensor([rng.randint(1, 9) for _ in range(rows)])
    for count in (slots.length, slots.draft_length, slots.position, slots.total, slots.generated):
        count += length
    slots.remaining += left
    slots.active = torch.tensor([rng.random() < 0.8 for _ in range(rows)])
    slots.stop_ids = torch.full((rows, 1), STOP)
    slots.reserve_history(80)
    tokens = torch.tensor(
        [[rng.choice((1, 2, 3, STOP)) for _ in range(gamma + 1)] for _ in range(rows)]
    )
    accepted = torch.tensor([rng.randint(0, gamma) for _ in range(rows)])
    done = commit(slots, tokens, accepted, torch.zeros(rows, dtype=torch.bool))
    for row in range(rows):
        new = tokens[row, : accepted[row] + 1].tolist() if slots.active[row] else []
        if STOP in new:
            new = new[: new.index(STOP) + 1]
        new = new[: left[row]]
        assert done.kept[row] == len(new)
        assert bool(done.stopped[row]) == (STOP in new)
        assert slots.length[row] == length[row] + len(new) and slots.remaining[row] == left[
            row
        ] - len(new)
        assert (
            slots.position[row]
            == slots.draft_length[row]
            == slots.total[row]
            == slots.generated[row]
        )
        assert slots.history[row, length[row] : slots.total[row]].tolist() == new
        if new:
            assert slots.last[row] == new[-1]
        assert done.accepted[row] <= done.proposed[row] <= gamma


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=25), min_size=1, max_size=4),
    st.integers(1, 6),
)
def test_prompt_lookup_continues_the_newest_longest_match(
    texts: list[list[int]], gamma: int
) -> None:
    slots = slots_of(len(texts))
    slots.reserve_history(max(map(len, texts)) + gamma)
    for row, text in enumerate(texts):
        slots.history[row, : len(text)] = torch.tensor(text)
        slots.total[row] = len(text)
    drafted = prompt_lookup(slots, gamma).tokens
    for row, text in enumerate(texts):
        wanted = [text[-1]] * gamma
        for n in (3, 2, 1):
            ends = (
                [e for e in range(n, len(text)) if text[e - n : e] == text[-n:]]
                if n < len(text)
                else []
            )
            if ends:
                known = text[ends[-1] :]
                wanted = [known[i % len(known)] for i in range(gamma)]
                break
        assert drafted[row].tolist() == wanted
