"""The engine against Hugging Face's `generate`; admission, failed requests, sampling."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from std_core.decoding import round
from std_core.decoding.slots import Slots
from std_core.engine.batch import Batch
from std_core.engine.engine import Engine, devices_from
from std_core.model import cache
from std_core.model.device_map import decoder_layer_names, layer_device_map
from std_core.types import Draft, Request, Result, Sampling

Tokens = dict[str, list[int]]  # by request id
Generate = Callable[[Engine, Request], list[int]]

POLICIES = {
    "dense": None,
    "std": Draft("std", keep=0.2, gamma=5),
    "std_k3": Draft("std", k=3, gamma=1),
    "random": Draft("random", keep=0.2, gamma=3),
    "window": Draft("window", keep=0.2, gamma=4),
    "ngram": Draft("ngram", gamma=6),
    "full": Draft("full", gamma=7),
    "specvlm": Draft("specvlm", keep=0.1, gamma=4),
    "snapkv": Draft("snapkv", k=6, gamma=3),
    "refresh": Draft("std", keep=0.1, gamma=4, refresh=2),
    "layerskip": Draft("full", depth=0.4, gamma=3),
    "teal": Draft("full", channels=0.4, gamma=4),
    "composition": Draft("std", keep=0.3, channels=0.6, gamma=5),
    "int8": Draft("full", weights="int8", gamma=6),
    "int4": Draft("std", weights="int4", gamma=2),
    "everything": Draft(
        "snapkv", keep=0.5, channels=0.5, depth=0.8, weights="int4", refresh=1, gamma=3
    ),
}


def tokens_by_id(results: Iterable[Result]) -> Tokens:
    return {result.request_id: result.token_ids for result in results}


# ------------------------------------------------------------------------------------------- rounds


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_equal_generate(
    engine: Engine, requests: list[Request], expected: Tokens, policy: str
) -> None:
    results = list(engine.run(requests, POLICIES[policy]))
    assert tokens_by_id(results) == expected
    assert len(results) == len(requests)


@pytest.mark.parametrize(
    "draft",
    [
        Draft("full", gamma=4),
        Draft("std", keep=1.0, gamma=4),
        Draft("snapkv", k=10_000, gamma=3, refresh=1),
        Draft("full", depth=0.95, gamma=4),
    ],
)
def test_a_draft_that_keeps_everything_is_always_accepted(
    engine: Engine, requests: list[Request], draft: Draft
) -> None:
    results = list(engine.run(requests, draft))
    assert sum(r.proposed for r in results) > 50
    assert [r.accepted for r in results] == [r.proposed for r in results]


def test_it_is_rejected_at_times_if_verified_entries_do_not_replace_drafted_ones(
    engine: Engine, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithoutMirror(cache.DecodeStep):
        def __init__(
            self, suffix: cache.KVCache, lengths: torch.Tensor, *rest: object, **_: object
        ):
            super().__init__(suffix, lengths, *rest[:2])  # type: ignore[arg-type]

    monkeypatch.setattr(round, "DecodeStep", WithoutMirror)
    results = list(engine.run(requests, Draft("std", keep=1.0, gamma=4)))
    assert sum(r.accepted for r in results) < sum(r.proposed for r in results)


def test_tokens_equal_generate_with_rejections(
    engine: Engine, requests: list[Request], expected: Tokens
) -> None:
    """Without a rejection, equality with `generate` would prove nothing about them."""
    results = list(engine.run(requests, Draft("random", k=1, gamma=6)))
    assert sum(r.accepted for r in results) < sum(r.proposed for r in results)
    assert tokens_by_id(results) == expected


def test_a_stop_id_inside_a_draft_ends_the_row_there(
    engine: Engine, requests: list[Request], expected: Tokens
) -> None:
    longest = max(expected, key=lambda name: len(expected[name]))
    tokens = expected[longest]
    stop = next(t for t in tokens[3:] if tokens.index(t) >= 3)
    request = next(r for r in requests if r.request_id == longest)
    sampling = replace(request.sampling, stop_token_ids=(stop,))
    (result,) = engine.run([replace(request, sampling=sampling)], Draft("full", gamma=12))
    assert result.token_ids == tokens[: tokens.index(stop) + 1]
    assert result.finish_reason == "stop"


def test_counts_of_a_result(engine: Engine, requests: list[Request]) -> None:
    draft = Draft("std", keep=0.25, gamma=5)
    for result in engine.run(requests, draft):
        request = next(r for r in requests if r.request_id == result.request_id)
        inputs = engine.checkpoint.preprocess(request)
        assert result.num_visual_tokens == len(inputs.visual_positions)
        assert result.num_prompt_tokens == engine.checkpoint.count_prompt_tokens(request.prompt)
        kept = draft.budget(result.num_visual_tokens) + result.num_prompt_tokens
        assert result.kv_keep == pytest.approx(kept / inputs.ids.shape[1])
        assert sum(result.accept_counts) == result.rounds
        assert result.accepted <= result.proposed <= result.rounds * draft.gamma
        assert result.finish_reason == "length"
        assert len(result.token_ids) == request.sampling.max_tokens


def test_unverified_decoding_outputs_the_draft(engine: Engine, requests: list[Request]) -> None:
    """If everything is kept this is the full model's text; otherwise another text."""
    dense = tokens_by_id(engine.run(requests, None))
    for draft in (Draft("full", gamma=4), Draft("std", keep=1.0, gamma=1)):
        results = list(engine.run(requests, draft, mode="sparse"))
        assert tokens_by_id(results) == dense
        assert all(r.proposed == r.accepted == 0 for r in results)
    sparse = Draft("random", k=1, gamma=3)
    assert tokens_by_id(engine.run(requests, sparse, mode="sparse")) != dense
    for refused in (None, Draft("ngram"), Draft("full", depth=0.4), Draft(model="x")):
        with pytest.raises(ValueError, match="sparse"):
            next(engine.run(requests, refused, mode="sparse"))


# ---------------------------------------------------------------------------------------- admission


def test_bad_requests_fail_alone(engine: Engine, requests: list[Request], expected: Tokens) -> None:
    good = requests[:2]
    long = replace(requests[2], request_id="long", prompt="a" * 40_000)
    flat = replace(requests[2], request_id="flat", frames=good[0].frames[0])  # type: ignore[index]
    placeholder = replace(requests[2], request_id="placeholder", prompt="<|video_pad|> what?")
    not_finite = replace(requests[2], request_id="nan", prompt="zzz")
    with torch.no_grad():
        token = engine.checkpoint.processor.tokenizer("zzz")["input_ids"][0]
        embedding = engine.model.embedding.weight[token].clone()
        engine.model.embedding.weight[token] = float("nan")
    try:
        mixed = [flat, good[0], long, placeholder, not_finite, good[1]]
        results = {r.request_id: r for r in engine.run(mixed, Draft())}
    finally:
        with torch.no_grad():
            engine.model.embedding.weight[token] = embedding
    assert len(results) == len(mixed)
    codes = {name: r.error.code for name, r in results.items() if r.error}
    assert codes == {
        "long": "context_too_long",
        "flat": "invalid_request",
        "placeholder": "invalid_request",
        "nan": "nan_logits",
    }
    assert all(results[r.request_id].token_ids == expected[r.request_id] for r in good)


def test_requests_are_taken_only_as_slots_become_free(
    engine: Engine, requests: list[Request]
) -> None:
    taken: list[str] = []

    def source() -> Iterator[Request]:
        for request in requests:
            taken.append(request.request_id)
            yield request

    results = engine.run(source(), Draft())
    next(results)
    assert len(taken) < len(requests)
    assert len(list(results)) == len(requests) - 1


def test_a_limit_of_one_token_runs_no_round(engine: Engine, requests: list[Request]) -> None:
    request = replace(requests[0], sampling=Sampling(1))
    (result,) = engine.run([request], Draft())
    assert len(result.token_ids) == 1
    assert result.rounds == 0
    assert result.finish_reason == "length"


def test_images_and_several_videos_in_one_prompt(
    engine: Engine, requests: list[Request], generate: Generate
) -> None:
    a = requests[0].frames
    b = requests[2].frames
    assert a is not None
    assert b is not None
    prompts: list[dict[str, Any]] = [
        {"frames": a, "videos": (b,)},
        {"images": (a[0], b[0])},
        {"frames": b, "images": (a[1],)},
    ]
    for visual in prompts:
        request = Request("mixed", "What is the same?", sampling=Sampling(20), **visual)
        for draft in (None, Draft("random", gamma=3)):
            (result,) = engine.run([request], draft)
            assert result.token_ids == generate(engine, request)


def test_prefill_in_small_chunks_gives_the_same_tokens(
    tiny_model: Path, requests: list[Request], expected: Tokens
) -> None:
    engine = Engine.load(str(tiny_model), max_num_seqs=2, prefill_chunk=7)
    assert tokens_by_id(engine.run(requests, Draft())) == expected
    assert engine.counters.chunks > 7 * len(requests)


@pytest.mark.parametrize("pauses", [False, True])
def test_slots_are_full_before_a_round_if_requests_are_available(
    pauses: bool, tiny_model: Path, requests: list[Request]
) -> None:
    """With `pauses` the stream has no request at every second poll."""
    engine = Engine.load(str(tiny_model), max_num_seqs=3, prefill_chunk=16)
    short = [
        replace(r, sampling=replace(r.sampling, max_tokens=3 + n % 4))
        for n, r in enumerate(requests)
    ]
    items = [item for r in short for item in ((None, r) if pauses else (r,))]
    waiting = len(short)
    rounds = []  # running rows and waiting requests at the begin of each
    original = Batch._round

    def source() -> Iterator[Request | None]:
        nonlocal waiting
        for item in items:
            waiting -= item is not None
            yield item

    def recorded_round(batch: Batch) -> object:
        rounds.append((batch.running, waiting))
        return original(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "_round", recorded_round)
        assert len(list(engine.run(source(), None))) == len(requests)
    assert all(running == 3 for running, waiting in rounds if waiting) != pauses
    assert len(rounds) > 5
    assert engine.counters.chunks > 2 * len(requests)


def test_freed_slots_are_refilled_at_once(tiny_model: Path, requests: list[Request]) -> None:
    rng = random.Random(1)
    slots = 8
    same_clip = [
        Request(
            str(i),
            prompt="?",
            frames=requests[0].frames,
            video_id="clip",
            sampling=Sampling(rng.randint(4, 60)),
        )
        for i in range(64)
    ]
    engine = Engine.load(str(tiny_model), max_num_seqs=slots)
    assert len(list(engine.run(same_clip, None))) == 64
    assert engine.counters.row_rounds / (engine.counters.rounds * slots) >= 0.9


def test_running_rows_continue_while_no_request_is_available(
    engine: Engine, requests: list[Request], expected: Tokens
) -> None:
    def source() -> Iterator[Request | None]:
        yield from (None, requests[0], None, None, requests[1])
        while "r0" not in done:
            yield None  # endless, if the running rows did not continue
        yield requests[2]

    done: Tokens = {}
    for result in engine.run(source(), Draft()):
        done[result.request_id] = result.token_ids
    assert done == {name: expected[name] for name in ("r0", "r1", "r2")}


@pytest.mark.parametrize("draft", [None, Draft("std", keep=0.5), Draft("ngram")])
@pytest.mark.parametrize("complete", [True, False])
def test_a_run_frees_its_caches(
    engine: Engine, requests: list[Request], draft: Draft | None, complete: bool
) -> None:
    """Also a run that is abandoned: a device does not hold the caches of two runs."""
    made: list[weakref.ref[Slots]] = []
    empty = Slots.empty

    def recorded_empty(*args: object) -> Slots:
        slots = empty(*args)  # type: ignore[arg-type]
        made.append(weakref.ref(slots))
        return slots

    gc.collect()
    # reference counts alone must free them: the collector runs by number of objects, not bytes
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Slots, "empty", recorded_empty)
            results = engine.run(requests, draft)
            next(results)
            if complete:
                list(results)
            del results
        assert made
        assert all(slots() is None for slots in made)
    finally:
        gc.enable()


# ---------------------------------------------------------------------------- layers over devices


def test_layers_are_spread_in_order_and_all_else_is_on_the_first_device(engine: Engine) -> None:
    placed = layer_device_map(engine.model.hf, ["a", "b"])
    layers = decoder_layer_names(engine.model.hf)
    assert [placed[name] for name in layers] == ["a", "a", "a", "b", "b"]
    parameters = [name for name, _ in engine.model.hf.named_parameters()]
    for name in parameters:
        assert sum(name.startswith(f"{module}.") for module in placed) == 1, name
    assert {placed[m] for m in placed if m not in layers} == {"a"}
    with pytest.raises(ValueError, match="5 layers cannot be spread over 6"):
        layer_device_map(engine.model.hf, ["a"] * 6)


@pytest.mark.parametrize(
    "draft", [None, Draft("std", refresh=1), Draft("specvlm", weights="int8", depth=0.8)]
)
def test_tokens_equal_generate_with_layers_on_two_devices(
    tiny_model: Path, requests: list[Request], expected: Tokens, draft: Draft | None
) -> None:
    """To torch all CPUs are one device: accelerate's hooks run, but nothing shows whether a tensor
    is on the wrong device.
    """
    assert devices_from("cuda", 2) == ["cuda:0", "cuda:1"]
    assert devices_from("cuda:2", 2) == ["cuda:2", "cuda:3"]
    engine = Engine.load(str(tiny_model), pipeline_parallel_size=2, max_num_seqs=3)
    assert all(hasattr(layer, "_hf_hook") for layer in engine.model.decoder.layers)
    assert tokens_by_id(engine.run(requests, draft)) == expected


# ----------------------------------------------------------------------------------------- sampling


@pytest.fixture(scope="session")
def seeded(requests: list[Request]) -> list[Request]:
    sampling = Sampling(24, temperature=0.9, top_p=0.95, top_k=40, repetition_penalty=1.1)
    return [replace(r, sampling=replace(sampling, seed=i)) for i, r in enumerate(requests)]


@pytest.fixture(scope="session")
def seeded_tokens(engine: Engine, seeded: list[Request]) -> Tokens:
    """The dense loop's."""
    return tokens_by_id(engine.run(seeded, None))


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "dense"])
def test_seeded_tokens_do_not_depend_on_the_draft(
    engine: Engine, seeded: list[Request], seeded_tokens: Tokens, policy: str
) -> None:
    assert tokens_by_id(engine.run(reversed(seeded), POLICIES[policy])) == seeded_tokens


def test_other_seeds_give_other_tokens(
    engine: Engine, seeded: list[Request], seeded_tokens: Tokens
) -> None:
    other = [replace(r, sampling=replace(r.sampling, seed=i + 100)) for i, r in enumerate(seeded)]
    assert tokens_by_id(engine.run(other, None)) != seeded_tokens


def test_greedy_seeded_and_unseeded_rows_share_a_batch(
    engine: Engine, requests: list[Request], expected: Tokens
) -> None:
    unseeded = replace(requests[1], sampling=Sampling(30, temperature=1.0))
    seeded = replace(requests[2], sampling=Sampling(30, temperature=1.0, seed=5))
    alone = tokens_by_id(engine.run([seeded], None))
    for draft in (Draft(), Draft("ngram"), None):
        tokens = tokens_by_id(engine.run([requests[0], unseeded, seeded], draft))
        assert tokens["r0"] == expected["r0"]
        assert len(tokens["r1"]) == 30
        assert tokens["r2"] == alone["r2"]


@pytest.mark.parametrize("draft", [None, Draft("std", k=3, gamma=3), Draft("ngram")])
def test_unseeded_draws_are_new_in_every_run_and_repeat_after_manual_seed(
    engine: Engine, requests: list[Request], draft: Draft | None
) -> None:
    """As those of `generate`, whose sampling uses torch's default generator."""
    # hot enough that no two texts are alike by chance
    sampled = [replace(r, sampling=Sampling(12, temperature=5.0)) for r in requests[:2]]
    torch.manual_seed(3)
    runs = [tokens_by_id(engine.run(sampled, draft)) for _ in range(3)]
    for request in sampled:
        assert len({tuple(tokens[request.request_id]) for tokens in runs}) == 3
    torch.manual_seed(3)
    assert [tokens_by_id(engine.run(sampled, draft)) for _ in range(3)] == runs
    torch.manual_seed(4)
    assert tokens_by_id(engine.run(sampled, draft)) not in runs


def test_two_runs_have_independent_noise(engine: Engine) -> None:
    """Not one stream of numbers at two places either."""
    noises = []
    for _ in range(2):
        batch = engine.new_batch(None)
        batch.admit(Request("0", "a", sampling=Sampling(2, temperature=1.0)), 0)
        noises.append(torch.rand(4000, generator=batch.slots.generator))
    assert not set(noises[0].tolist()) & set(noises[1].tolist()[:100])
    correlation = torch.corrcoef(torch.stack(noises))[0, 1]
    assert abs(float(correlation)) < 5 / 4000**0.5


def test_greedy_and_seeded_runs_leave_torchs_generator_alone(
    engine: Engine, requests: list[Request]
) -> None:
    before = torch.get_rng_state()
    seeded = replace(requests[1], sampling=Sampling(6, temperature=1.0, seed=5))
    list(engine.run([requests[0], seeded], Draft()))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.3}, {"min_tokens": 12}])
def test_logits_processors_are_applied_as_in_generate(
    engine: Engine, requests: list[Request], generate: Generate, settings: dict[str, Any]
) -> None:
    greedy = generate(engine, replace(requests[3], sampling=Sampling(30)))
    stops = (greedy[2],) if "min_tokens" in settings else ()  # something to suppress
    request = replace(requests[3], sampling=Sampling(30, stop_token_ids=stops, **settings))
    tokens = generate(engine, request)
    plain = replace(request, sampling=Sampling(30, stop_token_ids=stops))
    assert tokens != generate(engine, plain)
    for draft in (Draft("random", k=2, gamma=5), Draft("ngram"), None):
        (result,) = engine.run([request], draft)
        assert result.token_ids == tokens


def test_the_output_ends_before_a_stop_text(engine: Engine, requests: list[Request]) -> None:
    request = replace(requests[5], sampling=Sampling(30))
    (unstopped,) = engine.run([request], None)
    stop = unstopped.text[8:11]
    for draft in (Draft("full", gamma=8), None):
        (result,) = engine.run([replace(request, sampling=Sampling(30, stop=(stop,)))], draft)
        assert result.text == unstopped.text[: unstopped.text.index(stop)]
        assert result.finish_reason == "stop"
        assert result.token_ids == unstopped.token_ids[: len(result.token_ids)]
