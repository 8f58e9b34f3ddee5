"""Requests that cannot be answered: each is one error result, and the others' texts do not change.

What fails for all requests ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from std_core.decoding.row_errors import is_device_error
from std_core.engine.engine import Engine
from std_core.engine.prefill import Prefill
from std_core.model.checkpoint import ModelInputs
from std_core.types import MAX_SEED, MIN_SEED, Draft, Request, RequestError, Result, Sampling

GREEDY = Sampling(6, temperature=0.0)
SEEDED = Sampling(9, temperature=0.9, top_k=30, seed=MAX_SEED)
GOOD = [
    Request("good 0", "red square", sampling=GREEDY),
    Request("good 1", "blue circle moves left " * 6, sampling=SEEDED),
    Request("good 2", "up", sampling=replace(GREEDY, max_tokens=1)),
    Request("good 3", "the scene", sampling=replace(SEEDED, seed=MIN_SEED, repetition_penalty=1.2)),
    Request("good 4", "the scene", sampling=replace(GREEDY, min_tokens=4)),
]
DRAFTS = [None, Draft("std", keep=0.5, gamma=3), Draft("ngram", gamma=2)]
UNKNOWN = 10**6  # an id that no vocabulary here has


@pytest.fixture(scope="module")
def llama(families: Callable[[str], Path]) -> Engine:
    return Engine.load(str(families("llama")), max_num_seqs=3)


@pytest.fixture(scope="module")
def expected(llama: Engine) -> dict[str, Result]:
    return {r.request_id: r for r in llama.run(GOOD, None)}


# ------------------------------------------------------------------------- what a request can break


def _ids(*ids: int) -> ModelInputs:
    return ModelInputs(torch.tensor([ids], dtype=torch.long), torch.zeros(1, len(ids)).long())


def _raise(error: Exception) -> ModelInputs:
    raise error


BAD_INPUTS: dict[str, Callable[[], ModelInputs]] = {
    "id behind the vocabulary": lambda: _ids(5, UNKNOWN),
    "negative id": lambda: _ids(5, -1),
    "no ids": lambda: _ids(),
    "two rows": lambda: ModelInputs(torch.ones(2, 3).long(), torch.zeros(2, 3).long()),
    "other token types": lambda: ModelInputs(torch.ones(1, 3).long(), torch.zeros(1, 2).long()),
    "longer than the window": lambda: _ids(*[5] * 40_000),
    "exception of the processor": lambda: _raise(KeyError("pixels")),
    "end of an iterator": lambda: _raise(StopIteration()),
    "no tensors": lambda: None,  # type: ignore[dict-item,return-value]
}
BAD_SAMPLING = {
    "stop id behind the vocabulary": Sampling(4, stop_token_ids=(UNKNOWN,)),
    "stop id behind the vocabulary, not yet": Sampling(9, min_tokens=2, stop_token_ids=(UNKNOWN,)),
    "negative stop id": Sampling(4, stop_token_ids=(-1,)),
    "top_k that is no number": Sampling(4, temperature=1.0, top_k=0.5),  # type: ignore[arg-type]
}


def prepare(engine: Engine, request: Request) -> ModelInputs:
    made = BAD_INPUTS.get(request.request_id.split("#")[0])
    return made() if made else engine.checkpoint.preprocess(request)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.permutations(GOOD),
    st.lists(st.sampled_from([*BAD_INPUTS, *BAD_SAMPLING]), min_size=1, max_size=5),
    st.integers(0, 2**31),
    st.sampled_from(DRAFTS),
)
def test_every_request_has_one_result_and_good_ones_their_text(
    llama: Engine,
    expected: dict[str, Result],
    good: list[Request],
    bad: list[str],
    order: int,
    draft: Draft | None,
) -> None:
    mixed = list(good)
    for number, name in enumerate(bad):
        sampling = BAD_SAMPLING.get(name, GREEDY)
        request = Request(f"{name}#{number}", "left", sampling=sampling)
        mixed.insert(order % (len(mixed) + 1), request)
    results = list(llama.run(mixed, draft, lambda request: prepare(llama, request)))
    assert sorted(r.request_id for r in results) == sorted(r.request_id for r in mixed)
    for result in results:
        if result.request_id in expected:
            assert result.error is None
            assert result.token_ids == expected[result.request_id].token_ids
            assert result.text == expected[result.request_id].text
        else:
            assert isinstance(result.error, RequestError), result.request_id
            assert result.finish_reason == "error"


@pytest.mark.parametrize(
    ("request_id", "sampling", "message"),
    [
        ("id behind the vocabulary", GREEDY, f"token id {UNKNOWN}: the model's ids are 0 to"),
        ("negative id", GREEDY, "token id -1"),
        ("no ids", GREEDY, "the prompt has no tokens"),
        ("exception of the processor", GREEDY, "preprocessing failed: KeyError: 'pixels'"),
        ("stop", Sampling(4, stop_token_ids=(UNKNOWN,)), f"stop_token_ids has {UNKNOWN}"),
    ],
)
def test_the_error_says_what_is_wrong(
    llama: Engine, request_id: str, sampling: Sampling, message: str
) -> None:
    request = Request(request_id, "left", sampling=sampling)
    (result,) = llama.run([request], None, lambda r: prepare(llama, r))
    assert result.error is not None
    assert result.error.code == "invalid_request"
    assert message in result.error.message


@pytest.mark.parametrize(
    "visual",
    [
        {"video_grid": torch.tensor([[1, 2, 2]])},  # no pixels
        {"video_patches": torch.zeros(4, 3), "video_grid": torch.tensor([[1, 2, 2]])},
        {"video_patches": torch.zeros(8, 1176), "video_grid": torch.tensor([[1, 4, 2]])},
        {},
    ],
    ids=["no pixels", "wrong patch size", "another grid", "no video"],
)
@pytest.mark.parametrize("fps", [2.0, 0.0])
def test_visual_inputs_that_do_not_fit_the_prompt(
    engine: Engine, requests: list[Request], visual: dict[str, torch.Tensor], fps: float
) -> None:
    good = replace(requests[1], sampling=GREEDY)
    (alone,) = engine.run([good], None)

    def broken(request: Request) -> ModelInputs:
        if request.request_id == good.request_id:
            return engine.checkpoint.preprocess(request)
        types = torch.tensor([[0, 2, 0, 0]])
        return ModelInputs(
            torch.tensor([[5, engine.checkpoint.config.video_token_id, 6, 7]]), types, **visual
        )

    timed = replace(good, request_id="timed", fps=fps)
    mixed = [replace(good, request_id="broken"), good, timed]
    results = {r.request_id: r for r in engine.run(mixed, Draft(), broken)}
    assert len(results) == 3
    assert results["broken"].error is not None
    assert results[good.request_id].token_ids == alone.token_ids


# ----------------------------------------------------------------------- generation configurations


def test_default_stop_ids_that_the_vocabulary_lacks_are_ignored_as_in_generate(
    families: Callable[[str], Path],
) -> None:
    engine = Engine.load(str(families("llama")))
    hf: Any = engine.model.hf
    request = Request("0", "red square", sampling=Sampling(8, min_tokens=3, temperature=0.0))
    hf.generation_config.eos_token_id = None
    (plain,) = engine.run([request], None)
    stop = plain.token_ids[1]
    hf.generation_config.eos_token_id = [stop, UNKNOWN, -1]
    inputs = engine.checkpoint.preprocess(request)
    expected = hf.generate(inputs.ids, max_new_tokens=8, min_new_tokens=3, do_sample=False)
    for draft in DRAFTS:
        results = list(engine.run([request, GOOD[1]], draft))
        assert [r.error for r in results] == [None, None]
        tokens = next(r.token_ids for r in results if r.request_id == "0")
        assert tokens == expected[0, inputs.ids.shape[1] :].tolist()


@pytest.mark.parametrize("fails_at", [1, 3, 6])
def test_a_logits_processor_that_fails_ends_its_row(
    families: Callable[[str], Path],
    expected: dict[str, Result],
    fails_at: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the first token, in a draft step, in a verification."""
    engine = Engine.load(str(families("llama")), max_num_seqs=3)
    original = type(engine.model.hf)._get_logits_processor
    calls = 0

    def failing(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls >= fails_at:
            raise IndexError("no such id")
        return scores

    def appended(hf: Any, config: Any, **options: Any) -> Any:
        processors = original(hf, config, **options)
        if config.top_p == 0.77:
            processors.append(failing)
        return processors

    monkeypatch.setattr(type(engine.model.hf), "_get_logits_processor", appended)
    bad = Request("bad", "left", sampling=Sampling(8, temperature=0.5, top_p=0.77, seed=1))
    results = {r.request_id: r for r in engine.run([GOOD[0], bad, *GOOD[1:]], Draft(gamma=3))}
    assert len(results) == 1 + len(GOOD)
    error = results.pop("bad").error
    assert error is not None
    assert "a logits processor failed: IndexError: no such id" in error.message
    for name, result in results.items():
        assert result.token_ids == expected[name].token_ids


def test_a_text_that_cannot_be_decoded_ends_its_row(
    llama: Engine, expected: dict[str, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = llama.checkpoint.decode

    def decode(ids: list[int]) -> str:
        if len(ids) == 9:
            raise TypeError("no text")
        return original(ids)

    monkeypatch.setattr(llama.checkpoint, "decode", decode)
    results = {r.request_id: r for r in llama.run(GOOD, Draft("full", gamma=2))}
    failed = {name for name, r in results.items() if r.error is not None}
    assert failed == {name for name, r in expected.items() if len(r.token_ids) == 9}
    for name in expected.keys() - failed:
        assert results[name].text == expected[name].text


# --------------------------------------------------------------------------- what must end the run


DEVICE_ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator"),
    MemoryError(),
    torch.distributed.DistBackendError("NCCL error"),
]


@pytest.mark.parametrize("error", DEVICE_ERRORS, ids=lambda error: type(error).__name__)
def test_a_failed_device_ends_the_run(llama: Engine, error: Exception) -> None:
    assert is_device_error(error)
    with pytest.raises(type(error)):
        list(llama.run(GOOD, None, lambda request: _raise(error)))


@pytest.mark.parametrize("method", ["_suffix", "_reserve"])
def test_a_fault_of_the_engine_ends_the_run(
    llama: Engine, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: object) -> None:
        raise IndexError("slot")

    monkeypatch.setattr(Prefill, method, fault)
    with pytest.raises(IndexError, match="slot"):
        list(llama.run(GOOD, None))


def test_the_stream_takes_requests_only(llama: Engine) -> None:
    with pytest.raises(TypeError, match="the stream of requests has a str"):
        list(llama.run(["left"], None))  # type: ignore[list-item]


# ------------------------------------------------------------------------------ sampling parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", float("nan")),
        ("temperature", -0.5),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("nan")),
        ("repetition_penalty", float("inf")),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("stop", ("",)),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Sampling(**{name: value})
