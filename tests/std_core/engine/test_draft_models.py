"""Drafts with other weights: second models, and cheaper copies of the model itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs.demo_model import model as demo_model
from std_core.engine.engine import Engine
from std_core.types import Draft, Request, Result, Sampling

Tokens = dict[str, list[int]]  # by request id


def tokens_by_id(results: Iterable[Result]) -> Tokens:
    return {result.request_id: result.token_ids for result in results}


@pytest.fixture(scope="session")
def second_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model with the same tokenizer and other sizes."""
    folder = tmp_path_factory.mktemp("second")
    torch.manual_seed(11)
    words = demo_model.tokenizer()
    model = demo_model.build("demo", words)
    text = model.config.text_config
    text.num_hidden_layers = 2
    text.hidden_size = 96
    text.intermediate_size = 128
    text.num_attention_heads = 3
    text.num_key_value_heads = 1
    text.layer_types = text.layer_types[:2]
    model.config.vision_config.hidden_size = 96
    demo_model.save(type(model)(model.config).float(), words, folder)
    return folder


def test_a_second_models_draft_changes_no_token(
    engine: Engine, requests: list[Request], expected: Tokens, second_model: Path
) -> None:
    draft = Draft("specvlm", keep=0.3, gamma=4, model=str(second_model))
    results = list(engine.run(requests, draft))
    assert tokens_by_id(results) == expected
    assert all(r.weight_keep < 0.4 and r.kv_keep < 1 for r in results)


def test_the_model_as_its_own_second_model_is_always_accepted(
    engine: Engine, requests: list[Request], tiny_model: Path
) -> None:
    """Its cache has no entries of rejected tokens, and none is missing after full acceptance."""
    sampling = Sampling(24, temperature=0.9, seed=3)
    sampled = [replace(r, request_id=r.request_id + "s", sampling=sampling) for r in requests]
    draft = Draft("std", keep=1.0, gamma=4, model=str(tiny_model))
    results = list(engine.run([*requests, *sampled], draft))
    assert sum(r.proposed for r in results) > 50
    assert [r.accepted for r in results] == [r.proposed for r in results]


def test_second_models_with_another_tokenizer_are_refused(
    engine: Engine, tmp_path: Path, requests: list[Request]
) -> None:
    words = demo_model.tokenizer()
    words.add_tokens(["<another>"])
    model = demo_model.build("demo", words)
    demo_model.save(model, words, tmp_path)
    with pytest.raises(ValueError, match="tokenizers differ"):
        next(engine.run(requests, Draft("specvlm", model=str(tmp_path))))


def test_weight_keep_is_the_share_of_bytes(engine: Engine, requests: list[Request]) -> None:
    """Against float32: an eighth of the bytes at 4 bits, a quarter at 8, and their scales."""
    drafts = {
        "int8": Draft("full", weights="int8"),
        "int4": Draft("full", weights="int4"),
        "channels": Draft("full", channels=0.5),
        "depth": Draft("full", depth=0.4),
        "full": Draft("std"),
        "ngram": Draft("ngram"),
    }
    keep = {
        name: next(engine.run(requests[:1], draft)).weight_keep for name, draft in drafts.items()
    }
    assert keep["full"] == 1.0
    assert keep["ngram"] == 0.0
    assert 0.25 < keep["int8"] < 0.27
    assert 0.125 < keep["int4"] < 0.2
    # all of the head is read
    assert 0.5 < keep["channels"] < 0.57
    assert 0.4 < keep["depth"] < 0.47
