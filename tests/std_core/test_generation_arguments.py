"""Calls of `generate`, made both ways: equal outcomes, or a refusal by name."""

from __future__ import annotations

import builtins
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from jobs.suites.shared import tiny_models
from pipeline.config import ROOT
from std_core import sparse_to_dense
from std_core.decoding.generation_fields import (
    HONOURED,
    REFUSED,
    WITHOUT_EFFECT,
    check_config,
    neutralize,
    refusals,
)
from std_core.engine.engine import Engine
from std_core.model.checkpoint import Checkpoint
from std_core.types import Draft, Request, Sampling
from tests.std_core import generate_cases
from tests.std_core.generate_cases import (
    BOTH_REFUSE,
    DENSE,
    LLAVA_CASES,
    QWEN_CASES,
    SAME,
    TEXT_CASES,
    VISUAL_CASES,
    Case,
)


class EndsAfterTokens(StoppingCriteria):
    """Ends all rows at its n-th call: one call per step, whatever the engine's rounds are."""

    def __init__(self, n: int):
        self.left = n

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.left -= 1
        return torch.full((len(input_ids),), self.left <= 0)


class EndsRowByRow(StoppingCriteria):
    """Ends row i of the batch after 3 + 2 i tokens, and needs to see whole batches."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.step += 1
        return torch.arange(len(input_ids)) * 2 + 3 <= self.step


class EndsByScore(StoppingCriteria):
    """Ends a row by the scores of the second step."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        two = len(scores) >= 2
        return torch.tensor(
            [two and bool(row[3] < row[4]) for row in scores[min(1, len(scores) - 1)]]
        )


class Pure(LogitsProcessor):
    """Forbids the token that follows the newest one by 1."""

    is_pure = True

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        forbidden = (input_ids[:, -1:] + 1) % scores.shape[-1]
        return scores.scatter(1, forbidden, float("-inf"))


class Stateful(LogitsProcessor):
    """Forbids another token at each of its calls, and another one in each row of the batch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls += 1
        order = scores.argsort(-1, descending=True)
        forbidden = order[:, : 1 + self.calls % 3]
        rows = (torch.arange(len(scores)) + self.calls) % 2 == 0
        return torch.where(rows[:, None], scores.scatter(1, forbidden, float("-inf")), scores)


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.events.append(value.tolist())

    def end(self) -> None:
        self.events.append("end")


@pytest.fixture(scope="module")
def hf(families: Callable[[str], Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(families("llama"), dtype=torch.float32)


@pytest.fixture(scope="module")
def names(hf: Any, families: Callable[[str], Path]) -> dict[str, Any]:
    """What the cases' source refers to."""
    tokenizer = Checkpoint.load(str(families("llama"))).tokenizer
    tokenizer.padding_side = "left"
    batch = tokenizer(["a red square", "a large blue triangle moves up and left"], padding=True)
    ids = torch.tensor(batch["input_ids"])
    mask = torch.tensor(batch["attention_mask"])
    tokens = hf.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    generated = tokens[:, ids.shape[1] :].tolist()
    return {
        "ids": ids,
        "mask": mask,
        "n": ids.shape[1],
        "embeds": hf.get_input_embeddings()(ids),
        "tokenizer": tokenizer,
        "first": generated[0][0],
        "stop": generated[1][5],
        "text": tokenizer.decode(generated[0][3:5]),
        "EndsAfterTokens": EndsAfterTokens,
        "EndsRowByRow": EndsRowByRow,
        "EndsByScore": EndsByScore,
        "Pure": Pure,
        "Stateful": Stateful,
        "Recorder": Recorder,
    }


class Names(dict[str, Any]):
    """Names of a case's source; those of transformers as well."""

    def __missing__(self, name: str) -> Any:
        if name in dir(builtins):
            raise KeyError(name)
        return getattr(transformers, name)


def keywords(case: Case, names: dict[str, Any]) -> dict[str, Any]:
    """A case's keywords, made anew: processors and streamers have state."""
    given = eval(f"dict({case.call})", {}, Names(names))
    if not {"inputs", "input_ids", "attention_mask"} & set(given):
        given = {"input_ids": names["ids"], "attention_mask": names["mask"]} | given
    if not {"max_new_tokens", "max_length", "generation_config"} & set(given):
        given["max_new_tokens"] = 12
    return given


def outcome(generate: Callable[..., Any], given: dict[str, Any]) -> Any:
    try:
        return generate(**given)
    except ValueError as error:
        return error


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, torch.Tensor):
        assert ours.tolist() == theirs.tolist()
        return
    assert type(ours) is type(theirs)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    for name in ("scores", "logits"):
        assert (
            (ours[name] is None) == (theirs[name] is None) if name in theirs else name not in ours
        )
        for step, expected in enumerate(theirs.get(name) or ()):
            row_goes_on = ours[name][step].any(1)  # zeros behind a row's end
            assert row_goes_on.any()
            assert torch.allclose(ours[name][step][row_goes_on], expected[row_goes_on], atol=1e-4)


@pytest.mark.parametrize("case", TEXT_CASES, ids=lambda case: case.call)
def test_a_call_gives_what_generate_gives_or_is_refused_by_name(
    hf: Any, names: dict[str, Any], case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    check_case(hf, names, case, caplog)


def check_case(
    hf: Any, names: dict[str, Any], case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    """Make a call both ways."""
    fast = sparse_to_dense(hf, Draft("random", keep=0.5, gamma=3))
    given = keywords(case, names)
    with caplog.at_level(logging.WARNING, "std_core.generate"):
        ours = outcome(fast.generate, given)
    if case.outcome not in (SAME, DENSE, BOTH_REFUSE):
        assert isinstance(ours, ValueError) and str(ours) == case.outcome
        return
    expected_arguments = keywords(case, names)
    theirs = outcome(hf.generate, expected_arguments)
    if case.outcome == BOTH_REFUSE:
        assert isinstance(theirs, ValueError) and isinstance(ours, ValueError)
        assert str(ours) == str(theirs)
        return
    if isinstance(ours, ValueError):
        raise ours
    assert not isinstance(theirs, ValueError)
    assert_same(ours, theirs)
    assert ("decoding densely" in caplog.text) == (case.outcome == DENSE)
    assert bool(fast.results) == (case.outcome == SAME)
    if any(len(result.token_ids) > 1 for result in fast.results):
        assert sum(result.drafted for result in fast.results) > 0
    streamer = given.get("streamer")
    if streamer is not None:
        assert streamer.events == expected_arguments["streamer"].events


VISUAL_FAMILIES = [name for name in tiny_models.FAMILIES if name not in ("llama", "qwen3")]


@pytest.fixture(scope="module", params=VISUAL_FAMILIES)
def visual(request: pytest.FixtureRequest, families: Callable[[str], Path]) -> Any:
    """A model, and what the cases about videos and images refer to."""
    path = families(request.param)
    hf = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    hf.generation_config.eos_token_id = 2  # not the padding's id, which then shows the padding
    processor = Checkpoint.load(str(path)).processor
    processor.tokenizer.padding_side = "left"
    batch = visual_batch(processor, [["image"], ["video"]])

    def twice(*keys: str) -> dict[str, Any]:
        return batch | {key: torch.cat([batch[key]] * 2) for key in keys if key in batch}

    return hf, {
        "batch": batch,
        "without": lambda *keys: {k: v for k, v in batch.items() if k not in keys},
        "twice": twice,
        "flat_images": lambda: visual_batch(processor, [["image", "image"], []], flat=True),
        "two_images": lambda *keys: {
            k: v
            for k, v in visual_batch(processor, [["image"], ["image", "image"]]).items()
            if k not in keys
        },
        "Recorder": Recorder,
    }


def visual_batch(processor: Any, rows: list[list[str]], flat: bool = False) -> dict[str, Any]:
    """A processor's batch of rows with these items.

    Args:
        flat: give it one list of images, not one for each row.
    """
    pixels = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, (*shape, 3, 56, 84), dtype=torch.uint8, generator=pixels)

    texts = [
        processor.apply_chat_template(
            [
                {
                    "role": "user",
                    "content": [
                        *({"type": item} for item in row),
                        {"type": "text", "text": "Why?"},
                    ],
                }
            ],
            add_generation_prompt=True,
            tokenize=False,
        )
        for row in rows
    ]
    images = [[drawn() for item in row if item == "image"] for row in rows]
    videos = [drawn(4) for row in rows for item in row if item == "video"]
    options: dict[str, Any] = {}
    if videos:
        sampled = {"total_num_frames": 4, "fps": 2.0, "frames_indices": [0, 1, 2, 3]}
        options = {"videos": videos, "video_metadata": [sampled] * len(videos)}
        options |= {"do_sample_frames": False}
    output = processor(
        text=texts,
        images=[image for row in images for image in row]
        if flat
        else [row for row in images if row],
        padding=True,
        return_tensors="pt",
        **options,
    )
    return {key: value for key, value in output.items() if key != "video_metadata"}


@pytest.mark.parametrize("case", VISUAL_CASES, ids=lambda case: case.call)
def test_a_call_with_videos_and_images(
    visual: Any, case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    check_case(*visual, case, caplog)


@pytest.mark.parametrize("case", QWEN_CASES + LLAVA_CASES, ids=lambda case: case.call)
def test_a_call_with_the_inputs_of_one_family(
    visual: Any, case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    is_llava = visual[0].config.model_type == "llava_onevision"
    if is_llava != (case in LLAVA_CASES):
        pytest.skip("a case of another family")
    check_case(*visual, case, caplog)


def test_the_readme_lists_these_calls() -> None:
    readme = (ROOT / "tests" / "README.md").read_text()
    for cases in (TEXT_CASES, VISUAL_CASES, QWEN_CASES, LLAVA_CASES):
        assert generate_cases.table(cases) in readme


def test_every_field_of_the_installed_generation_config_is_dealt_with() -> None:
    """A field that a new version of transformers adds has to be put in a group."""
    groups = (HONOURED, WITHOUT_EFFECT, set(REFUSED))
    for name in vars(GenerationConfig()):
        assert sum(name in group for group in groups) == 1, name


def test_refused_fields_have_a_neutral_default_and_their_name_in_the_sentence() -> None:
    check_config(GenerationConfig())
    defaults = GenerationConfig._get_default_generation_params()
    for name in REFUSED:
        config = GenerationConfig(return_dict_in_generate=True)
        setattr(config, name, defaults.get(name))
        check_config(config)
        setattr(config, name, "another value")
        with pytest.raises(ValueError, match=f"^{name} = 'another value': "):
            check_config(config)


def test_an_unknown_field_is_refused_unless_it_has_its_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("std_core.decoding.generation_fields._FIELDS", {"new_search": None})
    config = GenerationConfig()
    config.new_search = None
    check_config(config)
    config.new_search = 3
    with pytest.raises(ValueError, match="new_search = 3"):
        check_config(config)


def test_a_models_own_generation_config_is_checked(hf: Any, names: dict[str, Any]) -> None:
    fast = sparse_to_dense(hf)
    hf.generation_config.num_beams = 3
    try:
        with pytest.raises(ValueError, match="num_beams = 3"):
            fast.generate(names["ids"], max_new_tokens=3)
        assert fast.generate(names["ids"], max_new_tokens=3, num_beams=1).shape[1] == names["n"] + 3
    finally:
        hf.generation_config.num_beams = None


@pytest.mark.parametrize("slots", [1, 2])
def test_streams_and_criteria_see_whole_batches_whatever_the_slots(
    hf: Any, names: dict[str, Any], slots: int
) -> None:
    """Three rows in one or two slots: the streams are those of `generate`'s lockstep."""
    ids = torch.cat([names["ids"], names["ids"][:1].flip(1)])
    mask = torch.ones_like(ids)
    fast = sparse_to_dense(hf, Draft("ngram", gamma=4), max_num_seqs=slots)
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": names["stop"]}
    streams = (Recorder(), Recorder())
    for generate, streamer in zip((fast.generate, hf.generate), streams, strict=True):
        criteria = [EndsRowByRow()]
        generate(ids, attention_mask=mask, streamer=streamer, stopping_criteria=criteria, **options)
    assert streams[0].events == streams[1].events


def test_a_dense_call_is_reported_once(
    hf: Any, names: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    fast = sparse_to_dense(hf)
    for _ in range(2):
        fast.generate(names["ids"], max_new_tokens=2, logits_processor=[Stateful()])
    assert caplog.text.count("the logits processor Stateful may depend") == 1


def test_seeded_copies_differ_and_share_their_prompt(hf: Any, names: dict[str, Any]) -> None:
    fast = sparse_to_dense(hf)
    options: dict[str, Any] = {
        "attention_mask": names["mask"],
        "do_sample": True,
        "temperature": 5.0,
        "num_return_sequences": 3,
        "max_new_tokens": 8,
    }
    first, again, other = (fast.generate(names["ids"], seed=s, **options) for s in (1, 1, 100))
    assert first.tolist() == again.tolist() != other.tolist()
    assert len(set(map(tuple, first[:3].tolist()))) == 3


def test_an_engine_says_what_it_ignores_in_a_checkpoints_generation_config(
    families: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests have no field for it, so it is not refused; a forced last token is honoured."""
    folder = tmp_path / "model"
    shutil.copytree(families("llama"), folder)
    plain = Engine.load(str(folder))
    asked = GenerationConfig(
        num_beams=3, guidance_scale=2.0, forced_eos_token_id=9, eos_token_id=2, pad_token_id=0
    )
    asked.save_pretrained(folder)
    with caplog.at_level(logging.WARNING, "std_core.engine.engine"):
        engine = Engine.load(str(folder))
    assert "num_beams = 3: beam search is not supported" in caplog.text
    assert "guidance_scale = 2.0: classifier-free guidance is not supported" in caplog.text
    request = Request("0", "a red square moves", sampling=Sampling(8))
    (expected,) = plain.run([request], None)
    (result,) = engine.run([request], Draft("ngram"))
    assert len(expected.token_ids) == 8
    assert result.token_ids == [*expected.token_ids[:7], 9]


def test_neutral_fields_ask_for_nothing() -> None:
    config = GenerationConfig(num_beams=3, penalty_alpha=0.6, return_dict_in_generate=True)
    assert list(refusals(config)) == ["num_beams", "penalty_alpha"]
    neutralize(config)
    assert not refusals(config)
