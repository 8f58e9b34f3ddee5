"""Training of the demo models: batches, the fast forward pass, and the curriculum."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

from jobs.demo_model import model as demo_model
from jobs.demo_model import world
from jobs.demo_model.training import batches, train
from jobs.demo_model.training.batches import IGNORED
from jobs.demo_model.training.forward import Probes, encode_frame_pairs, predict
from std_core.model.checkpoint import ModelInputs
from std_core.model.families import TEXT, VIDEO
from std_core.model.positions import MRope, reference_positions


@pytest.fixture(scope="module")
def tokenizer():
    return demo_model.tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer) -> Qwen2VLForConditionalGeneration:
    torch.manual_seed(1)
    return demo_model.build("demo", tokenizer).eval()


def test_every_word_of_a_caption_is_one_token(tokenizer) -> None:
    rng = random.Random(3)
    for scene in world.draw_scenes(rng, 12):
        text = f" a {scene.size} {scene.colour} {scene.kind}"
        assert len(tokenizer(text)["input_ids"]) == 4
    any_text = "Ünï\n7 code 🎬"
    assert tokenizer.decode(tokenizer(any_text)["input_ids"]) == any_text


@torch.no_grad()
def test_the_training_tower_computes_the_models_own_features(model, tokenizer) -> None:
    varied = batches.Difficulty(3, varied=True)
    batch = batches.draw_batch(random.Random(0), tokenizer, varied, 600)
    pairs = len(batch.patches)
    grids = torch.tensor([(1, *batch.grid[1:])] * pairs)
    expected = model.model.visual(batch.patches.flatten(0, 1), grids).pooler_output
    features = encode_frame_pairs(model, batch).flatten(0, 1)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)


def own_logits(model, batch: batches.TrainingBatch, length: int, frames: torch.Tensor):
    """Logits of the model's own forward on the first `length` tokens of the first clip, at the
    positions of the reference rule."""
    ids = batch.text.ids[:1, :length]
    inputs = ModelInputs(
        ids,
        token_types=torch.where(ids == model.config.video_token_id, VIDEO, TEXT),
        video_patches=frames,
        video_grid=torch.tensor([batch.grid]),
    )
    mrope = MRope.of(model.config)
    assert mrope is not None
    return model(
        input_ids=ids,
        pixel_values_videos=frames,
        video_grid_thw=inputs.video_grid,
        mm_token_type_ids=inputs.token_types,
        position_ids=reference_positions(inputs, mrope),
    ).logits[0]


@torch.no_grad()
def test_a_conversation_attends_to_the_video_and_to_itself_alone(model, tokenizer) -> None:
    """The logits of the packed caption are those of the model's own forward on the caption alone,
    the first conversation behind the video."""
    batch = batches.draw_batch(random.Random(4), tokenizer, batches.Difficulty(2), 400)
    predictions = predict(model, batch)
    ids = batch.text.ids[0]
    predicted = batch.text.target[0] != IGNORED
    unit = batch.text.unit[0]
    visual = batch.text.visual
    conversations = ids[visual.stop + 1 :]
    starts = (conversations == tokenizer.convert_tokens_to_ids("<|im_start|>")).nonzero()[:, 0]
    second = int(starts[1]) if len(starts) > 1 else None
    clauses = world.CLAUSE_PATTERN.findall(tokenizer.decode(conversations[:second]))
    assert len(clauses) == batch.grid[0] // 2
    length = int((unit.ge(0) & unit.lt(len(clauses))).nonzero()[-1]) + 1
    frames = batch.patches[: batch.grid[0]].flatten(0, 1)
    expected = own_logits(model, batch, length, frames)
    of_caption = predicted[:length].nonzero()[:, 0]
    count = len(of_caption)
    torch.testing.assert_close(
        predictions.logits[:count], expected[of_caption], rtol=1e-3, atol=1e-4
    )
    assert int(predicted.sum()) > count  # questions follow
    assert predictions.target[:count].tolist() == [
        *ids[of_caption[1:]].tolist(),
        tokenizer.eos_token_id,
    ]


@torch.no_grad()
@pytest.mark.parametrize("even", [False, True])
def test_logits_on_a_long_clip_are_those_of_the_models_own_forward(
    model, tokenizer, even: bool
) -> None:
    batch = batches.draw_long_batch(
        random.Random(5), tokenizer, 5, (2, 3), visual=300, tokens=800, even=even
    )
    batch.noise = 0.0
    predictions = predict(model, batch)
    visual = batch.text.ids[0] == model.config.video_token_id
    frame_pairs = batch.grid[0]
    assert batch.order.shape == (batch.size, frame_pairs)
    assert int(visual.sum()) == frame_pairs * 6
    length = int((batch.text.unit[0] == batch.scenes - 1).nonzero()[-1]) + 1
    expected = own_logits(model, batch, length, batch.patches[batch.order[0]].flatten(0, 1))
    of_caption = (batch.text.target[0, :length] != IGNORED).nonzero()[:, 0]
    count = len(of_caption)
    torch.testing.assert_close(
        predictions.logits[:count], expected[of_caption], rtol=1e-3, atol=1e-4
    )
    assert predictions.target[:count].tolist()[-1] == tokenizer.eos_token_id


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12), st.booleans())
def test_scenes_of_a_long_clip_follow_one_another(
    tokenizer, seed: int, scenes: int, even: bool
) -> None:
    batch = batches.draw_long_batch(
        random.Random(seed), tokenizer, scenes, (2, 2), visual=200, tokens=600, even=even
    )
    pace = len(batch.patches) // (batch.size * scenes)
    for clip, order in enumerate(batch.order):
        scene = (order - clip * scenes * pace) // pace
        assert scene.unique_consecutive().tolist() == list(range(scenes))
        if even:
            assert scene.bincount().unique().numel() == 1


def test_the_small_model_has_the_same_tokens_and_few_parameters(tokenizer) -> None:
    small = demo_model.build("demo_small", tokenizer)
    assert sum(p.numel() for p in small.parameters()) <= 800_000
    assert small.config.text_config.vocab_size == len(tokenizer)
    assert set(demo_model.SHAPES) == {"demo", "demo_small"}


def test_the_curriculum_ends_with_long_clips_and_its_rate_never_rises() -> None:
    rates = [stage.rate for stage in train.STAGES]
    assert rates == sorted(rates, reverse=True)
    visual = [stage.level.visual for stage in train.STAGES]
    assert visual == sorted(visual) and visual[-1] > 4096
    assert train.STAGES[-1].passing > 1  # never passed: it goes on until the steps are used up


def test_patches_are_those_of_the_processor(tokenizer) -> None:
    processor = demo_model.processor(tokenizer)
    frames = torch.randint(0, 256, (4, 3, 84, 112), dtype=torch.uint8)
    expected = processor.video_processor(
        [frames], do_resize=False, do_sample_frames=False, return_tensors="pt"
    )["pixel_values_videos"]
    patches = batches._patches((frames.float() - batches.MEAN) / batches.STD, 3, 4)
    torch.testing.assert_close(patches.flatten(0, 1), expected, rtol=1e-5, atol=1e-5)


def test_training_is_seeded_and_lowers_the_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = []
    for name in ("a", "b"):
        size = "--steps=6 --tokens=300 --exam-every=3 --exam-clips=4 --threads=1 --warmup=2"
        assert train.main([f"--output={tmp_path / name}", *size.split()]) == 0
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
        logs.append([line.split('"minutes"')[0] for line in lines])
    assert logs[0] == logs[1] and len(logs[0]) == 2
    losses = [float(line.split('"train_loss": ')[1].split(",")[0]) for line in logs[0]]
    assert losses[1] < losses[0]
    assert AutoProcessor.from_pretrained(tmp_path / "a").tokenizer.eos_token == "<|im_end|>"
    a, b = (Qwen2VLForConditionalGeneration.from_pretrained(tmp_path / name) for name in "ab")
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_stage_with_long_clips_and_a_teacher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer, model
) -> None:
    demo_model.save(model, tokenizer, tmp_path / "teacher")
    stage = next(n for n, stage in enumerate(train.STAGES) if stage.level.visual)
    flags = train.Flags(
        output=str(tmp_path / "small"),
        shape="demo_small",
        steps=4,
        tokens=300,
        exam_every=4,
        exam_clips=1,
        threads=1,
        warmup=2,
        teacher=str(tmp_path / "teacher"),
        stage=stage,
    )
    train.Trainer(flags).run()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    (results,) = map(json.loads, lines)
    assert {"clauses", "answers", "long_clauses", "long_answers"} <= set(results)


def test_training_without_an_output_exits_with_2() -> None:
    assert train.main([]) == 2


@torch.no_grad()
def test_the_loss_with_the_model_as_its_own_teacher_is_its_entropy(model, tokenizer) -> None:
    """The cross entropy with its own probabilities cannot be smaller."""
    batch = batches.draw_batch(random.Random(2), tokenizer, batches.Difficulty(2), 300, scenes=2)
    probes = Probes(model.config.text_config.hidden_size)
    logits, target = predict(model, batch)
    clause_ends = batch.clause_ends[batch.text.target != IGNORED]
    assert {tokenizer.decode(t) for t in target[clause_ends]} == {" Scene", "<|im_end|>"}
    assert int(clause_ends.sum()) == 2 * batch.size
    weight = torch.where(clause_ends, train.CLAUSE_END_WEIGHT, 1.0)
    weight /= weight.sum()
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1) @ weight
    with_truth = torch.nn.functional.cross_entropy(logits, target, reduction="none") @ weight

    def loss(teacher: Qwen2VLForConditionalGeneration | None) -> torch.Tensor:
        torch.manual_seed(0)  # which tokens the probes read
        return train.training_loss(model, probes, teacher, batch)

    torch.testing.assert_close(loss(None) - loss(model), (with_truth - entropy) / 2)


@torch.no_grad()
def test_the_probes_targets_are_those_of_the_drawn_scenes(
    model, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stories = []
    draw = world.draw_scenes
    monkeypatch.setattr(
        world, "draw_scenes", lambda rng, count: stories.append(draw(rng, count)) or stories[-1]
    )
    batch = batches.draw_long_batch(random.Random(8), tokenizer, 4, (2, 2), visual=200, tokens=900)
    for clip, story in enumerate(stories):
        for pair, scene in enumerate(batch.scene[clip].tolist()):
            kind, colour = batch.looks[clip, pair].tolist()
            assert list(world.KINDS)[kind] == story[scene].kind
            assert list(world.COLOURS)[colour] == story[scene].colour
    probed = Probes(model.config.text_config.hidden_size)(model, batch)
    assert probed.scene_logits.shape == (*batch.scene.shape, world.MAX_SCENES)
    assert all(loss > 0 for loss in probed.losses.values())
