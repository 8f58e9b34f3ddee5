"""The suite `schedule` at a small size, and its judgement of figures that are known."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from jobs import benchmark
from jobs.calibration import measure
from jobs.suites import schedule
from jobs.suites.schedule import Answer, Cell, Timed, count_accepted_rejected
from pipeline.plan.profile_file import write_profile
from pipeline.records import DraftOption, UsageError
from std_core.types import Draft

SMALL = Draft("std", gamma=2)
LARGE = Draft("ngram", gamma=5)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = str(tmp_path_factory.mktemp("profile") / "profile.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(measure.BANDWIDTH_GIGABYTES, "cpu", 0.02)
        grid = measure.Grid(
            [90, 180],
            rows=[1, 2],
            drafts=measure.parse_drafts("std,ngram"),
            tokens=3,
            pairs=1,
            texts=2,
        )
        write_profile(path, measure.measure_profile("llama", "cpu", "float32", grid, 1))
    words = [
        "--model",
        "llama",
        "--contexts",
        "128",
        "--rows",
        "1,2",
        "--answers",
        "4,40d",
        "--drafts",
        "std,ngram",
    ]
    small = [
        "--gammas",
        "2",
        "--turns",
        "2",
        "--texts",
        "2",
        "--fills",
        "2",
        "--threads",
        "1",
        "--profile",
        path,
    ]
    return schedule.run([*words, *small])


def test_every_cell_has_its_choice_and_its_times(figures: dict[str, Any]) -> None:
    assert [(c["context"], c["rows"], c["length"], c["drawn"]) for c in figures["cells"]] == [
        (128, 1, 4, False), (128, 1, 40, True), (128, 2, 4, False), (128, 2, 40, True),
    ]  # fmt: skip
    assert [c["requests"] for c in figures["cells"]] == [2, 2, 4, 4]
    for cell in figures["cells"]:
        assert (
            cell["measured_s"] > 0
            and cell["predicted_s"] > 0
            and cell["speedup_low"] <= cell["speedup"]
        )
    assert figures["predicted_vs_measured"]["median"] <= figures["predicted_vs_measured"]["p90"]
    assert figures["scheduler_vs_oracle"] > 0 and figures["oracle_winners"] >= 1


def timed(seconds: float, once: float = 0.0) -> Timed:
    """Four waves of ten rows."""
    return Timed([seconds] * 4, [[once] * 10] * 4)


def cell(
    context: int, dense: float, small: float, large: float, chosen: Draft | None, predicted: float
) -> Cell:
    times = {None: timed(dense, 0.1), SMALL: timed(small, 0.1), LARGE: timed(large, 0.1)}
    ways = (
        DraftOption(chosen, 1, seconds_per_request=predicted),
        DraftOption(None, 1, seconds_per_request=dense / 10),
    )
    return Cell(
        context, rows=1, answer=Answer(10), count=10, times=times, ways=ways, plan=times[chosen]
    )


def test_known_figures_are_judged() -> None:
    cells = [
        cell(1, 10.0, 20.0, 20.0, chosen=None, predicted=1.0),
        cell(2, 30.0, 10.0, 20.0, chosen=SMALL, predicted=1.2),
        cell(3, 30.0, 20.0, 10.0, chosen=SMALL, predicted=2.0),
    ]
    found = count_accepted_rejected(cells, [None, SMALL, LARGE])
    assert found["oracle_winners"] == 3 and found["failed"] is None
    assert found["oracle_vs_best_fixed"] == round(50 / 30, 3)
    assert found["scheduler_vs_best_fixed"] == round(50 / 40, 3)
    assert found["scheduler_vs_oracle"] == 0.75
    assert found["predicted_vs_measured"] == {"median": 0.0, "p90": 0.2}
    assert [c["speedup"] for c in found["cells"]] == [1.0, 3.0, 1.5]
    assert (
        "1 settings are the best"
        in count_accepted_rejected(cells[:1], [None, SMALL, LARGE])["failed"]
    )


def test_a_suite_whose_figures_are_no_answer_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schedule, "run", lambda argv: {"failed": "the cells are uninformative"})
    assert benchmark.main(["--suite", "schedule"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out) and "uninformative" in told.err


def test_what_a_draft_costs_a_request_counts() -> None:
    known = replace(cell(1, 10.0, 5.0, 20.0, chosen=SMALL, predicted=1.0), plan=timed(5.0, 0.6))
    assert known.seconds(known.plan, 0) == 10.0 and known.speedup() == (1.0, 1.0)
    quick = replace(known, plan=timed(5.0, 0.05))  # noise: nothing that drafts comes sooner
    assert quick.seconds(quick.plan, 0) == 5.0


def test_wrong_flags_are_named() -> None:
    with pytest.raises(UsageError, match="at most 12 cells"):
        benchmark.main(["--suite", "schedule", "--contexts", "1,2,3,4", "--rows", "1,2,3,4"])
