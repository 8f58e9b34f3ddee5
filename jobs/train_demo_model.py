#!/usr/bin/env python
"""Trains the demo model: a Qwen2-VL of 2.9 M parameters that captions the world of `jobs/demo_world.py`.

    python jobs/train_demo_model.py --output conf/model/demo  # CPU only, seeded (the shipped one: README)

Single scenes first; a stage ends when held-out clauses are right, not after a number of steps (a schedule that moves on
early stalls). One video carries several conversations at once: its caption and some questions, each of which sees the
video and itself. Positions of the text against the video, frame sizes and the pace (temporal patches per scene) are
drawn at random once single scenes are known, so that the model meets long videos without having been trained on them.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

import demo_world as world

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MEAN, STD = 127.5, 127.5
MERGED = 28  # pixels a side of one visual token: patch 14, merged 2 × 2
MAX_PIXELS = 112 * 112

SHAPES = {
    "demo": {
        "text": {
            "hidden_size": 192,
            "intermediate_size": 448,
            "num_hidden_layers": 5,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
        },
        "vision": {"embed_dim": 128, "depth": 3, "num_heads": 4, "mlp_ratio": 3},
    },
}


# ------------------------------------------------------------------------------------------------ model and processor


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that any prompt can be written; every word of the world is one token."""
    rng = random.Random(0)
    stories = [world.draw_scenes(rng, world.MAX_SCENES) for _ in range(400)]
    corpus = [world.caption(s) for s in stories] + [
        text for s in stories[:40] for pair in world.questions(s) for text in pair
    ]
    corpus += [q for s in stories for n in range(1, 13) for q in world.questions(s[:n])[-1]]
    corpus += [*world.CAPTION_PROMPTS * 20, *["user\n", "assistant\n"] * 50]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[A-Za-z]+| ?[0-9]+|\n| ?[^\sA-Za-z0-9]|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=640,
            special_tokens=list(SPECIAL),
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        additional_special_tokens=list(SPECIAL[1:]),
        model_max_length=32768,
    )


def processor(words: PreTrainedTokenizerFast) -> Qwen2VLProcessor:
    """Hugging Face's own Qwen2-VL processors at the demo model's frame size."""
    size = {"shortest_edge": 56 * 56, "longest_edge": MAX_PIXELS}
    common: dict[str, Any] = {"size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return Qwen2VLProcessor(
        Qwen2VLImageProcessor(**common),
        words,
        Qwen2VLVideoProcessor(**common, cap_pixels_per_frame=False),
        chat_template=TEMPLATE,
    )


def build(shape: str, words: PreTrainedTokenizerFast) -> Qwen2VLForConditionalGeneration:
    """An untrained model, float32."""
    sizes = SHAPES[shape]
    ids: dict[str, Any] = {name: words.convert_tokens_to_ids(name) for name in SPECIAL}
    config = Qwen2VLConfig(
        text_config={
            **sizes["text"],
            "vocab_size": len(words),
            "max_position_embeddings": 32768,
            "initializer_range": 0.06,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]},
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={**sizes["vision"], "hidden_size": sizes["text"]["hidden_size"], "initializer_range": 0.06},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    model = Qwen2VLForConditionalGeneration(config).float()
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]],
        pad_token_id=ids["<|endoftext|>"],
    )
    return model


# -------------------------------------------------------------------------------------------------------- one batch


@dataclass(frozen=True)
class Difficulty:
    """What a batch is drawn from."""

    scenes: int  # at most
    varied: bool = False  # any number of scenes alike; half of the batches with other text positions, sizes, pace


@dataclass
class Batch:
    """B clips of one grid and length, each with its caption and some questions behind it."""

    patches: torch.Tensor  # (B × T, patches of a frame pair, 1176)
    grid: tuple[int, int, int]  # temporal patches, and rows and columns of patches
    ids: torch.Tensor  # (B, L)
    positions: torch.Tensor  # (3, B, L)
    mask: torch.Tensor  # (B, 1, L, L) bool
    target: torch.Tensor  # (B, L): the token each position has to say next, -100 where nothing is asked
    unit: torch.Tensor  # (B, L): which clause or answer a target belongs to


GRIDS = ((3, 4), (4, 4), (4, 3), (3, 5), (3, 3))  # tokens: rows, columns
WIDE_GRIDS = (*GRIDS, (5, 3), (4, 5), (5, 5), (2, 4), (4, 6))


def draw_batch(
    rng: random.Random, words: PreTrainedTokenizerFast, level: Difficulty, tokens: int, scenes: int = 0
) -> Batch:
    """A batch of about `tokens` positions; `scenes` fixes their number."""
    hardest = not level.varied and rng.random() < 0.5
    count = scenes or (level.scenes if hardest else rng.randint(1, level.scenes))
    varied = level.varied and rng.random() < 0.5
    rows, columns = rng.choice(WIDE_GRIDS if varied else GRIDS)
    pace = rng.choice((2, 2, 1, 3, 4)) if varied else 2
    asked = min(4 * count + 1, 5)
    length = count * pace * rows * columns + 14 + 10 * count + asked * 20
    size = max(2, min(48, tokens // length))
    stories = [world.draw_scenes(rng, count) for _ in range(size)]
    pixels = _frames(rng, stories, pace, rows * MERGED, columns * MERGED)
    return Batch(
        patches=_patches(pixels, rows, columns),
        grid=(count * pace, 2 * rows, 2 * columns),
        **_conversations(rng, words, stories, count * pace, rows, columns, asked, varied),
    )


_GRAIN = torch.randn(2_000_000, generator=torch.Generator().manual_seed(1))


def _frames(
    rng: random.Random, stories: list[tuple[world.Scene, ...]], pace: int, height: int, width: int
) -> torch.Tensor:
    """(B × frames, 3, height, width), scaled as the processor scales, with what a codec and a resize do to pixels."""
    per_scene = 2 * pace
    scene, moment, centre, shade = [], [], [], []
    for story in stories:
        tint, drift = world.grey(rng), rng.uniform(-0.5, 0.5)
        for item in story:
            spot = world.place(rng, item)
            for i in range(per_scene):
                scene.append(item)
                moment.append((i + 0.5 + drift) / per_scene)
                centre.append(spot)
                shade.append(tint)
    pixels = world.paint(scene, torch.tensor(moment), torch.tensor(centre), torch.tensor(shade), height, width)
    if rng.random() < 0.5:
        pixels = F.avg_pool2d(F.pad(pixels, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    gain, offset = rng.uniform(0.92, 1.06) / STD, rng.uniform(-6, 6) / STD - MEAN / STD
    start = rng.randrange(len(_GRAIN) // 2)
    grain = _GRAIN[start : start + pixels[:2].numel()].view_as(pixels[:2]) * (rng.uniform(0, 4) / STD)
    return pixels.view(-1, *grain.shape).mul_(gain).add_(grain.add_(offset)).view_as(pixels)


def _patches(pixels: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The processor's order: (pairs of frames, patches in 2 × 2 groups, channel × 2 × 14 × 14)."""
    x = pixels.view(-1, 2, 3, rows, 2, 14, columns, 2, 14)
    return x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(x.shape[0], rows * columns * 4, 3 * 2 * 14 * 14)


def _conversations(
    rng: random.Random,
    words: PreTrainedTokenizerFast,
    stories: list[tuple[world.Scene, ...]],
    temporal: int,
    rows: int,
    columns: int,
    asked: int,
    varied: bool,
) -> dict[str, torch.Tensor]:
    """Ids, positions, mask, targets and units of a batch: the video, and behind it its conversations side by side."""
    ask = _encoder(words)
    head = ask("<|im_start|>user\n<|vision_start|>")
    visual, at = temporal * rows * columns, len(head)
    prefix = head + [words.convert_tokens_to_ids("<|video_pad|>")] * visual + ask("<|vision_end|>")
    # per row: id, branch, place in its branch, target, unit of each token behind the prefix
    lines = [torch.tensor(_dialogues(rng, words, story, asked)).T for story in stories]
    size, longest = len(stories), len(prefix) + max(line.shape[1] for line in lines)
    ids, target, unit = (torch.full((size, longest), fill) for fill in (words.pad_token_id, -100, -1))
    branch = torch.zeros(size, longest, dtype=torch.long)
    positions = torch.zeros(3, size, longest, dtype=torch.long)
    ids[:, : len(prefix)] = torch.tensor(prefix)
    positions[:, :, :at] = torch.arange(at)
    grid = torch.meshgrid(torch.arange(temporal), torch.arange(rows), torch.arange(columns), indexing="ij")
    positions[:, :, at : at + visual] = torch.stack(grid).reshape(3, 1, -1) + at
    for row, line in enumerate(lines):
        behind = at + _gap(rng, temporal, rows, columns, varied)
        positions[:, row, at + visual] = behind  # <|vision_end|>
        span = slice(len(prefix), len(prefix) + line.shape[1])
        ids[row, span], branch[row, span], positions[:, row, span] = line[0], line[1], line[2] + behind + 1
        target[row, span], unit[row, span] = line[3], line[4]
    sees = (branch[:, None, :] == branch[:, :, None]) | (branch[:, None, :] == 0)
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    return {"ids": ids, "positions": positions, "mask": (sees & causal)[:, None], "target": target, "unit": unit}


def _gap(rng: random.Random, temporal: int, rows: int, columns: int, varied: bool) -> int:
    """How far behind the video's first position the text goes on: as transformers has it, or where it would with a
    longer or larger video."""
    usual = max(rows, columns)
    if not varied or rng.random() >= 0.4:
        return usual
    return rng.choice((max(temporal, usual), rng.randint(2, 30), rng.randint(2, 120)))


def _dialogues(
    rng: random.Random, words: PreTrainedTokenizerFast, story: tuple[world.Scene, ...], asked: int
) -> list[tuple[int, int, int, int, int]]:
    """The caption's conversation and some questions', token by token."""
    ask = _encoder(words)
    clauses = [("" if k == 1 else " ") + f"Scene {k}: {scene}." for k, scene in enumerate(story, 1)]
    pool = world.questions(story)
    questions = rng.sample(pool[:-1], min(asked, len(pool)) - 1) + pool[-1:]
    pairs = [(rng.choice(world.CAPTION_PROMPTS), clauses), *((q, [a]) for q, a in questions)]
    line, unit = [], 0
    for branch, (question, pieces) in enumerate(pairs, 1):
        opening = ask(question + "<|im_end|>\n<|im_start|>assistant\n")
        said = [(token, unit + n) for n, piece in enumerate(pieces) for token in ask(piece)]
        unit += len(pieces)
        said.append((words.eos_token_id, unit - 1))
        goals = [(-100, -1)] * (len(opening) - 1) + said
        tokens = opening + [token for token, _ in said[:-1]]
        line += [(token, branch, i, *goal) for i, (token, goal) in enumerate(zip(tokens, goals, strict=True))]
    return line


_known: dict[str, list[int]] = {}


def _encoder(words: PreTrainedTokenizerFast) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        if text not in _known:
            _known[text] = words(text, add_special_tokens=False)["input_ids"]
        return _known[text]

    return encode


# -------------------------------------------------------------------------------------------------------- the forward


def see(model: Qwen2VLForConditionalGeneration, batch: Batch) -> torch.Tensor:
    """The vision tower over equal frame pairs at once: (pairs, tokens, hidden). Same weights and result as the model's
    own forward, which takes one frame pair at a time and a Conv3d whose backward costs 40% of a step."""
    tower = model.model.visual
    pairs, count, _ = batch.patches.shape
    x = F.linear(batch.patches, tower.patch_embed.proj.weight.flatten(1))
    _, rows, columns = batch.grid
    h = torch.arange(rows)[:, None].expand(rows, columns)
    w = torch.arange(columns)[None, :].expand(rows, columns)
    order = [p.view(rows // 2, 2, columns // 2, 2).permute(0, 2, 1, 3).flatten() for p in (h, w)]
    cos, sin = tower.rotary_pos_emb(x, torch.stack(order, dim=1))
    for block in tower.blocks:
        attn, y = block.attn, block.norm1(x)
        q, k, v = attn.qkv(y).view(pairs, count, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k = q * cos + _turn(q) * sin, k * cos + _turn(k) * sin
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(pairs, count, -1)
        x = x + attn.proj(y)
        x = x + block.mlp(block.norm2(x))
    return tower.merger(x).view(pairs, count // 4, -1)


def _turn(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def say(model: Qwen2VLForConditionalGeneration, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits where something is asked, and what should have been said there: (n, vocabulary), (n,)."""
    embeds = model.get_input_embeddings()(batch.ids)
    embeds = embeds.masked_scatter((batch.ids == model.config.video_token_id)[..., None], see(model, batch))
    hidden = model.model.language_model(
        inputs_embeds=embeds,
        position_ids=batch.positions,
        attention_mask={"full_attention": batch.mask},
        use_cache=False,
    ).last_hidden_state
    asked = batch.target != -100
    return model.lm_head(hidden[asked]), batch.target[asked]


@torch.no_grad()
def exam(
    model: Qwen2VLForConditionalGeneration, words: PreTrainedTokenizerFast, level: Difficulty, clips: int
) -> dict[str, float]:
    """Held-out accuracy of clauses and answers at the level's full number of scenes. All tokens of a clause right given
    the true text before it is the same as being written right by greedy decoding, as long as all before it is right."""
    model.eval()
    rng = random.Random(10_000_019 + level.scenes)
    good = {"clauses": 0, "answers": 0}
    all_of = {"clauses": 0, "answers": 0}
    loss, seen = 0.0, 0
    while all_of["clauses"] < clips * level.scenes:
        batch = draw_batch(rng, words, level, 4000, scenes=level.scenes)
        logits, target = say(model, batch)
        loss += F.cross_entropy(logits, target, reduction="sum").item()
        seen += len(target)
        right = torch.ones_like(batch.target, dtype=torch.bool)
        right[batch.target != -100] = logits.argmax(-1) == target
        for name, units in (
            ("clauses", range(level.scenes)),
            ("answers", range(level.scenes, int(batch.unit.max()) + 1)),
        ):
            for unit in units:
                of = batch.unit == unit
                good[name] += int((right | ~of).all(1).sum())
                all_of[name] += len(of)
    model.train()
    return {name: good[name] / all_of[name] for name in good} | {"loss": loss / seen}


# ------------------------------------------------------------------------------------------------------ the curriculum

STAGES = (
    (Difficulty(1), 0.94),
    (Difficulty(2), 0.93),
    (Difficulty(3), 0.93),
    (Difficulty(4), 0.93),
    (Difficulty(6), 0.93),
    (Difficulty(8), 0.93),
    (Difficulty(8, varied=True), 2.0),
)


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Warm-up, a plateau, and a linear decay over the last third of the steps."""
    return peak * min(1.0, (step + 1) / warmup, max(1 - step / steps, 0.001) * 3)


def train(
    output: Path,
    shape: str = "demo",
    seed: int = 0,
    steps: int = 4800,
    peak: float = 2e-3,
    tokens: int = 4096,
    warmup: int = 200,
    exam_every: int = 100,
    exam_clips: int = 100,
    threads: int = 2,
    resume: Path | None = None,
    stage: int = 0,
) -> None:
    """Trains and writes a folder that `from_pretrained` reads (weights as safetensors, tokenizer, processors).

    Args:
        output: where the model goes; it is written at each exam.
        steps: in all; the learning rate falls over the last fifth of them.
        tokens: positions in a batch, about.
        stage: where in the curriculum to start, for `resume`.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    words = tokenizer()
    model = build(shape, words)
    if resume:
        model = Qwen2VLForConditionalGeneration.from_pretrained(resume, dtype=torch.float32)
    model.train()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(words)} tokens", file=sys.stderr)
    # Muon for the matrices: single scenes in a third of AdamW's steps
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=peak, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    began, losses, log = time.monotonic(), [], []
    for step in range(steps):
        level, enough = STAGES[stage]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, warmup, peak)
        batch = draw_batch(rng, words, level, tokens)
        loss = F.cross_entropy(*say(model, batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % exam_every == 0:
            result = exam(model, words, replace(level, varied=False), exam_clips)
            line = {
                "step": step + 1,
                "stage": stage,
                "scenes": level.scenes,
                "train_loss": sum(losses) / len(losses),
                **result,
                "minutes": (time.monotonic() - began) / 60,
            }
            log.append(line)
            losses.clear()
            print(json.dumps({k: round(v, 4) for k, v in line.items()}), file=sys.stderr, flush=True)
            if result["clauses"] >= enough and result["answers"] >= enough:
                stage += 1
            save(model, words, output)


def save(model: Qwen2VLForConditionalGeneration, words: PreTrainedTokenizerFast, output: Path) -> None:
    model.save_pretrained(output)
    processor(words).save_pretrained(output)


if __name__ == "__main__":
    auto_cli(train, as_positional=False)
