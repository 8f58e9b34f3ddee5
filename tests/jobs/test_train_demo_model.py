from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

import demo_world as world
import train_demo_model as trainer


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
    batch = trainer.draw_batch(random.Random(0), words, trainer.Difficulty(3, varied=True), 600)
    pairs = len(batch.patches)
    grids = torch.tensor([(1, *batch.grid[1:])] * pairs)
    own = model.model.visual(batch.patches.flatten(0, 1), grids).pooler_output
    torch.testing.assert_close(trainer.see(model, batch).flatten(0, 1), own, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_conversation_sees_the_video_and_itself_alone(model, words) -> None:
    """The logits of a packed conversation are those of the model's own forward on that conversation alone."""
    batch = trainer.draw_batch(random.Random(4), words, trainer.Difficulty(2), 400)
    logits, target = trainer.say(model, batch)
    asked = batch.target[0] != -100
    first = int(asked.sum())
    ids = batch.ids[0]
    visual = int((ids == model.config.video_token_id).sum())
    head = ids[: visual + 4 + 1]  # user, newline, <|vision_start|>, the video, <|vision_end|>
    ends = (ids[len(head) :] == words.convert_tokens_to_ids("<|im_start|>")).nonzero()[:, 0]
    turns = ids[len(head) :]
    caption = world.CLAUSE.findall(words.decode(turns[: int(ends[1]) if len(ends) > 1 else None]))
    assert len(caption) == batch.grid[0] // 2
    # the caption is the first conversation: nothing before it but the video, so the prompt alone gives the same
    length = (
        len(head) + int((batch.unit[0] < len(caption)).logical_and(batch.unit[0] >= 0).nonzero()[-1]) + 1 - len(head)
    )
    alone = ids[None, :length]
    types = torch.where(alone == model.config.video_token_id, 2, 0)
    frames = batch.patches[: batch.grid[0]].flatten(0, 1)
    own = model(
        input_ids=alone, pixel_values_videos=frames, video_grid_thw=torch.tensor([batch.grid]), mm_token_type_ids=types
    ).logits[0]
    places = asked[:length].nonzero()[:, 0]
    torch.testing.assert_close(logits[: len(places)], own[places], rtol=1e-3, atol=1e-4)
    assert first > len(places)  # questions follow
    assert target[: len(places)].tolist() == [*ids[places[1:]].tolist(), words.eos_token_id]


def test_pixels_are_cut_as_the_processor_cuts_them(words) -> None:
    process = trainer.processor(words)
    frames = torch.randint(0, 256, (4, 3, 84, 112), dtype=torch.uint8)
    fed = process.video_processor([frames], do_resize=False, do_sample_frames=False, return_tensors="pt")
    ours = trainer._patches((frames.float() - trainer.MEAN) / trainer.STD, 3, 4)
    torch.testing.assert_close(ours.flatten(0, 1), fed["pixel_values_videos"], rtol=1e-5, atol=1e-5)


def test_training_is_seeded_and_lowers_the_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for run in ("a", "b"):
        trainer.train(tmp_path / run, steps=6, tokens=300, exam_every=3, exam_clips=4, threads=1, warmup=2)
        log = [line for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
        losses.append([line.split('"minutes"')[0] for line in log])
    assert losses[0] == losses[1] and len(losses[0]) == 2
    loss = [float(line.split('"train_loss": ')[1].split(",")[0]) for line in losses[0]]
    assert loss[1] < loss[0]
    assert AutoProcessor.from_pretrained(tmp_path / "a").tokenizer.eos_token == "<|im_end|>"
    a, b = (Qwen2VLForConditionalGeneration.from_pretrained(tmp_path / run) for run in ("a", "b"))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
