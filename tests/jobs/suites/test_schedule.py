"""The suite `schedule` at a small size, and its summary of known times."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from jobs import benchmark
from jobs.calibration import measure
from jobs.suites import schedule
from jobs.suites.schedule import AnswerSpec, WaveCell, WaveTimes, summarize
from jobs.suites.shared.flags import parse_drafts
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
        grid = measure.CalibrationGrid(
            [90, 180], rows=[1, 2], drafts=parse_drafts("std,ngram"), tokens=3, pairs=1, texts=2
        )
        write_profile(path, measure.measure_profile("llama", "cpu", "float32", grid, 1))
    argv = "--model llama --contexts 128 --rows 1,2 --answers 4,40d --drafts std,ngram --gammas 2"
    size = "--turns 2 --texts 2 --fills 2 --threads 1"
    return schedule.run([*argv.split(), *size.split(), "--profile", path])


def test_every_cell_has_a_choice_and_times(figures: dict[str, Any]) -> None:
    assert [(c["context"], c["rows"], c["length"], c["drawn"]) for c in figures["cells"]] == [
        (128, 1, 4, False), (128, 1, 40, True), (128, 2, 4, False), (128, 2, 40, True),
    ]  # fmt: skip
    assert [c["requests"] for c in figures["cells"]] == [2, 2, 4, 4]
    for cell in figures["cells"]:
        assert cell["measured_s"] > 0 and cell["predicted_s"] > 0
        assert cell["speedup_low"] <= cell["speedup"]
    assert figures["predicted_vs_measured"]["median"] <= figures["predicted_vs_measured"]["p90"]
    assert figures["scheduler_vs_oracle"] > 0 and figures["oracle_winners"] >= 1


def wave_times(seconds: float, admission: float = 0.0) -> WaveTimes:
    """Four waves of ten rows."""
    return WaveTimes([seconds] * 4, [[admission] * 10] * 4)


def known_cell(
    context: int,
    *,
    dense: float,
    small: float,
    large: float,
    chosen: Draft | None,
    predicted: float,
) -> WaveCell:
    times = {
        None: wave_times(dense, 0.1),
        SMALL: wave_times(small, 0.1),
        LARGE: wave_times(large, 0.1),
    }
    options = (
        DraftOption(chosen, 1, seconds_per_request=predicted),
        DraftOption(None, 1, seconds_per_request=dense / 10),
    )
    return WaveCell(
        context,
        slots=1,
        answer=AnswerSpec(10),
        requests=10,
        times=times,
        options=options,
        planned=times[chosen],
    )


def test_summary_of_known_times() -> None:
    cells = [
        known_cell(1, dense=10.0, small=20.0, large=20.0, chosen=None, predicted=1.0),
        known_cell(2, dense=30.0, small=10.0, large=20.0, chosen=SMALL, predicted=1.2),
        known_cell(3, dense=30.0, small=20.0, large=10.0, chosen=SMALL, predicted=2.0),
    ]
    found = summarize(cells, [None, SMALL, LARGE])
    assert found["oracle_winners"] == 3 and found["failed"] is None
    assert found["chosen_keeps"] == [SMALL.keep]
    assert found["oracle_vs_best_fixed"] == round(50 / 30, 3)
    assert found["scheduler_vs_best_fixed"] == round(50 / 40, 3)
    assert found["scheduler_vs_oracle"] == 0.75
    assert found["predicted_vs_measured"] == {"median": 0.0, "p90": 0.2}
    assert [c["speedup"] for c in found["cells"]] == [1.0, 3.0, 1.5]
    one_winner = summarize(cells[:1], [None, SMALL, LARGE])
    assert "1 settings are the best" in one_winner["failed"]


def test_uninformative_figures_exit_with_1(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(schedule, "run", lambda argv: {"failed": "the cells are uninformative"})
    assert benchmark.main(["--suite", "schedule"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) and "uninformative" in captured.err + caplog.text


def test_one_time_costs_of_a_draft_count() -> None:
    cell = known_cell(1, dense=10.0, small=5.0, large=20.0, chosen=SMALL, predicted=1.0)
    costly = replace(cell, planned=wave_times(5.0, 0.6))
    assert costly.planned_s == 10.0 and costly.speedup() == (1.0, 1.0)
    noise = replace(cell, planned=wave_times(5.0, 0.05))  # no draft admits faster than dense
    assert noise.planned_s == 5.0


def test_too_many_cells_are_an_error() -> None:
    with pytest.raises(UsageError, match="at most 12 cells"):
        benchmark.main(["--suite", "schedule", "--contexts", "1,2,3,4", "--rows", "1,2,3,4"])
