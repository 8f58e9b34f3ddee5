"""Teacher-forced agreement of a draft with the full model's texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs.calibration import agreement
from jobs.calibration.agreement import IGNORED, Prepare, Texts
from jobs.suites.shared import workload
from std_core.cost_model.acceptance import count_accepted_rejected
from std_core.engine.engine import Engine
from std_core.types import Draft, Request

Case = tuple[Engine, list[Request], Prepare, Texts]


def captions_of(model: str, folder: Path) -> Case:
    """Captions of different lengths, and a model's texts."""
    engine = workload.load_engine(model, folder, 1)
    whole = workload.build_workload(
        engine.checkpoint, 200, range(3), 80, stagger=0, scene_counts=(4,)
    )
    engine = replace(engine, max_num_seqs=2, prefixes=workload.empty_prefix_store(engine, 3))
    captions = [
        replace(request, sampling=replace(request.sampling, max_tokens=50 + 7 * number))
        for number, request in enumerate(workload.requests_of_kind(whole, "caption"))
    ]
    texts = agreement.write_texts(engine, captions, whole.prepare)
    return engine, captions, whole.prepare, texts


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The untrained model, whose drafts are often wrong."""
    return captions_of("qwen2_vl", tmp_path_factory.mktemp("model"))


def test_a_draft_that_keeps_everything_agrees_everywhere(case: Case) -> None:
    engine, captions, prepare, texts = case
    found = agreement.measure_agreement(
        engine, captions, prepare, texts=texts, draft=Draft("std"), keep=1.0, context=200
    )
    assert found.agreed == found.tokens == sum(len(text) - 1 for text in texts.values())


def test_one_pass_predicts_what_token_by_token_does(case: Case) -> None:
    engine, captions, prepare, texts = case
    draft = Draft("random", keep=0.1)

    def predicted(step_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return agreement.predict_texts(
            engine,
            captions[:2],
            prepare,
            texts=[texts[request.request_id] for request in captions[:2]],
            draft=draft,
            step_tokens=step_tokens,
        )

    at_once, true = predicted(64)
    one_by_one, same = predicted(1)
    assert torch.equal(true, same)
    inside = true != IGNORED
    assert torch.equal(at_once[inside], one_by_one[inside])
    assert (at_once[inside] != true[inside]).any()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return captions_of("demo", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("keep", [0.05, 0.5])
def test_agreement_is_near_the_acceptance_of_rounds(trained: Case, keep: float) -> None:
    """Rounds correct the draft's entries after each rejection; one pass does not."""
    engine, captions, prepare, texts = trained
    draft = Draft("std", keep=keep, gamma=3)
    found = agreement.measure_agreement(
        engine, captions, prepare, texts=texts, draft=draft, keep=keep, context=200
    )
    results = list(engine.run(captions, draft, prepare))
    accepted, rejected = map(sum, count_accepted_rejected(results))
    assert found.agreed / found.tokens == pytest.approx(accepted / (accepted + rejected), abs=0.1)


@pytest.mark.parametrize(
    ("draft", "free"),
    [
        (Draft("std"), True),
        (Draft("specvlm", weights="int8"), True),
        (Draft("std", k=64), False),
        (Draft("full", weights="int4"), False),
        (Draft("ngram"), False),
        (Draft("std", model="x"), False),
    ],
)
def test_drafts_whose_keep_can_be_chosen(draft: Draft, free: bool) -> None:
    assert agreement.can_choose_keep(draft) == free


def test_an_empty_text_is_left_out(case: Case, tmp_path: Path) -> None:
    engine, captions, prepare, _ = case
    short = [replace(captions[0], sampling=replace(captions[0].sampling, max_tokens=1))]
    assert agreement.write_texts(engine, short, prepare) == {}
    found = agreement.measure_agreement(
        engine, short, prepare, texts={}, draft=Draft("std"), keep=0.5, context=200
    )
    assert (found.agreed, found.tokens) == (0, 0)
