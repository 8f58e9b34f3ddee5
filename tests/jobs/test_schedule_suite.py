"""The suite `schedule` at a small size, and its judgement of figures that are known."""

from __future__ import annotations

import json
from typing import Any

import benchmark
import pytest

import calibration
from pipeline.profile import write_profile
from pipeline.types import Candidate, UsageError
from std_core.types import Draft
from suites import schedule
from suites.schedule import Answer, Cell, Timed, judged

SMALL, LARGE = Draft("std", gamma=2), Draft("ngram", gamma=5)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = str(tmp_path_factory.mktemp("profile") / "profile.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(calibration.GIGABYTES, "cpu", 0.02)
        grid = calibration.Grid([90, 180], [1, 2], calibration.presets("std,ngram"), 3, 1)
        write_profile(path, calibration.measure("llama", "cpu", "float32", grid, 1))
    words = ["--model", "llama", "--contexts", "128", "--rows", "1,2", "--answers", "4,8d", "--drafts", "std,ngram"]
    small = ["--gammas", "2", "--tokens", "3", "--pairs", "4", "--texts", "2", "--threads", "1", "--profile", path]
    return schedule.run([*words, *small])


def test_every_cell_has_its_choice_and_its_times(figures: dict[str, Any]) -> None:
    assert [(c["context"], c["rows"], c["length"], c["drawn"]) for c in figures["cells"]] == [
        (128, 1, 4, False), (128, 1, 8, True), (128, 2, 4, False), (128, 2, 8, True),
    ]  # fmt: skip
    for cell in figures["cells"]:
        assert cell["measured_s"] > 0 and cell["predicted_s"] > 0 and cell["speedup_low"] <= cell["speedup"]
    assert figures["predicted_vs_measured"]["median"] <= figures["predicted_vs_measured"]["p90"]
    assert figures["scheduler_vs_oracle"] > 0 and figures["oracle_winners"] >= 1


def cell(context: int, dense: float, small: float, large: float, chosen: Draft | None, predicted: float) -> Cell:
    times: dict[Draft | None, Timed] = {
        SMALL: Timed(0.0, [dense] * 4, [small] * 4),
        LARGE: Timed(0.0, [dense] * 4, [large] * 4),
    }
    return Cell(
        context, 1, Answer(10), times, (Candidate(chosen, 1, seconds=predicted), Candidate(None, 1, seconds=10 * dense))
    )


def test_known_figures_are_judged() -> None:
    cells = [
        cell(1, 1.0, 2.0, 2.0, None, 10.0),
        cell(2, 3.0, 1.0, 2.0, SMALL, 12.0),
        cell(3, 3.0, 2.0, 1.0, SMALL, 20.0),
    ]
    found = judged(cells, [None, SMALL, LARGE])
    assert found["oracle_winners"] == 3 and found["failed"] is None
    assert found["oracle_vs_best_fixed"] == round(50 / 30, 3)
    assert found["scheduler_vs_best_fixed"] == round(50 / 40, 3)
    assert found["scheduler_vs_oracle"] == 0.75
    assert found["predicted_vs_measured"] == {"median": 0.0, "p90": 0.2}
    assert [c["speedup"] for c in found["cells"]] == [1.0, 3.0, 1.5]
    assert "1 settings are the best" in judged(cells[:1], [None, SMALL, LARGE])["failed"]


def test_a_suite_whose_figures_are_no_answer_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schedule, "run", lambda argv: {"failed": "the cells are uninformative"})
    assert benchmark.main(["--suite", "schedule"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out) and "uninformative" in told.err


def test_batches_of_a_cell_count_alike() -> None:
    found = Timed.mean([Timed(1.0, [2.0, 4.0], [1.0, 1.0]), Timed(3.0, [4.0, 2.0], [3.0, 5.0])])
    assert found == Timed(2.0, [3.0, 3.0], [2.0, 3.0])


def test_one_time_costs_count() -> None:
    known = cell(1, 1.0, 0.5, 2.0, SMALL, 1.0)
    known.times[SMALL].once = 5.0
    assert known.seconds(SMALL, 0) == 10.0 and known.speedup(SMALL) == (1.0, 1.0)


def test_wrong_flags_are_named() -> None:
    with pytest.raises(UsageError, match="at most 12 cells"):
        benchmark.main(["--suite", "schedule", "--contexts", "1,2,3,4", "--rows", "1,2,3,4"])
