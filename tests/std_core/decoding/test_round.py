from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from std_core.decoding.round import commit, is_finite, prompt_lookup
from std_core.decoding.slots import Slots
from std_core.model.cache import KVCache

STOP = 9


def empty_slots(rows: int) -> Slots:
    """Slots of a model that has sizes and nothing else."""
    model = SimpleNamespace(
        device="cpu",
        vocab_size=10,
        new_cache=lambda count: KVCache(
            ["cpu"], rows=count, kv_heads=1, head_dim=1, dtype=torch.float32
        ),
    )
    return Slots.empty(model, rows, torch.Generator())  # type: ignore[arg-type]


@given(st.integers(1, 4), st.integers(0, 6), st.randoms(use_true_random=False))
def test_commit_keeps_accepted_tokens_up_to_a_stop_id_and_the_limit(
    rows: int, gamma: int, rng: random.Random
) -> None:
    """Against the same rule, one row at a time."""
    slots = empty_slots(rows)
    length = torch.tensor([rng.randint(1, 50) for _ in range(rows)])
    remaining = torch.tensor([rng.randint(1, 9) for _ in range(rows)])
    for count in (slots.length, slots.draft_length, slots.position, slots.total, slots.generated):
        count += length
    slots.remaining += remaining
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
        new = new[: remaining[row]]
        assert done.kept[row] == len(new)
        assert bool(done.stopped[row]) == (STOP in new)
        end = length[row] + len(new)
        assert slots.remaining[row] == remaining[row] - len(new)
        for count in (
            slots.length,
            slots.draft_length,
            slots.position,
            slots.total,
            slots.generated,
        ):
            assert count[row] == end
        assert slots.history[row, length[row] : end].tolist() == new
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
    slots = empty_slots(len(texts))
    slots.reserve_history(max(map(len, texts)) + gamma)
    for row, text in enumerate(texts):
        slots.history[row, : len(text)] = torch.tensor(text)
        slots.total[row] = len(text)
    drafted = prompt_lookup(slots, gamma).tokens
    for row, text in enumerate(texts):
        assert drafted[row].tolist() == continuation(text, gamma)


def continuation(text: list[int], gamma: int) -> list[int]:
    """What prompt lookup drafts, by search."""
    for n in (3, 2, 1):
        if n >= len(text):
            continue
        matches = [end for end in range(n, len(text)) if text[end - n : end] == text[-n:]]
        if matches:
            following = text[matches[-1] :]
            return [following[i % len(following)] for i in range(gamma)]
    return [text[-1]] * gamma


VOCABULARY = 152_064


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [3.0, -3.0, 60_000.0])
def test_large_logits_of_a_large_vocabulary_are_finite(dtype: torch.dtype, value: float) -> None:
    """Their sum is not, in float16."""
    logits = torch.full((2, 1, VOCABULARY), value, dtype=dtype)
    assert is_finite(logits).all()
    for broken in (float("nan"), float("inf"), float("-inf")):
        for place in (0, 1000, VOCABULARY - 1):
            one = logits.clone()
            one[1, 0, place] = broken
            assert is_finite(one).tolist() == [[True], [False]]
