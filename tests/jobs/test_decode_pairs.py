"""Segments of loops that take turns: where they end, and that they write what the dense loop writes."""

from __future__ import annotations

from pathlib import Path

import pytest

import acceptance_subjects as subjects
from decode_pairs import Pair
from std_core.types import Draft

GAMMA, TOKENS, ROWS = 4, 6, 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Three rows of which a lookup foretells some more than others."""
    engine = subjects.engine_of("llama", Path(tmp_path_factory.mktemp("model")), 1)
    engine.max_num_seqs = ROWS
    asked = subjects.subject(engine.checkpoint, 60, range(ROWS), 80)
    return Pair(engine, asked.requests, asked.prepare, Draft("ngram", gamma=GAMMA), each=True)


def test_each_row_writes_its_tokens_and_waits(pair: Pair) -> None:
    for turn in (1, 2):
        before = [len(row) for row in pair.written]
        pair.once(TOKENS)
        new = [len(row) - n for row, n in zip(pair.written, before, strict=True)]
        assert all(TOKENS <= count <= TOKENS + GAMMA for count in new)
        assert len(pair.dense.per_token) == len(pair.drafted.per_token) == turn
        assert bool(pair.slots.active.all())
    assert not pair.diverged
    assert sum(kept for kept in pair.drafted.kept) == sum(map(len, pair.written))


def test_otherwise_all_together_write_theirs(pair: Pair) -> None:
    pair.each = False
    before = sum(map(len, pair.written))
    pair.once(TOKENS)
    assert TOKENS * ROWS <= sum(map(len, pair.written)) - before <= (TOKENS + GAMMA) * ROWS
    assert not pair.diverged
