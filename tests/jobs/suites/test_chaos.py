"""The suite `chaos` at a small size, and its comparison of two runs."""

from __future__ import annotations

from typing import Any

from jobs.suites import chaos

SMALL = [
    "--requests=200",
    "--clips=10",
    "--max-tokens=8",
    # each kill starts Ray and PyTorch again; the second one hits a run that has resumed
    "--driver-kills=2",
    "--engine-kills=3",
    "--decoder-kills=4",
    "--seed=1",
    "--part=8",
]


def row(
    number: int, text: str = "a", status: str = "success", code: str | None = None
) -> dict[str, Any]:
    return {"request_id": str(number), "text": text, "status": status, "error_code": code}


def counts(figures: dict[str, Any]) -> dict[str, int]:
    names = ("requests", "lost", "duplicated", "changed", "wrongly_blamed")
    return {name: figures[name] for name in names}


def test_differences_of_two_runs_are_counted() -> None:
    undisturbed = [row(i) for i in range(5)] + [row(9, "", "error", "not_found")]
    disturbed = [
        row(0),
        row(1),
        row(1),
        row(2, "b"),
        row(3, "", "error", "worker_killed"),
        row(9, "", "error", "not_found"),
    ]
    found = chaos.compare(undisturbed, disturbed)
    assert counts(found) == {
        "requests": 6,
        "lost": 1,
        "duplicated": 1,
        "changed": 1,
        "wrongly_blamed": 1,
    }
    assert found["blamed_for"] == {"worker_killed": 1, "not_found": 1}


def test_no_row_is_lost_duplicated_changed_or_wrongly_blamed(capfd: Any) -> None:
    found = chaos.run(SMALL)
    assert counts(found) == {
        "requests": 200,
        "lost": 0,
        "duplicated": 0,
        "changed": 0,
        "wrongly_blamed": 0,
    }, found
    assert found["driver_kills"] == 2
    assert found["engine_kills"] >= 2 and found["decoder_kills"] >= 2
    assert found["calls"]["passed"] < 0.95 * found["calls"]["calls"]
    assert found["texts"] > 10
