from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

from jobs.demo_model import world
from jobs.demo_model.model import SHAPES, processor
from jobs.demo_model.training import batches
from jobs.demo_model.training import train as trainer
from jobs.demo_model.training.forward import Probes, say, see


@pytest.fixture(scope="module")
def words():
    return trainer.tokenizer()


@pytest.fixture(scope="module")
def model(words) -> Qwen2VLForConditionalGeneration:
    torch.manual_seed(1)
    return trainer.build("demo", words).eval()


def test_every_word_of_the_world_is_one_token(words) -> None:
    rng = random.Random(3)
    for scene in world.draw_scenes(rng, 12):
        text = f" a {scene.size} {scene.colour} {scene.kind}"
        assert len(words(text)["input_ids"]) == 4
    assert words.decode(words("Ünï\n7 code 🎬")["input_ids"]) == "Ünï\n7 code 🎬"


@torch.no_grad()
def test_the_training_tower_is_the_models_own(model, words) -> None:
    batch = batches.draw_batch(random.Random(0), words, batches.Difficulty(3, varied=True), 600)
    pairs = len(batch.patches)
    grids = torch.tensor([(1, *batch.grid[1:])] * pairs)
    own = model.model.visual(batch.patches.flatten(0, 1), grids).pooler_output
    torch.testing.assert_close(see(model, batch).flatten(0, 1), own, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_conversation_sees_the_video_and_itself_alone(model, words) -> None:
    """The logits of a packed conversation are those of the model's own forward on that conversation
    alone."""
    batch = batches.draw_batch(random.Random(4), words, batches.Difficulty(2), 400)
    logits, target = say(model, batch)
    asked = batch.target[0] != -100
    first = int(asked.sum())
    ids = batch.ids[0]
    visual = int((ids == model.config.video_token_id).sum())
    head = ids[: visual + 4 + 1]  # user, newline, <|vision_start|>, the video, <|vision_end|>
    ends = (ids[len(head) :] == words.convert_tokens_to_ids("<|im_start|>")).nonzero()[:, 0]
    turns = ids[len(head) :]
    caption = world.CLAUSE.findall(words.decode(turns[: int(ends[1]) if len(ends) > 1 else None]))
    assert len(caption) == batch.grid[0] // 2
    # the caption is the first conversation: nothing before it but the video, so the prompt alone
    # gives the same
    length = (
        len(head)
        + int((batch.unit[0] < len(caption)).logical_and(batch.unit[0] >= 0).nonzero()[-1])
        + 1
        - len(head)
    )
    alone = ids[None, :length]
    types = torch.where(alone == model.config.video_token_id, 2, 0)
    frames = batch.patches[: batch.grid[0]].flatten(0, 1)
    own = model(
        input_ids=alone,
        pixel_values_videos=frames,
        video_grid_thw=torch.tensor([batch.grid]),
        mm_token_type_ids=types,
    ).logits[0]
    places = asked[:length].nonzero()[:, 0]
    torch.testing.assert_close(logits[: len(places)], own[places], rtol=1e-3, atol=1e-4)
    assert first > len(places)  # questions follow
    assert target[: len(places)].tolist() == [*ids[places[1:]].tolist(), words.eos_token_id]


@torch.no_grad()
@pytest.mark.parametrize("even", [False, True])
def test_a_long_clip_is_said_as_the_models_own_forward_says_it(model, words, even: bool) -> None:
    batch = batches.draw_long_batch(
        random.Random(5), words, 5, (2, 3), visual=300, tokens=800, even=even
    )
    batch.noise = 0.0
    logits, target = say(model, batch)
    visual = batch.ids[0] == model.config.video_token_id
    temporal = batch.grid[0]
    assert batch.order.shape == (len(batch.ids), temporal) and int(visual.sum()) == temporal * 6
    # the caption's conversation, the first behind the video, sees what the model alone sees
    length = int((batch.unit[0] == batch.scenes - 1).nonzero()[-1]) + 1
    alone = batch.ids[:1, :length]
    own = model(
        input_ids=alone,
        pixel_values_videos=batch.patches[batch.order[0]].flatten(0, 1),
        video_grid_thw=torch.tensor([batch.grid]),
        mm_token_type_ids=torch.where(alone == model.config.video_token_id, 2, 0),
    ).logits[0]
    places = (batch.target[0, :length] != -100).nonzero()[:, 0]
    torch.testing.assert_close(logits[: len(places)], own[places], rtol=1e-3, atol=1e-4)
    assert target[: len(places)].tolist()[-1] == words.eos_token_id


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12), st.booleans())
def test_a_long_clips_scenes_follow_one_another(words, seed: int, scenes: int, even: bool) -> None:
    batch = batches.draw_long_batch(
        random.Random(seed), words, scenes, (2, 2), visual=200, tokens=600, even=even
    )
    pace = len(batch.patches) // (len(batch.ids) * scenes)
    for clip, order in enumerate(batch.order):
        scene = (order - clip * scenes * pace) // pace
        assert scene.unique_consecutive().tolist() == list(range(scenes))
        if even:
            assert scene.bincount().unique().numel() == 1


def test_the_small_model_speaks_the_same_tokens_with_few_parameters(words) -> None:
    small = trainer.build("demo_small", words)
    assert sum(p.numel() for p in small.parameters()) <= 800_000
    assert small.config.text_config.vocab_size == len(words)
    assert set(SHAPES) == {"demo", "demo_small"}


def test_the_curriculum_ends_with_long_clips_and_never_speeds_up() -> None:
    rates = [stage.rate for stage in trainer.STAGES]
    assert rates == sorted(rates, reverse=True)
    visual = [stage.level.visual for stage in trainer.STAGES]
    assert visual == sorted(visual) and visual[-1] > 4096
    assert trainer.STAGES[-1].enough > 1  # the last one goes on until the steps are used up


def test_pixels_are_cut_as_the_processor_cuts_them(words) -> None:
    process = processor(words)
    frames = torch.randint(0, 256, (4, 3, 84, 112), dtype=torch.uint8)
    fed = process.video_processor(
        [frames], do_resize=False, do_sample_frames=False, return_tensors="pt"
    )
    ours = batches._patches((frames.float() - batches.MEAN) / batches.STD, 3, 4)
    torch.testing.assert_close(ours.flatten(0, 1), fed["pixel_values_videos"], rtol=1e-5, atol=1e-5)


def test_training_is_seeded_and_lowers_the_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = []
    for run in ("a", "b"):
        trainer.train(
            tmp_path / run, steps=6, tokens=300, exam_every=3, exam_clips=4, threads=1, warmup=2
        )
        log = [line for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
        losses.append([line.split('"minutes"')[0] for line in log])
    assert losses[0] == losses[1] and len(losses[0]) == 2
    loss = [float(line.split('"train_loss": ')[1].split(",")[0]) for line in losses[0]]
    assert loss[1] < loss[0]
    assert AutoProcessor.from_pretrained(tmp_path / "a").tokenizer.eos_token == "<|im_end|>"
    a, b = (Qwen2VLForConditionalGeneration.from_pretrained(tmp_path / run) for run in ("a", "b"))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_long_stage_and_a_teacher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words, model
) -> None:
    trainer.save(model, words, tmp_path / "teacher")
    stage = next(n for n, stage in enumerate(trainer.STAGES) if stage.level.visual)
    trainer.train(
        tmp_path / "small",
        shape="demo_small",
        steps=4,
        tokens=300,
        exam_every=4,
        exam_clips=1,
        threads=1,
        warmup=2,
        teacher=tmp_path / "teacher",
        stage=stage,
    )
    (line,) = [
        json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")
    ]
    assert {"clauses", "answers", "long_clauses", "long_answers"} <= set(line)


@torch.no_grad()
def test_a_teacher_is_matched_where_the_student_says_the_same(model, words) -> None:
    """The cross entropy with its own words is the model's entropy: nothing less is possible."""
    batch = batches.draw_batch(random.Random(2), words, batches.Difficulty(2), 300, scenes=2)
    probes = Probes(model.config.text_config.hidden_size)
    logits, target = say(model, batch)
    turns = batch.turns[batch.target != -100]
    assert {words.decode(t) for t in target[turns]} == {" Scene", "<|im_end|>"}
    assert int(turns.sum()) == 2 * len(batch.ids)
    weight = torch.where(turns, trainer.TURNING, 1.0)
    weight /= weight.sum()
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1) @ weight
    plain = torch.nn.functional.cross_entropy(logits, target, reduction="none") @ weight

    def loss(teacher: Qwen2VLForConditionalGeneration | None) -> torch.Tensor:
        torch.manual_seed(0)  # which tokens are read
        return trainer.loss_of(model, probes, teacher, batch)

    torch.testing.assert_close(loss(None) - loss(model), (plain - entropy) / 2)


@torch.no_grad()
def test_what_the_probes_are_asked_is_true(model, words, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch's scenes and looks against the stories it was drawn from."""
    stories = []
    draw = world.draw_scenes
    monkeypatch.setattr(
        world, "draw_scenes", lambda rng, count: stories.append(draw(rng, count)) or stories[-1]
    )
    batch = batches.draw_long_batch(random.Random(8), words, 4, (2, 2), visual=200, tokens=900)
    for clip, story in enumerate(stories):
        for moment, scene in enumerate(batch.scene[clip].tolist()):
            kind, colour = batch.looks[clip, moment].tolist()
            assert (list(world.KINDS)[kind], list(world.COLOURS)[colour]) == (
                story[scene].kind,
                story[scene].colour,
            )
    out = Probes(model.config.text_config.hidden_size)(model, batch)
    assert out.number.shape == (*batch.scene.shape, world.MAX_SCENES)
    assert all(loss > 0 for loss in out.losses.values())
