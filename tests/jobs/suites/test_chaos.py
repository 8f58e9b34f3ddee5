from __future__ import annotations

from typing import Any

from jobs.suites import chaos

SMALL = [
    "--requests=200",
    "--clips=10",
    "--max-tokens=8",
    # each is a start more of Ray and PyTorch; the second one hits a run that resumes
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


def test_the_suite_counts_what_went_wrong() -> None:
    peace = [row(i) for i in range(5)] + [row(9, "", "error", "not_found")]
    storm = [
        row(0),
        row(1),
        row(1),
        row(2, "b"),
        row(3, "", "error", "worker_killed"),
        row(9, "", "error", "not_found"),
    ]
    found = chaos.compare(peace, storm)
    assert {
        k: found[k] for k in ("requests", "lost", "duplicated", "changed", "wrongly_blamed")
    } == {
        "requests": 6,
        "lost": 1,
        "duplicated": 1,
        "changed": 1,
        "wrongly_blamed": 1,
    }
    assert found["blamed_for"] == {"worker_killed": 1, "not_found": 1}


def test_nothing_is_lost_doubled_changed_or_wrongly_blamed(capfd: Any) -> None:
    found = chaos.run(SMALL)
    assert {
        k: found[k] for k in ("requests", "lost", "duplicated", "changed", "wrongly_blamed")
    } == {
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
