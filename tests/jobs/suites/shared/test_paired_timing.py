"""Segments of loops that take turns: where they end, and that their tokens are the dense loop's."""

from __future__ import annotations

from pathlib import Path

from jobs.suites.shared.paired_timing import PairedLoops
from jobs.suites.shared.workload import build_workload, load_engine
from std_core.types import Draft

GAMMA = 4
TOKENS = 6
ROWS = 3


def test_a_segment_ends_when_rows_have_its_tokens_on_average(tmp_path: Path) -> None:
    """Prompt lookup gains more on some of the three rows than on others."""
    engine = load_engine("llama", tmp_path, 1)
    engine.max_num_seqs = ROWS
    workload = build_workload(engine.checkpoint, 60, range(ROWS), 80)
    loops = PairedLoops(engine, workload.requests, workload.prepare, Draft("ngram", gamma=GAMMA))
    for segments in (1, 2):
        before = sum(map(len, loops.written))
        loops.run_segments(TOKENS)
        written = sum(map(len, loops.written)) - before
        assert TOKENS * ROWS <= written <= (TOKENS + GAMMA) * ROWS
        assert len(loops.dense.per_token) == len(loops.drafted.per_token) == segments
    assert not loops.diverged
    assert sum(loops.drafted.kept) == sum(map(len, loops.written))
