from __future__ import annotations

import os
import time
from pathlib import Path

from jobs.suites import pipeline as suite
from jobs.suites.shared.stubs import load_stub_engine
from std_core.types import Request


def test_what_is_noted_of_the_first_request_stays(tmp_path: Path) -> None:
    mark = tmp_path / "first"
    for _ in range(2):  # engines, one in the place of the other
        engine = load_stub_engine("", max_num_seqs=1, begun=str(mark))
        assert len(list(engine.run([Request("a", "?"), Request("b", "?")], None, "std"))) == 2
        when = os.stat(mark).st_mtime_ns
        os.utime(mark, ns=(when - 10**9, when - 10**9))
    assert os.stat(mark).st_mtime_ns == when - 10**9 and when < time.time_ns() - 5 * 10**8


def test_look_ahead_keeps_the_engine_busier_within_the_bound_and_a_manifest_goes_through(
    ray_cluster: None,
) -> None:
    found = suite.run(["--requests=12", "--seconds=0.2", "--manifest=100", "--videos=20"])
    assert found["engine_busy"] > found["engine_busy_without_lookahead"] > 0
    assert 0 < found["most_bytes_in_flight"] <= found["max_bytes_in_flight"]
    assert (found["manifest_requests"], found["manifest_errors"]) == (100, 0)
    assert 0 < found["first_wave_seconds"] <= found["manifest_seconds"]
