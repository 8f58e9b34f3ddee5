"""Retrieval by drafts whose text nothing verifies."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.calibration import measure, retrieval
from jobs.suites.shared.flags import parse_drafts
from jobs.suites.shared.workload import load_engine
from std_core.types import Draft


def test_the_demo_model_retrieves_with_most_entries_and_not_with_the_newest(
    tmp_path: Path,
) -> None:
    engine = load_engine("demo", tmp_path, 1)
    most = Draft("std", keep=0.8, gamma=3)
    newest = Draft("window", keep=0.02, gamma=3)
    found = retrieval.measure_retrieval(engine, [most, newest], 384)
    assert {r.questions for r in found.values()} == {retrieval.CONTEXTS * retrieval.QUESTIONS}
    assert found[most].dense_correct >= 29 and found[most].passes
    assert found[newest].draft_correct < 20 and not found[newest].passes


def test_each_key_is_stated_once_in_the_prose_and_asked_for_at_its_end(tmp_path: Path) -> None:
    engine = load_engine("llama", tmp_path, 1)
    questions = retrieval.draw_questions(engine.checkpoint, 300)
    assert len(questions) == retrieval.CONTEXTS * retrieval.QUESTIONS
    for question in questions:
        text = engine.checkpoint.tokenizer.decode(question.inputs.ids[0])
        door = text.split()[-3]
        assert text.count(f"The key of the {door} door is {question.answer}.") == 1
        assert text.endswith(f"The key of the {door} door is") and len(question.inputs.ids[0]) > 300
    found = retrieval.measure_retrieval(engine, [Draft("std", keep=0.5)], 300)
    assert all(0 <= r.draft_correct <= r.questions for r in found.values())


def test_calibration_measures_retrieval_of_drafts_that_can_stand_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(measure.BANDWIDTH_GIGABYTES, "cpu", 0.02)
    grid = measure.CalibrationGrid(
        [300], rows=[1], drafts=parse_drafts("std,ngram"), tokens=3, pairs=1, retrieval=True
    )
    std, ngram = measure.measure_profile("llama", "cpu", "float32", grid, 1).drafts
    assert [r.context for r in std.retrieval_scores] == [300] and not ngram.retrieval_scores
