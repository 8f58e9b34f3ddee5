"""Train the demo models, Qwen2-VLs of 2.9 M and 0.7 M parameters, on the videos of
`jobs/demo_model/world.py`.

    python -m jobs.demo_model.training.train --output conf/model/demo

Runs on a CPU and is seeded; jobs/suites/README.md says how the shipped models were trained.

The curriculum begins with single scenes. A stage ends when held-out clauses are right, not after a
number of steps: a schedule that moves on too early stalls. Once single scenes are known, positions
of the text behind the video, frame sizes and the pace (temporal patches per scene) are varied; the
last stages add clips of up to thousands of visual tokens."""

from __future__ import annotations

import itertools
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration

from jobs.demo_model.model import build, save, tokenizer
from jobs.demo_model.training.batches import (
    IGNORED,
    Difficulty,
    TrainingBatch,
    draw_batch,
    draw_batches,
    draw_long_batch,
)
from jobs.demo_model.training.forward import Predictions, Probes, predict
from pipeline import logs
from pipeline.command_line import flag, parse_flags
from pipeline.records import UsageError

logger = logging.getLogger(__name__)

PROBE_WEIGHT = 0.2  # of the auxiliary tasks in the loss
PROBE_RATE = 5  # times the learning rate
# of the one token in ten that ends a caption or begins its next clause: an error there loses the
# rest of the caption
CLAUSE_END_WEIGHT = 5
LONG_CLIPS_SHARE = 5  # one in so many held-out clips is long, in stages that train on long clips
SHORT_SCENES = 8  # of the short held-out clips of those stages


@dataclass(frozen=True)
class Flags:
    """The command line.

    The learning rate falls over the last third of the steps.
    """

    output: str = flag("", "folder for weights, tokenizer and processors; written at each exam")
    shape: str = flag("demo", "demo or demo_small")
    seed: int = flag(0, "of weights and batches")
    steps: int = flag(6000, "in all")
    peak: float = flag(2e-3, "learning rate of the first stages; later ones have a share of it")
    tokens: int = flag(4096, "positions in a step, about")
    warmup: int = flag(200, "steps")
    exam_every: int = flag(100, "steps between two exams")
    exam_clips: int = flag(100, "held-out clips of an exam")
    threads: int = flag(2, "CPU threads of PyTorch")
    resume: str = flag("", "folder of a model of the same shape to go on with")
    teacher: str = flag("", "folder of a model whose token probabilities are learned as well")
    stage: int = flag(0, "of the curriculum, from which to start; for --resume")


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum.

    Args:
        passing: accuracy of held-out clauses and answers at which the stage ends; with long clips,
            of their answers alone, which are learned first.
        rate: share of the peak learning rate.
    """

    level: Difficulty
    passing: float
    rate: float = 1.0


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
    Stage(Difficulty(12, varied=True, visual=8192), 2.0, 0.25),  # until the steps are used up
)


# -------------------------------------------------------------------------------------------- exams


def held_out(
    tokenizer: PreTrainedTokenizerFast, level: Difficulty, clips: int
) -> Iterator[TrainingBatch]:
    """At least `clips` clips with the level's full number of scenes at pace 2."""
    rng = random.Random(10_000_019 + level.scenes)
    while clips > 0:
        fixed = Difficulty(level.scenes)
        batch = draw_batch(rng, tokenizer, fixed, 4000, scenes=level.scenes)
        clips -= batch.size
        yield batch


def held_out_long(
    tokenizer: PreTrainedTokenizerFast, level: Difficulty, clips: int
) -> Iterator[TrainingBatch]:
    """At least `clips` clips of the largest frame with the level's visual tokens, with a half to
    all of its scenes."""
    rng = random.Random(10_000_079)
    for sixths in itertools.cycle((3, 5, 4, 6)):
        if clips <= 0:
            return
        scenes = -(-level.scenes * sixths // 6)
        batch = draw_long_batch(
            rng, tokenizer, scenes, (4, 4), visual=level.visual, tokens=4000, even=True
        )
        clips -= batch.size
        yield batch


@torch.no_grad()
def exam(
    model: Qwen2VLForConditionalGeneration, probes: Probes, batches: Iterator[TrainingBatch]
) -> dict[str, float]:
    """Accuracy of clauses, answers and scene numbers, and the loss per token.

    A clause counts as right if all its tokens are predicted from the true text before it. Greedy
    decoding then writes the same, as long as all before it is right.
    """
    model.eval()
    right: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    loss = 0.0
    tokens = 0
    for batch in batches:
        probed = probes(model, batch)
        predictions = probed.predictions
        right["numbers"] += int((probed.scene_logits.argmax(-1) == batch.scene).sum())
        counted["numbers"] += batch.scene.numel()
        for unit, correct in enumerate(_correct_units(batch, predictions)):
            kind = "clauses" if unit < batch.scenes else "answers"
            right[kind] += int(correct.sum())
            counted[kind] += len(correct)
        loss += F.cross_entropy(predictions.logits, predictions.target, reduction="sum").item()
        tokens += len(predictions.target)
    model.train()
    return {kind: right[kind] / counted[kind] for kind in counted} | {"loss": loss / tokens}


def _correct_units(batch: TrainingBatch, predictions: Predictions) -> Iterator[torch.Tensor]:
    """For each clause and answer in order, (B,) bool: whether all its tokens are predicted."""
    text = batch.text
    correct = torch.ones_like(text.target, dtype=torch.bool)
    correct[text.target != IGNORED] = predictions.logits.argmax(-1) == predictions.target
    for unit in range(int(text.unit.max()) + 1):
        yield (correct | (text.unit != unit)).all(1)


def stage_exam(
    model: Qwen2VLForConditionalGeneration,
    probes: Probes,
    tokenizer: PreTrainedTokenizerFast,
    level: Difficulty,
    clips: int,
) -> dict[str, float]:
    """The exam of a level; with long clips, also `long_` results of a fifth as many of them."""
    short_level = replace(level, scenes=SHORT_SCENES) if level.visual else level
    results = exam(model, probes, held_out(tokenizer, short_level, clips))
    if level.visual:
        long_clips = -(-clips // LONG_CLIPS_SHARE)
        long_results = exam(model, probes, held_out_long(tokenizer, level, long_clips))
        results |= {f"long_{name}": value for name, value in long_results.items()}
    return results


# ----------------------------------------------------------------------------------------- training


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Warm-up, a plateau, and a linear decay over the last third of the steps."""
    return peak * min(1.0, (step + 1) / warmup, max(1 - step / steps, 0.001) * 3)


def optimizers_of(
    model: Qwen2VLForConditionalGeneration, probes: Probes
) -> list[torch.optim.Optimizer]:
    """Muon for matrices, which learns single scenes in a third of AdamW's steps; AdamW for the
    rest. `times` of a parameter group multiplies the learning rate."""
    matrices = []
    others = []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            matrices.append(parameter)
        else:
            others.append(parameter)
    probe_group = {"params": probes.parameters(), "times": PROBE_RATE}
    return [
        torch.optim.Muon(matrices, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
        torch.optim.AdamW([probe_group], betas=(0.9, 0.98), weight_decay=0.0),
    ]


def training_loss(
    model: Qwen2VLForConditionalGeneration,
    probes: Probes,
    teacher: Qwen2VLForConditionalGeneration | None,
    batch: TrainingBatch,
) -> torch.Tensor:
    """Cross entropy with the true tokens and the loss of the auxiliary tasks; with a teacher, the
    mean of that cross entropy and the one with the teacher's probabilities."""
    probed = probes(model, batch)
    logits, target = probed.predictions
    per_token = F.cross_entropy(logits, target, reduction="none")
    if teacher is not None:
        with torch.no_grad():
            probabilities = predict(teacher, batch).logits.softmax(-1)
        from_teacher = F.cross_entropy(logits, probabilities, reduction="none")
        per_token = (per_token + from_teacher) / 2
    clause_ends = batch.clause_ends[batch.text.target != IGNORED]
    weight = 1 + (CLAUSE_END_WEIGHT - 1) * clause_ends
    loss = (per_token * weight).sum() / weight.sum()
    return loss + PROBE_WEIGHT * sum(probed.losses.values())


class Trainer:
    """A model in training; `stage` is its place in the curriculum."""

    def __init__(self, flags: Flags):
        torch.set_num_threads(flags.threads)
        torch.manual_seed(flags.seed)
        self.flags = flags
        self.rng = random.Random(flags.seed)
        self.tokenizer = tokenizer()
        if flags.resume:
            self.model = _load(flags.resume).train()
        else:
            self.model = build(flags.shape, self.tokenizer).train()
        self.teacher = _load(flags.teacher).eval() if flags.teacher else None
        self.probes = Probes(self.model.config.text_config.hidden_size)
        self.optimizers = optimizers_of(self.model, self.probes)
        self.stage = flags.stage
        self.start = time.monotonic()
        parameters = sum(p.numel() for p in self.model.parameters())
        print(f"{parameters:,} parameters, {len(self.tokenizer)} tokens", file=sys.stderr)

    def run(self) -> None:
        """Run all steps; save the model and print a line of JSON at each exam."""
        losses: list[float] = []
        for step in range(self.flags.steps):
            losses += self._step(step)
            if (step + 1) % self.flags.exam_every == 0:
                self._exam(step, losses)
                losses.clear()

    def _step(self, step: int) -> list[float]:
        """One optimizer step; returns the losses of its batches."""
        flags = self.flags
        stage = STAGES[self.stage]
        rate = learning_rate(step, flags.steps, flags.warmup, flags.peak * stage.rate)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("times", 1)
        batches = draw_batches(self.rng, self.tokenizer, stage.level, flags.tokens)
        losses = []
        for batch in batches:
            loss = training_loss(self.model, self.probes, self.teacher, batch) / len(batches)
            loss.backward()
            losses.append(loss.item() * len(batches))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return losses

    def _exam(self, step: int, losses: Sequence[float]) -> None:
        """Go on to the next stage if the exam is passed."""
        stage = STAGES[self.stage]
        results = stage_exam(
            self.model, self.probes, self.tokenizer, stage.level, clips=self.flags.exam_clips
        )
        line = {
            "step": step + 1,
            "stage": self.stage,
            "scenes": stage.level.scenes,
            "train_loss": sum(losses) / len(losses),
            **results,
            "minutes": (time.monotonic() - self.start) / 60,
        }
        rounded = {name: round(value, 4) for name, value in line.items()}
        print(json.dumps(rounded), file=sys.stderr, flush=True)
        if stage.level.visual:
            accuracy = results["long_answers"]
        else:
            accuracy = min(results["clauses"], results["answers"])
        if accuracy >= stage.passing:
            self.stage += 1
        save(self.model, self.tokenizer, Path(self.flags.output))


def _load(folder: str) -> Qwen2VLForConditionalGeneration:
    return Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def main(argv: Sequence[str]) -> int:
    """Train; exit code 2 for a wrong command line."""
    logs.configure()
    try:
        flags = parse_flags(
            Flags, argv, "train.py", description=__doc__ or "", required=("output",)
        )
    except UsageError as error:
        logger.error("train.py: %s", error)
        return 2
    Trainer(flags).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
