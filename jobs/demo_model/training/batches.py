"""Training batches: clips of the demo's world as the vision tower is fed them, and what is said
about them.

One video carries several conversations at once: its caption and some questions, each of which sees
the video and itself."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast

from jobs.demo_model import world
from jobs.demo_model.model import MERGED

MEAN = 127.5
STD = 127.5


@dataclass(frozen=True)
class Difficulty:
    """What a batch is drawn from."""

    scenes: int  # at most
    # any number of scenes alike; half of the batches with other text positions, sizes, pace
    varied: bool = False
    visual: int = (
        0  # if not 0: most of what is learned are long clips, of up to this many visual tokens
    )


@dataclass
class TrainingBatch:
    """B clips of one grid and length, each with its caption and some questions behind it."""

    patches: torch.Tensor  # (N, patches of a frame pair, 1176): each frame pair once
    grid: tuple[int, int, int]  # temporal patches, and rows and columns of patches
    scenes: int  # of each clip
    order: torch.Tensor  # (B, T): which of the N frame pairs is shown when
    ids: torch.Tensor  # (B, L)
    positions: torch.Tensor  # (3, B, L)
    mask: (
        torch.Tensor
    )  # (B, 1, S, L) bool: what the S places behind the video see; the video itself is causal
    target: (
        torch.Tensor
    )  # (B, L): the token each position has to say next, -100 where nothing is asked
    unit: torch.Tensor  # (B, L): which clause or answer a target belongs to
    scene: torch.Tensor  # (B, T): which scene that is, from 0
    looks: torch.Tensor  # (B, T, 2): its kind and colour, as places in the world's lists
    visual: slice  # the video's places in L
    noise: float = (
        0.0  # added to what is seen, as a share of its spread: a codec shows no frame twice alike
    )

    @property
    def turns(self) -> torch.Tensor:
        """(B, L): where a caption has to go on with a further clause or end."""
        clause = self.unit.where(self.unit < self.scenes, -1)
        changes = clause[:, 1:] != clause[:, :-1]
        turns = torch.zeros_like(clause, dtype=torch.bool)
        turns[:, 1:] = changes & (clause[:, 1:] > 0)
        turns[:, :-1] |= changes & (clause[:, :-1] == self.scenes - 1)
        return turns


GRIDS = ((3, 4), (4, 4), (4, 3), (3, 5), (3, 3))  # tokens: rows, columns
WIDE_GRIDS = (*GRIDS, (5, 3), (4, 5), (5, 5), (2, 4), (4, 6))
LONG_GRIDS = (
    (2, 2),
    (2, 2),
    (2, 3),
    (3, 2),
    (3, 3),
    (3, 4),
    (4, 3),
    (4, 4),
    (4, 4),
)  # small ones reach far in time


def draw_batches(
    rng: random.Random, words: PreTrainedTokenizerFast, level: Difficulty, tokens: int
) -> list[TrainingBatch]:
    """What one step learns from: a batch of about `tokens` positions, or a third short and the rest
    long clips."""
    if not level.visual:
        return [draw_batch(rng, words, level, tokens)]
    count = level.scenes if rng.random() < 0.3 else rng.randint(1, level.scenes)
    visual = round(40 * (level.visual / 40) ** rng.random())
    return [
        draw_batch(rng, words, replace(level, scenes=max(8, level.scenes)), tokens // 3),
        draw_long_batch(
            rng, words, count, rng.choice(LONG_GRIDS), visual=visual, tokens=tokens * 2 // 3
        ),
    ]


def draw_batch(
    rng: random.Random,
    words: PreTrainedTokenizerFast,
    level: Difficulty,
    tokens: int,
    scenes: int = 0,
) -> TrainingBatch:
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
    pixels = _frames(rng, stories, pace, rows * MERGED, width=columns * MERGED)
    temporal = count * pace
    order = torch.arange(size * temporal).view(size, temporal)
    return TrainingBatch(
        patches=_patches(pixels, rows, columns),
        grid=(temporal, 2 * rows, 2 * columns),
        scenes=count,
        order=order,
        scene=order // pace % count,
        looks=_looks(stories)[order // pace],
        **_conversations(
            rng, words, stories, temporal, rows=rows, columns=columns, asked=asked, varied=varied
        ),
    )


def draw_long_batch(
    rng: random.Random,
    words: PreTrainedTokenizerFast,
    count: int,
    cells: tuple[int, int],
    visual: int,
    tokens: int,
    even: bool = False,
) -> TrainingBatch:
    """Clips of `count` scenes whose shapes go their way again and again, until there are about
    `visual` visual tokens, `cells` (rows, columns) a frame pair; half of the batches, or with
    `even` all, have scenes of one length."""
    rows, columns = cells
    pace = 2 if even else rng.choice((2, 2, 2, 1, 3, 4))
    loops = max(count, round(visual / (rows * columns * pace)))
    asked = min(4 * count + 1, 16)
    size = max(1, min(48, tokens // (loops * pace * rows * columns + 14 + 10 * count + asked * 20)))
    even = even or rng.random() < 0.5
    loops = loops // count * count if even else loops
    stories = [world.draw_scenes(rng, count) for _ in range(size)]
    order = []
    for clip in range(size):
        ends = (
            [loops // count * k for k in range(1, count)]
            if even
            else sorted(rng.sample(range(1, loops), count - 1))
        )
        for scene, (begin, end) in enumerate(itertools.pairwise([0, *ends, loops])):
            first = (clip * count + scene) * pace
            order += list(range(first, first + pace)) * (end - begin)
    pixels = _frames(rng, stories, pace, rows * MERGED, width=columns * MERGED)
    shown = torch.tensor(order).view(size, loops * pace)
    return TrainingBatch(
        patches=_patches(pixels, rows, columns),
        grid=(loops * pace, 2 * rows, 2 * columns),
        scenes=count,
        order=shown,
        scene=shown // pace % count,
        looks=_looks(stories)[shown // pace],
        noise=0.0 if even else rng.uniform(0, 0.1),
        **_conversations(
            rng, words, stories, loops * pace, rows=rows, columns=columns, asked=asked, varied=False
        ),
    )


def _looks(stories: list[tuple[world.Scene, ...]]) -> torch.Tensor:
    """(scenes of all clips, 2): kind and colour."""
    kinds = list(world.KINDS)
    colours = list(world.COLOURS)
    return torch.tensor(
        [(kinds.index(s.kind), colours.index(s.colour)) for story in stories for s in story]
    )


_GRAIN = torch.randn(2_000_000, generator=torch.Generator().manual_seed(1))


def _frames(
    rng: random.Random, stories: list[tuple[world.Scene, ...]], pace: int, height: int, width: int
) -> torch.Tensor:
    """(B × frames, 3, height, width), scaled as the processor scales, with what a codec and a
    resize do to pixels."""
    per_scene = 2 * pace
    scene = []
    number = []
    moment = []
    centre = []
    shade = []
    for story in stories:
        tint = world.grey(rng)
        drift = rng.uniform(-0.5, 0.5)
        for which, item in enumerate(story, 1):
            spot = world.place(rng, item)
            for i in range(per_scene):
                scene.append(item)
                number.append(which)
                moment.append((i + 0.5 + drift) / per_scene)
                centre.append(spot)
                shade.append(tint)
    numbers = torch.tensor(number)
    moments = torch.tensor(moment)
    pixels = world.paint(
        scene,
        numbers,
        moments,
        torch.tensor(centre),
        background=torch.tensor(shade),
        height=height,
        width=width,
    )
    if rng.random() < 0.5:
        pixels = F.avg_pool2d(F.pad(pixels, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    gain = rng.uniform(0.92, 1.06) / STD
    offset = rng.uniform(-6, 6) / STD - MEAN / STD
    start = rng.randrange(len(_GRAIN) // 2)
    grain = _GRAIN[start : start + pixels[:2].numel()].view_as(pixels[:2]) * (
        rng.uniform(0, 4) / STD
    )
    return pixels.view(-1, *grain.shape).mul_(gain).add_(grain.add_(offset)).view_as(pixels)


def _patches(pixels: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The processor's order: (pairs of frames, patches in 2 × 2 groups, channel × 2 × 14 × 14)."""
    x = pixels.view(-1, 2, 3, rows, 2, 14, columns, 2, 14)
    return x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(
        x.shape[0], rows * columns * 4, 3 * 2 * 14 * 14
    )


def _conversations(
    rng: random.Random,
    words: PreTrainedTokenizerFast,
    stories: list[tuple[world.Scene, ...]],
    temporal: int,
    rows: int,
    columns: int,
    asked: int,
    varied: bool,
) -> dict[str, Any]:
    """Ids, positions, mask, targets, units and the video's places: the video, and behind it its
    conversations side by side."""
    ask = _encoder(words)
    head = ask("<|im_start|>user\n<|vision_start|>")
    visual = temporal * rows * columns
    at = len(head)
    prefix = head + [words.convert_tokens_to_ids("<|video_pad|>")] * visual + ask("<|vision_end|>")
    # per row: id, branch, place in its branch, target, unit of each token behind the prefix
    lines = [torch.tensor(_dialogues(rng, words, story, asked)).T for story in stories]
    size = len(stories)
    longest = len(prefix) + max(line.shape[1] for line in lines)
    ids, target, unit = (
        torch.full((size, longest), fill) for fill in (words.pad_token_id, -100, -1)
    )
    branch = torch.zeros(size, longest, dtype=torch.long)
    positions = torch.zeros(3, size, longest, dtype=torch.long)
    ids[:, : len(prefix)] = torch.tensor(prefix)
    positions[:, :, :at] = torch.arange(at)
    grid = torch.meshgrid(
        torch.arange(temporal), torch.arange(rows), torch.arange(columns), indexing="ij"
    )
    positions[:, :, at : at + visual] = torch.stack(grid).reshape(3, 1, -1) + at
    for row, line in enumerate(lines):
        behind = at + _gap(rng, temporal, rows, columns, varied=varied)
        positions[:, row, at + visual] = behind  # <|vision_end|>
        span = slice(len(prefix), len(prefix) + line.shape[1])
        ids[row, span] = line[0]
        branch[row, span] = line[1]
        positions[:, row, span] = line[2] + behind + 1
        target[row, span] = line[3]
        unit[row, span] = line[4]
    shown = slice(at, at + visual)
    spoken = slice(len(prefix), longest)
    sees = (branch[:, None, :] == branch[:, spoken, None]) | (branch[:, None, :] == 0)
    causal = torch.arange(longest)[None, :] <= torch.arange(longest)[spoken, None]
    mask = (sees & causal)[:, None]
    return {
        "ids": ids,
        "positions": positions,
        "mask": mask,
        "target": target,
        "unit": unit,
        "visual": shown,
    }


def _gap(rng: random.Random, temporal: int, rows: int, columns: int, varied: bool) -> int:
    """How far behind the video's first position the text goes on: as transformers has it, or where
    it would with a longer or larger video."""
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
    line = []
    unit = 0
    for branch, (question, pieces) in enumerate(pairs, 1):
        opening = ask(question + "<|im_end|>\n<|im_start|>assistant\n")
        said = [(token, unit + n) for n, piece in enumerate(pieces) for token in ask(piece)]
        unit += len(pieces)
        said.append((words.eos_token_id, unit - 1))
        goals = [(-100, -1)] * (len(opening) - 1) + said
        tokens = opening + [token for token, _ in said[:-1]]
        line += [
            (token, branch, i, *goal)
            for i, (token, goal) in enumerate(zip(tokens, goals, strict=True))
        ]
    return line


_known: dict[str, list[int]] = {}


def _encoder(words: PreTrainedTokenizerFast) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        if text not in _known:
            _known[text] = words(text, add_special_tokens=False)["input_ids"]
        return _known[text]

    return encode
