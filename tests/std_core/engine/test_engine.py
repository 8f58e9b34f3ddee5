"""The engine against Hugging Face's `generate`, and what becomes of requests that cannot be
answered."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs.demo_model import model as demo_model
from std_core.decoding import round
from std_core.decoding.round import Slots
from std_core.engine.batch import Batch
from std_core.engine.engine import Engine, devices_from
from std_core.engine.prefill import advance
from std_core.kernels.cpu import loader
from std_core.model import cache
from std_core.model.model import decoder_layer_names, layer_device_map
from std_core.types import Draft, Request, Sampling

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


@pytest.fixture(scope="session")
def expected(
    engine: Engine, requests: list[Request], generate: Callable[[Engine, Request], list[int]]
) -> dict:
    return {r.request_id: generate(engine, r) for r in requests}


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_generate(
    engine: Engine, requests: list[Request], expected: dict, policy: str
) -> None:
    results = list(engine.run(requests, POLICIES[policy]))
    assert {r.request_id: r.token_ids for r in results} == expected
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


def test_it_would_not_be_if_verified_values_did_not_replace_drafted_ones(
    engine: Engine, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unmirrored(cache.DecodeStep):
        def __init__(self, own: cache.KVCache, lengths: torch.Tensor, *rest: object, **_: object):
            super().__init__(own, lengths, *rest[:2])  # type: ignore[arg-type]

    monkeypatch.setattr(round, "DecodeStep", Unmirrored)
    results = list(engine.run(requests, Draft("std", keep=1.0, gamma=4)))
    assert sum(r.accepted for r in results) < sum(r.proposed for r in results)


def test_a_round_can_reject(engine: Engine, requests: list[Request], expected: dict) -> None:
    """Else the comparison with `generate` would prove nothing about rejections."""
    results = list(engine.run(requests, Draft("random", k=1, gamma=6)))
    assert sum(r.accepted for r in results) < sum(r.proposed for r in results)
    assert {r.request_id: r.token_ids for r in results} == expected


def test_a_stop_id_inside_a_draft_ends_the_row_there(
    engine: Engine, requests: list[Request], expected: dict
) -> None:
    longest = max(expected, key=lambda name: len(expected[name]))
    tokens = expected[longest]
    stop = next(t for t in tokens[3:] if tokens.index(t) >= 3)
    request = next(r for r in requests if r.request_id == longest)
    sampling = replace(request.sampling, stop_token_ids=(stop,))
    (result,) = engine.run([replace(request, sampling=sampling)], Draft("full", gamma=12))
    assert result.token_ids == tokens[: tokens.index(stop) + 1]
    assert result.finish_reason == "stop"


def test_accounts_of_a_result(engine: Engine, requests: list[Request]) -> None:
    draft = Draft("std", keep=0.25, gamma=5)
    for result in engine.run(requests, draft):
        request = next(r for r in requests if r.request_id == result.request_id)
        fed = engine.checkpoint.preprocess(request)
        assert result.num_visual_tokens == len(fed.visual_positions)
        assert result.num_prompt_tokens == engine.checkpoint.count_prompt_tokens(request.prompt)
        kept = draft.budget(result.num_visual_tokens) + result.num_prompt_tokens
        assert result.kv_keep == pytest.approx(kept / fed.ids.shape[1])
        assert sum(result.accept_counts) == result.rounds
        assert result.accepted <= result.proposed <= result.rounds * draft.gamma
        assert (
            result.finish_reason == "length"
            and len(result.token_ids) == request.sampling.max_tokens
        )


def test_bad_requests_fail_alone(engine: Engine, requests: list[Request], expected: dict) -> None:
    good = requests[:2]
    long = replace(requests[2], request_id="long", prompt="a" * 40_000)
    flat = replace(requests[2], request_id="flat", frames=good[0].frames[0])  # type: ignore[index]
    placeholder = replace(requests[2], request_id="placeholder", prompt="<|video_pad|> what?")
    nothing_finite = replace(requests[2], request_id="nan", prompt="zzz")
    with torch.no_grad():
        token = engine.checkpoint.processor.tokenizer("zzz")["input_ids"][0]
        kept = engine.model.embedding.weight[token].clone()
        engine.model.embedding.weight[token] = float("nan")
    try:
        mixed = [flat, good[0], long, placeholder, nothing_finite, good[1]]
        results = {r.request_id: r for r in engine.run(mixed, Draft())}
    finally:
        with torch.no_grad():
            engine.model.embedding.weight[token] = kept
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


def test_a_limit_of_one_token_is_the_prefill_alone(engine: Engine, requests: list[Request]) -> None:
    (result,) = engine.run([replace(requests[0], sampling=Sampling(1))], Draft())
    assert len(result.token_ids) == 1 and result.rounds == 0 and result.finish_reason == "length"


# ------------------------------------------------------------------------------- slots and prefixes


def test_questions_on_one_video_share_its_vision_pass_and_its_prefix(
    tiny_model: Path, requests: list[Request]
) -> None:
    clip = requests[4].frames
    asked = [
        Request(
            f"q{i}",
            prompt=f"What is in scene {i}?",
            frames=clip,
            video_id="clip",
            sampling=Sampling(12),
        )
        for i in range(8)
    ]
    engine = Engine.load(str(tiny_model), max_num_seqs=8)
    shared = {r.request_id: r for r in engine.run(asked, Draft())}
    assert (engine.counters.vision_passes, engine.counters.prefix_prefills) == (1, 1)
    alone = {r.request_id: r for r in engine.run([replace(r, video_id="") for r in asked], Draft())}
    assert engine.counters.vision_passes == 9
    assert {k: r.token_ids for k, r in shared.items()} == {k: r.token_ids for k, r in alone.items()}


def test_prefixes_that_are_kept_outlive_a_run(tiny_model: Path, requests: list[Request]) -> None:
    asked = [replace(r, video_id=r.request_id) for r in requests[:3]]
    engine = Engine.load(str(tiny_model), max_num_seqs=4, keep_prefixes=True)
    runs = [
        {r.request_id: r.token_ids for r in engine.run(asked, d)}
        for d in (None, Draft(), Draft("random", k=1))
    ]
    assert runs[0] == runs[1] == runs[2]
    assert (engine.counters.vision_passes, engine.counters.prefix_prefills) == (3, 3)


def test_prefill_in_small_chunks_gives_the_same_tokens(
    tiny_model: Path, requests: list[Request], expected: dict
) -> None:
    engine = Engine.load(str(tiny_model), max_num_seqs=2, prefill_chunk=7)
    assert {r.request_id: r.token_ids for r in engine.run(requests, Draft())} == expected
    assert engine.counters.chunks > 7 * len(requests)


@pytest.mark.parametrize("late", [False, True])
def test_a_round_begins_with_full_slots_wherever_a_request_is_at_hand(
    late: bool, tiny_model: Path, requests: list[Request]
) -> None:
    """`late`: every second time that the stream is asked there is none yet."""
    engine = Engine.load(str(tiny_model), max_num_seqs=3, prefill_chunk=16)
    short = [
        replace(r, sampling=replace(r.sampling, max_tokens=3 + n % 4))
        for n, r in enumerate(requests)
    ]
    stream = iter([offered for r in short for offered in ((None, r) if late else (r,))])
    left = [len(short)]
    seated = []
    round_of = Batch._round

    def offers() -> Iterator[Request | None]:
        for offered in stream:
            left[0] -= offered is not None
            yield offered

    def one(batch: Batch) -> object:
        seated.append((sum(row is not None for row in batch.rows), left[0]))
        return round_of(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "_round", one)
        assert len(list(engine.run(offers(), None))) == len(requests)
    assert all(rows == 3 for rows, waiting in seated if waiting) != late
    assert len(seated) > 5 and engine.counters.chunks > 2 * len(requests)


@pytest.mark.parametrize("draft", [None, Draft("std", keep=0.5), Draft("ngram")])
@pytest.mark.parametrize("whole", [True, False])
def test_a_run_leaves_no_caches_behind(
    engine: Engine, requests: list[Request], draft: Draft | None, whole: bool
) -> None:
    """Nor does one that is left half way: the next wave's come where they were, and two do not fit
    a device."""
    made: list[weakref.ref[Slots]] = []
    empty = Slots.empty

    def noted(*args: object) -> Slots:
        slots = empty(*args)  # type: ignore[arg-type]
        made.append(weakref.ref(slots))
        return slots

    gc.collect()
    gc.disable()  # what only the collector finds may stay for long: it counts objects, not bytes
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Slots, "empty", noted)
            results = engine.run(requests, draft)
            next(results)
            if whole:
                list(results)
            del results
        assert made and all(slots() is None for slots in made)
    finally:
        gc.enable()


def test_slots_are_refilled_at_once(tiny_model: Path, requests: list[Request]) -> None:
    rng = random.Random(1)
    clip = requests[0].frames
    asked = [
        Request(
            str(i), prompt="?", frames=clip, video_id="clip", sampling=Sampling(rng.randint(4, 60))
        )
        for i in range(64)
    ]
    engine = Engine.load(str(tiny_model), max_num_seqs=8)
    assert len(list(engine.run(asked, None))) == 64
    assert engine.counters.row_rounds / (engine.counters.rounds * 8) >= 0.9


def test_rows_go_on_while_no_request_is_ready(
    engine: Engine, requests: list[Request], expected: dict
) -> None:
    def source() -> Iterator[Request | None]:
        yield from (None, requests[0], None, None, requests[1])
        while "r0" not in done:
            yield None  # for ever, if the rows in the slots did not go on
        yield requests[2]

    done: dict[str, list[int]] = {}
    for result in engine.run(source(), Draft()):
        done[result.request_id] = result.token_ids
    assert done == {name: expected[name] for name in ("r0", "r1", "r2")}


def test_images_and_several_videos_in_one_prompt(
    engine: Engine, requests: list[Request], generate: Callable[[Engine, Request], list[int]]
) -> None:
    a = requests[0].frames
    b = requests[2].frames
    assert a is not None and b is not None
    for shown in (
        {"frames": a, "videos": (b,)},
        {"images": (a[0], b[0])},
        {"frames": b, "images": (a[1],)},
    ):
        request = Request("mixed", "What is the same?", sampling=Sampling(20), **shown)  # type: ignore[arg-type]
        for draft in (None, Draft("random", gamma=3)):
            (result,) = engine.run([request], draft)
            assert result.token_ids == generate(engine, request)


# -------------------------------------------------------------------------- drafts beyond selection


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second model with the same tokenizer, of other sizes; untrained, so it knows nothing."""
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


def test_a_second_model_drafts_and_changes_no_token(
    engine: Engine, requests: list[Request], expected: dict, other_model: Path
) -> None:
    results = list(
        engine.run(requests, Draft("specvlm", keep=0.3, gamma=4, model=str(other_model)))
    )
    assert {r.request_id: r.token_ids for r in results} == expected
    assert all(r.weight_keep < 0.4 and r.kv_keep < 1 for r in results)


def test_a_second_model_that_is_the_first_is_always_accepted(
    engine: Engine, requests: list[Request], tiny_model: Path
) -> None:
    """Its cache has what it would have had without rejections, also after rounds that were accepted
    whole."""
    sampling = Sampling(24, temperature=0.9, seed=3)
    asked = [
        *requests,
        *(replace(r, request_id=r.request_id + "s", sampling=sampling) for r in requests),
    ]
    results = list(engine.run(asked, Draft("std", keep=1.0, gamma=4, model=str(tiny_model))))
    assert sum(r.proposed for r in results) > 50
    assert [r.accepted for r in results] == [r.proposed for r in results]


def test_rounds_between_two_chunks_leave_a_second_models_prefill_alone(
    engine: Engine, requests: list[Request], tiny_model: Path
) -> None:
    def filled(rounds: bool) -> torch.Tensor:
        """The second model's keys of a row that was prefilled in small chunks, beside one that was
        decoding or not."""
        draft = Draft("std", keep=1.0, gamma=2, model=str(tiny_model))
        batch = replace(engine, prefill_chunk=7).new_batch(draft)
        for slot, request in enumerate((requests[0], requests[1])):
            pieces = batch.prefill.admit(replace(request, sampling=Sampling(200)), slot)
            while (row := advance(pieces)) is None:
                if rounds and slot:
                    list(batch._round())
            batch.rows[slot] = row  # type: ignore[assignment]
            batch.update_slots()
        assert batch.rows[0] is not None
        # the last entry is made anew at the row's first draft step
        return batch.slots.draft.key[2][1, :, : int(batch.slots.draft_length[1]) - 1].clone()

    with torch.inference_mode():
        torch.testing.assert_close(filled(rounds=True), filled(rounds=False))


def test_second_models_that_cannot_draft_are_refused(
    engine: Engine, tmp_path: Path, requests: list[Request]
) -> None:
    words = demo_model.tokenizer()
    words.add_tokens(["<another>"])
    model = demo_model.build("demo", words)
    demo_model.save(model, words, tmp_path)
    with pytest.raises(ValueError, match="tokenizers differ"):
        next(engine.run(requests, Draft("specvlm", model=str(tmp_path))))


def test_cheaper_weights_are_counted(engine: Engine, requests: list[Request]) -> None:
    """float32: an eighth of the bytes at 4 bits, a quarter at 8, and their scales."""
    keep = {
        name: next(engine.run(requests[:1], draft)).weight_keep
        for name, draft in {
            "int8": Draft("full", weights="int8"),
            "int4": Draft("full", weights="int4"),
            "half": Draft("full", channels=0.5),
            "two": Draft("full", depth=0.4),
            "full": Draft("std"),
            "ngram": Draft("ngram"),
        }.items()
    }
    assert keep["full"] == 1.0 and keep["ngram"] == 0.0
    assert 0.25 < keep["int8"] < 0.27 and 0.125 < keep["int4"] < 0.2
    assert 0.5 < keep["half"] < 0.57 and 0.4 < keep["two"] < 0.47  # the head is read whole


def test_unverified_decoding_writes_what_the_draft_would(
    engine: Engine, requests: list[Request]
) -> None:
    """With everything kept that is the model's own text; with little of it another."""
    dense = {r.request_id: r.token_ids for r in engine.run(requests, None)}
    for draft in (Draft("full", gamma=4), Draft("std", keep=1.0, gamma=1)):
        results = list(engine.run(requests, draft, mode="sparse"))
        assert {r.request_id: r.token_ids for r in results} == dense
        assert all(r.proposed == r.accepted == 0 for r in results)
    few = {
        r.request_id: r.token_ids
        for r in engine.run(requests, Draft("random", k=1, gamma=3), mode="sparse")
    }
    assert few != dense
    for draft in (None, Draft("ngram"), Draft("full", depth=0.4), Draft(model="x")):
        with pytest.raises(ValueError, match="sparse"):
            next(engine.run(requests, draft, mode="sparse"))


# ------------------------------------------------------------------------------ layers over devices


def test_layers_are_spread_in_order_and_all_else_stays_together(engine: Engine) -> None:
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
def test_a_model_over_two_devices_writes_the_same(
    tiny_model: Path, requests: list[Request], expected: dict, draft: Draft | None
) -> None:
    """As far as a CPU can tell, which torch counts once: accelerate's hooks run, but no tensor is
    ever found on the wrong device."""
    assert devices_from("cuda", 2) == ["cuda:0", "cuda:1"] and devices_from("cuda:2", 2) == [
        "cuda:2",
        "cuda:3",
    ]
    two = Engine.load(str(tiny_model), pipeline_parallel_size=2, max_num_seqs=3)
    assert all(hasattr(layer, "_hf_hook") for layer in two.model.decoder.layers)
    assert {r.request_id: r.token_ids for r in two.run(requests, draft)} == expected


# ------------------------------------------------------------------------------------------- strict


@pytest.fixture(scope="session")
def halves(tiny_model: Path) -> Callable[..., Engine]:
    """bfloat16 engines of one model."""
    loaded = Engine.load(str(tiny_model), dtype="bfloat16")
    return lambda **settings: Engine(loaded.model, loaded.checkpoint, **settings)


@pytest.fixture
def plain_halves(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """The same on PyTorch's operations alone, whose sums depend on the shapes they are made in."""
    monkeypatch.setattr(loader, "supports", lambda name, of: False)
    loaded = Engine.load(str(tiny_model), dtype="bfloat16")
    return lambda **settings: Engine(loaded.model, loaded.checkpoint, **settings)


@pytest.fixture(scope="session")
def various(requests: list[Request]) -> list[Request]:
    """Clips and questions on a shared clip, greedy and sampled."""
    asked = [replace(r, sampling=replace(r.sampling, max_tokens=24), video_id="") for r in requests]
    clip = requests[4].frames
    asked += [
        Request(
            "", prompt=f"What is in scene {i}?", frames=clip, video_id="clip", sampling=Sampling(16)
        )
        for i in range(3)
    ]
    drawn = Sampling(24, temperature=0.8, top_p=0.9, repetition_penalty=1.1)
    asked = [replace(r, request_id=str(i)) for i, r in enumerate(asked)]
    return [
        replace(r, sampling=replace(drawn, seed=i)) if i % 5 == 0 else r
        for i, r in enumerate(asked)
    ]


DRAFTS = (Draft(), Draft("random", k=2, gamma=8), Draft("ngram", gamma=4), Draft("full", gamma=6))


def _texts(
    engine: Engine, requests: Iterable[Request], draft: Draft | None
) -> dict[str, list[int]]:
    return {r.request_id: r.token_ids for r in engine.run(requests, draft)}


def test_strict_texts_are_the_dense_loops_in_bfloat16(
    plain_halves: Callable[..., Engine], various: list[Request]
) -> None:
    """Whatever drafts, in which order, with whom in the batch, and whether a video is shared."""
    settings = {"max_num_seqs": 3, "strict": 9}
    dense = _texts(plain_halves(**settings), various, None)
    for draft in DRAFTS:
        engine = plain_halves(**settings)
        assert _texts(engine, reversed(various), draft) == dense
        assert engine.counters.vision_passes < len(various)
    one, other = (
        _texts(plain_halves(max_num_seqs=3), various, draft) for draft in (None, DRAFTS[1])
    )
    assert one != other, "without `strict` nothing differs here either: the test shows nothing"


def test_our_cpu_kernels_need_no_strict(
    halves: Callable[..., Engine], various: list[Request]
) -> None:
    """A row's sums are the same in any company and at any width, so bfloat16 texts are those of
    each request alone."""
    engine = halves(max_num_seqs=1)
    if not loader.supports("linear", engine.model.embedding.weight):
        pytest.skip("no AVX512_BF16 or no compiler here")
    alone = _texts(engine, various, None)
    for draft in (None, *DRAFTS):
        assert _texts(halves(max_num_seqs=3), reversed(various), draft) == alone


def test_strict_needs_room_for_gamma(
    halves: Callable[..., Engine], requests: list[Request]
) -> None:
    with pytest.raises(ValueError, match="γ = 5"):
        next(halves(strict=5).run(requests, Draft(gamma=5)))


# ----------------------------------------------------------------------------------------- sampling


@pytest.fixture(scope="session")
def seeded(requests: list[Request]) -> list[Request]:
    sampling = Sampling(24, temperature=0.9, top_p=0.95, top_k=40, repetition_penalty=1.1)
    return [replace(r, sampling=replace(sampling, seed=i)) for i, r in enumerate(requests)]


@pytest.fixture(scope="session")
def seeded_texts(engine: Engine, seeded: list[Request]) -> dict[str, list[int]]:
    """The dense loop's."""
    return _texts(engine, seeded, None)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "dense"])
def test_a_seeded_text_is_the_dense_loops_whatever_drafts(
    engine: Engine, seeded: list[Request], seeded_texts: dict[str, list[int]], policy: str
) -> None:
    assert _texts(engine, reversed(seeded), POLICIES[policy]) == seeded_texts


def test_other_seeds_draw_other_texts(
    engine: Engine, seeded: list[Request], seeded_texts: dict[str, list[int]]
) -> None:
    other = [replace(r, sampling=replace(r.sampling, seed=i + 100)) for i, r in enumerate(seeded)]
    assert _texts(engine, other, None) != seeded_texts


def test_without_a_seed_rows_of_all_kinds_share_a_batch(
    engine: Engine, requests: list[Request], expected: dict
) -> None:
    drawn = replace(requests[1], sampling=Sampling(30, temperature=1.0))
    seeded = replace(requests[2], sampling=Sampling(30, temperature=1.0, seed=5))
    for draft in (Draft(), Draft("ngram"), None):
        results = {
            r.request_id: r.token_ids for r in engine.run([requests[0], drawn, seeded], draft)
        }
        assert results["r0"] == expected["r0"]
        assert len(results["r1"]) == 30
    again = {r.request_id: r.token_ids for r in engine.run([seeded], None)}
    assert again["r2"] == results["r2"]


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.3}, {"min_tokens": 12}])
def test_processors_are_applied_as_generate_applies_them(
    engine: Engine,
    requests: list[Request],
    generate: Callable[[Engine, Request], list[int]],
    settings: dict,
) -> None:
    greedy = generate(engine, replace(requests[3], sampling=Sampling(30)))
    stops = (greedy[2],) if "min_tokens" in settings else ()  # something to hold back
    request = replace(requests[3], sampling=Sampling(30, stop_token_ids=stops, **settings))
    out = generate(engine, request)
    assert out != generate(engine, replace(request, sampling=Sampling(30, stop_token_ids=stops)))
    for draft in (Draft("random", k=2, gamma=5), Draft("ngram"), None):
        (result,) = engine.run([request], draft)
        assert result.token_ids == out


def test_a_stop_text_ends_the_output_and_is_no_part_of_it(
    engine: Engine, requests: list[Request]
) -> None:
    request = replace(requests[5], sampling=Sampling(30))
    (whole,) = engine.run([request], None)
    stop = whole.text[8:11]
    for draft in (Draft("full", gamma=8), None):
        (result,) = engine.run([replace(request, sampling=Sampling(30, stop=(stop,)))], draft)
        assert result.text == whole.text[: whole.text.index(stop)]
        assert result.finish_reason == "stop"
        assert result.token_ids == whole.token_ids[: len(result.token_ids)]
