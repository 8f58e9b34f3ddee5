"""Segments of loops that take turns: where they end, and that they write what the dense loop
writes."""

from __future__ import annotations

from pathlib import Path

from jobs.suites.acceptance import subjects
from jobs.suites.shared.paired_timing import Pair
from std_core.types import Draft

GAMMA = 4
TOKENS = 6
ROWS = 3


def test_rows_together_write_their_tokens(tmp_path: Path) -> None:
    """Three rows of which a lookup foretells some more than others."""
    engine = subjects.engine_of("llama", tmp_path, 1)
    engine.max_num_seqs = ROWS
    asked = subjects.subject(engine.checkpoint, 60, range(ROWS), 80)
    pair = Pair(engine, asked.requests, asked.prepare, Draft("ngram", gamma=GAMMA))
    for turn in (1, 2):
        before = sum(map(len, pair.written))
        pair.once(TOKENS)
        assert TOKENS * ROWS <= sum(map(len, pair.written)) - before <= (TOKENS + GAMMA) * ROWS
        assert len(pair.dense.per_token) == len(pair.drafted.per_token) == turn
    assert not pair.diverged
    assert sum(pair.drafted.kept) == sum(map(len, pair.written))
