"""Trains the demo models: Qwen2-VLs of 2.9 M and 0.7 M parameters that caption the world of
`jobs/demo_model/world.py`.

    python -m jobs.demo_model.training.train --output conf/model/demo  # CPU only, seeded (the
    shipped one: README)

Single scenes first; a stage ends when held-out clauses are right, not after a number of steps (a
schedule that moves on early stalls). Positions of the text against the video, frame sizes and the
pace (temporal patches per scene) are drawn at random once single scenes are known; the last stages
mix in clips whose scenes go on for up to thousands of visual tokens."""

from __future__ import annotations

import functools
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from transformers import PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration

from jobs.demo_model.model import build, save, tokenizer
from jobs.demo_model.training.batches import (
    Difficulty,
    TrainingBatch,
    draw_batch,
    draw_batches,
    draw_long_batch,
)
from jobs.demo_model.training.forward import Probes, say


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum: it ends when this share of the held-out clauses and answers is
    right; of long clips, answers alone, since they are learned first."""

    level: Difficulty
    enough: float
    rate: float = 1.0  # of the peak learning rate


STAGES = (
    Stage(Difficulty(1), 0.94),
    Stage(Difficulty(2), 0.93),
    Stage(Difficulty(3), 0.93),
    Stage(Difficulty(4), 0.93),
    Stage(Difficulty(6), 0.93),
    Stage(Difficulty(8), 0.93),
    Stage(Difficulty(8, varied=True), 0.97, 0.5),
    Stage(Difficulty(2, varied=True, visual=256), 0.85, 0.5),
    Stage(Difficulty(3, varied=True, visual=512), 0.85, 0.5),
    Stage(Difficulty(4, varied=True, visual=512), 0.85, 0.5),
    Stage(Difficulty(6, varied=True, visual=1024), 0.85, 0.5),
    Stage(Difficulty(8, varied=True, visual=1024), 0.85, 0.5),
    Stage(Difficulty(12, varied=True, visual=2048), 0.85, 0.35),
    Stage(Difficulty(12, varied=True, visual=4096), 0.85, 0.35),
    Stage(Difficulty(12, varied=True, visual=8192), 2.0, 0.25),
)


# ---------------------------------------------------------------------------------------- the exams


def held_out(
    words: PreTrainedTokenizerFast, level: Difficulty, clips: int
) -> Iterator[TrainingBatch]:
    """`clips` clips at the level's full number of scenes and pace 2."""
    rng = random.Random(10_000_019 + level.scenes)
    while clips > 0:
        batch = draw_batch(rng, words, Difficulty(level.scenes), 4000, scenes=level.scenes)
        clips -= len(batch.ids)
        yield batch


def held_out_long(
    words: PreTrainedTokenizerFast, level: Difficulty, clips: int
) -> Iterator[TrainingBatch]:
    """At least `clips` clips at the largest frame with the level's visual tokens each, of as many
    scenes as it has at most and of fewer."""
    rng = random.Random(10_000_079)
    for part in itertools.cycle((3, 5, 4, 6)):
        if clips <= 0:
            return
        scenes = -(-level.scenes * part // 6)
        batch = draw_long_batch(
            rng, words, scenes, (4, 4), visual=level.visual, tokens=4000, even=True
        )
        clips -= len(batch.ids)
        yield batch


@torch.no_grad()
def exam(
    model: Qwen2VLForConditionalGeneration, probes: Probes, batches: Iterator[TrainingBatch]
) -> dict[str, float]:
    """Accuracy of clauses, answers and scene numbers, and the loss a token. All tokens of a clause
    right given the true text before it is the same as being written right by greedy decoding, as
    long as all before it is right."""
    model.eval()
    good = Counter[str]()
    all_of = Counter[str]()
    loss = 0.0
    tokens = 0
    for batch in batches:
        out = probes(model, batch)
        logits = out.logits
        target = out.target
        good["numbers"] += int((out.number.argmax(-1) == batch.scene).sum())
        all_of["numbers"] += batch.scene.numel()
        right = torch.ones_like(batch.target, dtype=torch.bool)
        right[batch.target != -100] = logits.argmax(-1) == target
        for unit in range(int(batch.unit.max()) + 1):
            name = "clauses" if unit < batch.scenes else "answers"
            of = batch.unit == unit
            good[name] += int((right | ~of).all(1).sum())
            all_of[name] += len(of)
        loss += F.cross_entropy(logits, target, reduction="sum").item()
        tokens += len(target)
    model.train()
    return {name: good[name] / all_of[name] for name in all_of} | {"loss": loss / tokens}


def report(
    model: Qwen2VLForConditionalGeneration,
    probes: Probes,
    words: PreTrainedTokenizerFast,
    level: Difficulty,
    clips: int,
) -> dict[str, float]:
    """The level's exam; for long clips a fifth as many of them too."""
    result = exam(
        model, probes, held_out(words, replace(level, scenes=8) if level.visual else level, clips)
    )
    if level.visual:
        far = exam(model, probes, held_out_long(words, level, -(-clips // 5)))
        result |= {f"long_{name}": value for name, value in far.items()}
    return result


# ----------------------------------------------------------------------------------------- training


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Warm-up, a plateau, and a linear decay over the last third of the steps."""
    return peak * min(1.0, (step + 1) / warmup, max(1 - step / steps, 0.001) * 3)


def optimizers_of(
    model: Qwen2VLForConditionalGeneration, probes: Probes
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices: single scenes in a third of AdamW's steps."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.0),
        torch.optim.AdamW(
            [{"params": probes.parameters(), "times": 5}], betas=(0.9, 0.98), weight_decay=0.0
        ),
    ]


PROBING = 0.2  # weight of the probes' tasks
# weight of the one token in ten that ends a caption or goes on with it: what it gets wrong is lost
TURNING = 5


def loss_of(
    model: Qwen2VLForConditionalGeneration,
    probes: Probes,
    teacher: Qwen2VLForConditionalGeneration | None,
    batch: TrainingBatch,
) -> torch.Tensor:
    """Cross entropy with the truth, and the probes' tasks; with a teacher, half of it with what the
    teacher would say."""
    out = probes(model, batch)
    each = F.cross_entropy(out.logits, out.target, reduction="none")
    if teacher is not None:
        with torch.no_grad():
            told = say(teacher, batch)[0].softmax(-1)
        each = (each + F.cross_entropy(out.logits, told, reduction="none")) / 2
    weight = 1 + (TURNING - 1) * batch.turns[batch.target != -100]
    loss = (each * weight).sum() / weight.sum()
    return loss + PROBING * sum(out.losses.values())


def train(
    output: Path,
    shape: str = "demo",
    seed: int = 0,
    steps: int = 6000,
    peak: float = 2e-3,
    tokens: int = 4096,
    warmup: int = 200,
    exam_every: int = 100,
    exam_clips: int = 100,
    threads: int = 2,
    resume: Path | None = None,
    teacher: Path | None = None,
    stage: int = 0,
) -> None:
    """Trains and writes a folder that `from_pretrained` reads (weights as safetensors, tokenizer,
    processors).

    Args:
        output: where the model goes; it is written at each exam.
        steps: in all; the learning rate falls over the last third of them.
        peak: learning rate of the first stages; later ones have a share of it.
        tokens: positions in a batch, about.
        resume: a model of the same shape to go on with.
        teacher: a model whose words' probabilities are learned besides the truth.
        stage: where in the curriculum to start, for `resume`.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    words = tokenizer()
    load = functools.partial(Qwen2VLForConditionalGeneration.from_pretrained, dtype=torch.float32)
    model = (load(resume) if resume else build(shape, words)).train()
    guide = load(teacher).eval() if teacher else None
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(words)} tokens",
        file=sys.stderr,
    )
    probes = Probes(model.config.text_config.hidden_size)
    optimizers = optimizers_of(model, probes)
    began = time.monotonic()
    losses = []
    for step in range(steps):
        level = STAGES[stage].level
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(step, steps, warmup, peak * STAGES[stage].rate) * group.get(
                "times", 1
            )
        batches = draw_batches(rng, words, level, tokens)
        for batch in batches:
            loss = loss_of(model, probes, guide, batch) / len(batches)
            loss.backward()
            losses.append(loss.item() * len(batches))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % exam_every == 0:
            result = report(model, probes, words, level, clips=exam_clips)
            line = {
                "step": step + 1,
                "stage": stage,
                "scenes": level.scenes,
                "train_loss": sum(losses) / len(losses),
            }
            line |= result | {"minutes": (time.monotonic() - began) / 60}
            losses.clear()
            print(
                json.dumps({k: round(v, 4) for k, v in line.items()}), file=sys.stderr, flush=True
            )
            passed = (
                result["long_answers"]
                if level.visual
                else min(result["clauses"], result["answers"])
            )
            if passed >= STAGES[stage].enough:
                stage += 1
            save(model, words, output)


if __name__ == "__main__":
    auto_cli(train, as_positional=False)
