"""The engine against Hugging Face's `generate`, and what becomes of requests that cannot be answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from std_core import cache, decode
from std_core.engine import Engine
from std_core.types import Draft, Request, Sampling

POLICIES = {
    "dense": None,
    "std": Draft("std", keep=0.2, gamma=5),
    "std_k3": Draft("std", k=3, gamma=1),
    "random": Draft("random", keep=0.2, gamma=3),
    "full": Draft("full", gamma=7),
}


@pytest.fixture(scope="session")
def expected(engine: Engine, requests: list[Request], generate: Callable[[Engine, Request], list[int]]) -> dict:
    return {r.request_id: generate(engine, r) for r in requests}


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_generate(engine: Engine, requests: list[Request], expected: dict, policy: str) -> None:
    results = list(engine.run(requests, POLICIES[policy]))
    assert {r.request_id: r.token_ids for r in results} == expected
    assert len(results) == len(requests)


def test_a_draft_that_keeps_everything_is_always_accepted(engine: Engine, requests: list[Request]) -> None:
    results = list(engine.run(requests, Draft("full", gamma=4)))
    assert sum(r.proposed for r in results) > 50
    assert [r.accepted for r in results] == [r.proposed for r in results]


def test_it_would_not_be_if_verified_values_did_not_replace_drafted_ones(
    engine: Engine, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unmirrored(cache.DecodeStep):
        def __init__(self, full: cache.Cache, lengths: torch.Tensor, mirror: object = None):
            super().__init__(full, lengths)

    monkeypatch.setattr(decode, "DecodeStep", Unmirrored)
    results = list(engine.run(requests, Draft("full", gamma=4)))
    assert sum(r.accepted for r in results) < sum(r.proposed for r in results)


def test_a_round_can_reject(engine: Engine, requests: list[Request], expected: dict) -> None:
    """Else the comparison with `generate` would prove nothing about rejections."""
    results = list(engine.run(requests, Draft("random", k=1, gamma=6)))
    assert sum(r.accepted for r in results) < sum(r.proposed for r in results)
    assert {r.request_id: r.token_ids for r in results} == expected


def test_a_stop_id_inside_a_draft_ends_the_row_there(engine: Engine, requests: list[Request], expected: dict) -> None:
    longest = max(expected, key=lambda name: len(expected[name]))
    tokens = expected[longest]
    stop = next(t for t in tokens[3:] if tokens.index(t) >= 3)
    request = next(r for r in requests if r.request_id == longest)
    before = engine._stop_ids
    try:
        engine._stop_ids = torch.tensor([stop])
        (result,) = engine.run([request], Draft("full", gamma=12))
    finally:
        engine._stop_ids = before
    assert result.token_ids == tokens[: tokens.index(stop) + 1]
    assert result.finish_reason == "stop"


def test_accounts_of_a_result(engine: Engine, requests: list[Request]) -> None:
    draft = Draft("std", keep=0.25, gamma=5)
    for result in engine.run(requests, draft):
        request = next(r for r in requests if r.request_id == result.request_id)
        fed = engine.checkpoint.inputs(request)
        assert result.num_visual_tokens == len(fed.visual)
        assert result.num_prompt_tokens == engine.checkpoint.prompt_tokens(request.prompt)
        kept = draft.budget(result.num_visual_tokens) + result.num_prompt_tokens
        assert result.kv_keep == pytest.approx(kept / fed.ids.shape[1])
        assert sum(result.accept_counts) == result.rounds
        assert result.accepted <= result.proposed <= result.rounds * draft.gamma
        assert result.finish_reason == "length" and len(result.token_ids) == request.sampling.max_tokens


def test_bad_requests_fail_alone(engine: Engine, requests: list[Request], expected: dict) -> None:
    good = requests[:2]
    long = replace(requests[2], request_id="long", prompt="a" * 40_000)
    bare = replace(requests[2], request_id="bare", frames=None)
    placeholder = replace(requests[2], request_id="placeholder", prompt="<|video_pad|> what?")
    nothing_finite = replace(requests[2], request_id="nan", prompt="zzz")
    with torch.no_grad():
        token = engine.checkpoint.processor.tokenizer("zzz")["input_ids"][0]
        kept = engine.model.embedding.weight[token].clone()
        engine.model.embedding.weight[token] = float("nan")
    try:
        mixed = [bare, good[0], long, placeholder, nothing_finite, good[1]]
        results = {r.request_id: r for r in engine.run(mixed, Draft())}
    finally:
        with torch.no_grad():
            engine.model.embedding.weight[token] = kept
    assert len(results) == len(mixed)
    codes = {name: r.error.code for name, r in results.items() if r.error}
    assert codes == {
        "long": "context_too_long",
        "bare": "invalid_request",
        "placeholder": "invalid_request",
        "nan": "nan_logits",
    }
    assert all(results[r.request_id].token_ids == expected[r.request_id] for r in good)


def test_requests_are_taken_only_as_slots_become_free(engine: Engine, requests: list[Request]) -> None:
    taken: list[str] = []

    def source():
        for request in requests:
            taken.append(request.request_id)
            yield request

    results = engine.run(source(), Draft())
    next(results)
    assert len(taken) < len(requests)
    assert len(list(results)) == len(requests) - 1


def test_a_limit_of_one_token_is_the_prefill_alone(engine: Engine, requests: list[Request]) -> None:
    (result,) = engine.run([replace(requests[0], sampling=Sampling(1))], Draft())
    assert len(result.token_ids) == 1 and result.rounds == 0 and result.finish_reason == "length"
