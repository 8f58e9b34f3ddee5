"""Retrieval by drafts that nothing verifies."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.calibration import measure, retrieval
from jobs.suites.acceptance.subjects import engine_of
from std_core.types import Draft


def test_the_demo_model_finds_scenes_with_most_of_a_clip_and_not_with_its_end(
    tmp_path: Path,
) -> None:
    engine = engine_of("demo", tmp_path, 1)
    most = Draft("std", keep=0.8, gamma=3)
    end = Draft("window", keep=0.02, gamma=3)
    found = retrieval.measured(engine, [most, end], 384)
    assert {r.questions for r in found.values()} == {retrieval.SUBJECTS * retrieval.ASKED}
    assert found[most].dense_correct >= 29 and found[most].passes
    assert found[end].draft_correct < 20 and not found[end].passes


def test_keys_are_told_once_each_somewhere_in_the_prose_and_asked_for_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("llama", tmp_path, 1)
    asked = retrieval.questions(engine.checkpoint, 300)
    assert len(asked) == retrieval.SUBJECTS * retrieval.ASKED
    for question in asked:
        text = engine.checkpoint.tokenizer.decode(question.inputs.ids[0])
        door = text.split()[-3]
        assert text.count(f"The key of the {door} door is {question.answer}.") == 1
        assert text.endswith(f"The key of the {door} door is") and len(question.inputs.ids[0]) > 300
    one = retrieval.measured(engine, [Draft("std", keep=0.5)], 300)
    assert all(0 <= r.draft_correct <= r.questions for r in one.values())


def test_a_calibration_tries_the_drafts_that_may_stand_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(measure.BANDWIDTH_GIGABYTES, "cpu", 0.02)
    grid = measure.Grid(
        [300], rows=[1], drafts=measure.parse_drafts("std,ngram"), tokens=3, pairs=1, retrieval=True
    )
    std, ngram = measure.measure_profile("llama", "cpu", "float32", grid, 1).drafts
    assert [r.context for r in std.retrieval_scores] == [300] and not ngram.retrieval_scores
