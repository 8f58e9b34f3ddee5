"""float16: every family and draft; a vocabulary whose logits add up to more than it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.suites.shared.random_models import (
    SpecialTokens,
    TextSize,
    TokenIdCheckpoint,
    config_of,
    random_model,
)
from jobs.suites.shared.tiny_models import FAMILIES
from pipeline.config import parse_job
from std_core.engine.engine import Engine
from std_core.model.checkpoint import ModelInputs
from std_core.model.model import Model
from std_core.types import Draft, Request, Sampling

STRICT = 5
DRAFTS = [
    Draft("std", gamma=4),
    Draft("snapkv", gamma=2, refresh=1),
    Draft("specvlm", gamma=2),
    Draft("full", weights="int8", gamma=3),
    Draft("full", weights="int4", gamma=3),
    Draft("full", channels=0.5, gamma=2),
    Draft("full", depth=0.7, gamma=2),
    Draft("ngram", gamma=2),
]
SAMPLINGS = [
    Sampling(12, temperature=0.0, repetition_penalty=1.1),
    Sampling(9, temperature=0.8, top_p=0.9, top_k=50, seed=1),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_text(family: str, families: Callable[[str], Path]) -> None:
    """Under `strict`, as in bfloat16."""
    engine = Engine.load(str(families(family)), dtype="float16", max_num_seqs=2, strict=STRICT)
    assert engine.model.new_cache(1).key[0].dtype == torch.float16
    rng = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (4, 56, 56, 3), generator=rng, dtype=torch.uint8)
    requests = [
        Request(
            str(n),
            "red square " * (1 + 40 * n),
            frames if engine.checkpoint.supports_video else None,
            sampling=sampling,
        )
        for n, sampling in enumerate(SAMPLINGS)
    ]
    dense = {r.request_id: r for r in engine.run(requests, None)}
    assert [r.error for r in dense.values()] == [None, None]
    assert all(len(set(r.token_ids)) > 2 for r in dense.values())
    for draft in DRAFTS:
        for result in engine.run(requests, draft):
            assert result.token_ids == dense[result.request_id].token_ids, draft
            assert result.error is None


@pytest.mark.parametrize("draft", [None, Draft("full", weights="int8", gamma=3), Draft(gamma=2)])
def test_logits_whose_sum_overflows_are_no_error(draft: Draft | None) -> None:
    size = TextSize(
        hidden=32,
        intermediate=64,
        layers=2,
        heads=2,
        kv_heads=1,
        vocabulary=152_064,
        window=1024,
        initializer_range=0.2,
    )
    config = config_of("llama", size, None, SpecialTokens())
    hf: Any = random_model(config, dtype=torch.float16)
    with torch.no_grad():
        # all logits of a position have one sign
        hf.get_output_embeddings().weight.copy_(torch.rand(152_064, 1) * torch.ones(1, 32) + 0.5)
    engine = Engine(Model(hf), TokenIdCheckpoint(1024))  # type: ignore[arg-type]
    ids = torch.arange(10, 90)[None]
    inputs = ModelInputs(ids, torch.zeros_like(ids))
    assert not engine.model.prompt_logits(inputs).sum().isfinite()
    requests = [Request(str(n), "", sampling=replace(s, stop=())) for n, s in enumerate(SAMPLINGS)]
    for result in engine.run(requests, draft, lambda request: inputs):
        assert result.error is None
        assert result.finish_reason in ("stop", "length")


def test_logits_that_are_not_finite_are_an_error(families: Callable[[str], Path]) -> None:
    engine = Engine.load(str(families("llama")), dtype="float16")
    with torch.no_grad():
        engine.model.head.weight[7] = 60_000.0  # the logit is above float16's range
    (result,) = engine.run([Request("0", "red", sampling=SAMPLINGS[0])], None)
    assert result.error is not None
    assert result.error.code == "nan_logits"


def test_jobs_take_it_and_refuse_other_dtypes(families: Callable[[str], Path]) -> None:
    assert parse_job(["--input", "x", "--dtype", "float16"], "caption").dtype == "float16"
    with pytest.raises(ValueError, match="dtype is 'float8'"):
        Engine.load(str(families("llama")), dtype="float8")  # type: ignore[arg-type]
