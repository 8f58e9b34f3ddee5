"""The suite `pipeline` at a small size."""

from __future__ import annotations

import os
import time
from pathlib import Path

from jobs.suites import pipeline as suite
from jobs.suites.shared.stubs import load_stub_engine
from std_core.types import Request


def test_only_the_first_request_of_all_engines_touches_the_file(tmp_path: Path) -> None:
    first_request = tmp_path / "first"
    for _ in range(2):  # an engine and its replacement
        engine = load_stub_engine("", max_num_seqs=1, first_request_file=str(first_request))
        assert len(list(engine.run([Request("a", "?"), Request("b", "?")], None, "std"))) == 2
        touched = os.stat(first_request).st_mtime_ns
        os.utime(first_request, ns=(touched - 10**9, touched - 10**9))
    assert os.stat(first_request).st_mtime_ns == touched - 10**9
    assert touched < time.time_ns() - 5 * 10**8


def test_lookahead_keeps_the_engine_busier_within_the_bound_and_a_manifest_is_answered(
    ray_cluster: None,
) -> None:
    found = suite.run(["--requests=12", "--seconds=0.2", "--manifest=100", "--videos=20"])
    assert found["engine_busy"] > found["engine_busy_without_lookahead"] > 0
    assert 0 < found["most_bytes_in_flight"] <= found["max_bytes_in_flight"]
    assert (found["manifest_requests"], found["manifest_errors"]) == (100, 0)
    assert 0 < found["first_wave_seconds"] <= found["manifest_seconds"]
