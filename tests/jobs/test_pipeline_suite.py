from __future__ import annotations

from suites import pipeline as suite


def test_look_ahead_keeps_the_engine_busier_within_the_bound_and_a_manifest_goes_through(ray_cluster: None) -> None:
    found = suite.run(["--requests=12", "--seconds=0.2", "--manifest=300", "--videos=40"])
    assert found["engine_busy"] > found["engine_busy_without_lookahead"] > 0
    assert 0 < found["most_bytes_in_flight"] <= found["max_bytes_in_flight"]
    assert (found["manifest_requests"], found["manifest_errors"]) == (300, 0)
    assert 0 < found["first_wave_seconds"] <= found["manifest_seconds"]
