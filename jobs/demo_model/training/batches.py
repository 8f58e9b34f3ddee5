"""Training batches: clips as the vision tower takes them, and conversations about them.

A video is followed by several conversations side by side, its caption and some questions; each
attends to the video and to itself."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast

from jobs.demo_model import world
from jobs.demo_model.model import TOKEN_SIDE

MEAN = 127.5
STD = 127.5
IGNORED = -100  # target where nothing is predicted, as in PyTorch's cross entropy
MIN_BATCH = 2
MAX_BATCH = 48  # clips
QUESTIONS = 5  # conversations of a short clip, the caption aside
LONG_QUESTIONS = 16

Story = tuple[world.Scene, ...]  # a clip's scenes
TokenGrid = tuple[int, int]  # rows and columns of visual tokens
GRIDS: tuple[TokenGrid, ...] = ((3, 4), (4, 4), (4, 3), (3, 5), (3, 3))
VARIED_GRIDS: tuple[TokenGrid, ...] = (*GRIDS, (5, 3), (4, 5), (5, 5), (2, 4), (4, 6))
# small ones cover more time with the same number of tokens
LONG_GRIDS: tuple[TokenGrid, ...] = (
    (2, 2),
    (2, 2),
    (2, 3),
    (3, 2),
    (3, 3),
    (3, 4),
    (4, 3),
    (4, 4),
    (4, 4),
)
_NOISE = torch.randn(2_000_000, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Difficulty:
    """What batches are drawn from.

    Args:
        scenes: of a clip, at most.
        varied: every number of scenes equally often, and half of the batches with other text
            positions, frame sizes and paces.
        visual: if not 0, two thirds of a step's tokens are long clips of up to so many visual
            tokens.
    """

    scenes: int
    varied: bool = False
    visual: int = 0


@dataclass(frozen=True)
class Conversations:
    """Token ids of a video and the conversations behind it. B clips of L positions.

    Args:
        ids: (B, L).
        positions: (3, B, L).
        mask: (B, 1, S, L) bool, what each of the S positions behind the video attends to; the video
            itself is causal.
        target: (B, L), the token that each position predicts, or `IGNORED`.
        unit: (B, L), the clause or answer that a target belongs to; -1 where nothing is predicted.
        visual: the video's positions.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    target: torch.Tensor
    unit: torch.Tensor
    visual: slice


@dataclass
class TrainingBatch:
    """B clips of one size, with T frame pairs each, and their conversations.

    Args:
        patches: (N, patches of a frame pair, 1176), each different frame pair once.
        grid: temporal patches, rows and columns of patches.
        scenes: of each clip.
        order: (B, T), which of the N frame pairs is shown when.
        scene: (B, T), the scene of a frame pair, from 0.
        looks: (B, T, 2), indices of its kind in `KINDS` and of its colour in `COLOURS`.
        text: the conversations.
        noise: standard deviation of noise added to visual features, over theirs; a codec shows no
            frame twice alike.
    """

    patches: torch.Tensor
    grid: tuple[int, int, int]
    scenes: int
    order: torch.Tensor
    scene: torch.Tensor
    looks: torch.Tensor
    text: Conversations
    noise: float = 0.0

    @property
    def size(self) -> int:
        """Clips."""
        return len(self.text.ids)

    @property
    def clause_ends(self) -> torch.Tensor:
        """(B, L) bool: targets at which a caption goes on with the next clause or ends."""
        unit = self.text.unit
        clause = unit.where(unit < self.scenes, -1)
        changes = clause[:, 1:] != clause[:, :-1]
        ends = torch.zeros_like(clause, dtype=torch.bool)
        ends[:, 1:] = changes & (clause[:, 1:] > 0)
        ends[:, :-1] |= changes & (clause[:, :-1] == self.scenes - 1)
        return ends


# ------------------------------------------------------------------------------------------ batches


def draw_batches(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, level: Difficulty, tokens: int
) -> list[TrainingBatch]:
    """The batches of one step, about `tokens` positions: one, or a third of short and the rest of
    long clips."""
    if not level.visual:
        return [draw_batch(rng, tokenizer, level, tokens)]
    scenes = level.scenes if rng.random() < 0.3 else rng.randint(1, level.scenes)
    visual = round(40 * (level.visual / 40) ** rng.random())
    short_level = replace(level, scenes=max(8, level.scenes))
    return [
        draw_batch(rng, tokenizer, short_level, tokens // 3),
        draw_long_batch(
            rng,
            tokenizer,
            scenes,
            rng.choice(LONG_GRIDS),
            visual=visual,
            tokens=tokens * 2 // 3,
        ),
    ]


def draw_batch(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    level: Difficulty,
    tokens: int,
    scenes: int = 0,
) -> TrainingBatch:
    """Short clips, about `tokens` positions.

    Args:
        scenes: of each clip; drawn if 0.
    """
    hardest = not level.varied and rng.random() < 0.5
    count = scenes or (level.scenes if hardest else rng.randint(1, level.scenes))
    varied = level.varied and rng.random() < 0.5
    grid = rng.choice(VARIED_GRIDS if varied else GRIDS)
    pace = rng.choice((2, 2, 1, 3, 4)) if varied else 2
    questions = min(4 * count + 1, QUESTIONS)
    length = _clip_length(count, count * pace, grid, questions)
    size = max(MIN_BATCH, min(MAX_BATCH, tokens // length))
    stories = [world.draw_scenes(rng, count) for _ in range(size)]
    order = torch.arange(size * count * pace).view(size, count * pace)
    return _assemble(
        rng, tokenizer, stories, order, grid, pace=pace, questions=questions, varied=varied
    )


def draw_long_batch(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    scenes: int,
    grid: TokenGrid,
    *,
    visual: int,
    tokens: int,
    even: bool = False,
) -> TrainingBatch:
    """Clips whose scenes are repeated until there are about `visual` visual tokens.

    Args:
        tokens: positions of the batch, about.
        even: scenes of one length and no noise, in all batches; otherwise in half of them.
    """
    rows, columns = grid
    pace = 2 if even else rng.choice((2, 2, 2, 1, 3, 4))
    repeats = max(scenes, round(visual / (rows * columns * pace)))  # of all scenes together
    questions = min(4 * scenes + 1, LONG_QUESTIONS)
    length = _clip_length(scenes, repeats * pace, grid, questions)
    size = max(1, min(MAX_BATCH, tokens // length))
    one_length = even or rng.random() < 0.5
    if one_length:
        repeats = repeats // scenes * scenes
    stories = [world.draw_scenes(rng, scenes) for _ in range(size)]
    order: list[int] = []
    for clip in range(size):
        bounds = _scene_bounds(rng, scenes, repeats, one_length)
        for scene, (start, end) in enumerate(itertools.pairwise(bounds)):
            first = (clip * scenes + scene) * pace
            order += list(range(first, first + pace)) * (end - start)
    return _assemble(
        rng,
        tokenizer,
        stories,
        torch.tensor(order).view(size, repeats * pace),
        grid,
        pace=pace,
        questions=questions,
        varied=False,
        noise=not one_length,
    )


def _scene_bounds(rng: random.Random, scenes: int, repeats: int, one_length: bool) -> list[int]:
    """Where scenes begin and end, in repeats."""
    if one_length:
        inner = [repeats // scenes * k for k in range(1, scenes)]
    else:
        inner = sorted(rng.sample(range(1, repeats), scenes - 1))
    return [0, *inner, repeats]


def _clip_length(scenes: int, frame_pairs: int, grid: TokenGrid, questions: int) -> int:
    """Positions of a clip with its conversations, about."""
    rows, columns = grid
    return frame_pairs * rows * columns + 14 + 10 * scenes + questions * 20


def _assemble(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    stories: Sequence[Story],
    order: torch.Tensor,
    grid: TokenGrid,
    *,
    pace: int,
    questions: int,
    varied: bool,
    noise: bool = False,
) -> TrainingBatch:
    """Render the clips and write their conversations.

    Args:
        order: (clips, frame pairs), as in `TrainingBatch`.
        pace: frame pairs of a scene that is shown once.
        questions: conversations besides the caption.
    """
    rows, columns = grid
    scenes = len(stories[0])
    frame_pairs = order.shape[1]
    pixels = _render_pixels(rng, stories, pace, rows * TOKEN_SIDE, columns * TOKEN_SIDE)
    strength = rng.uniform(0, 0.1) if noise else 0.0
    text = _conversations(
        rng, tokenizer, stories, (frame_pairs, rows, columns), questions=questions, varied=varied
    )
    return TrainingBatch(
        patches=_patches(pixels, rows, columns),
        grid=(frame_pairs, 2 * rows, 2 * columns),
        scenes=scenes,
        order=order,
        scene=order // pace % scenes,
        looks=_looks(stories)[order // pace],
        text=text,
        noise=strength,
    )


# ------------------------------------------------------------------------------------------- frames


def _looks(stories: Sequence[Story]) -> torch.Tensor:
    """(scenes of all clips, 2): indices of kind and colour."""
    kinds = list(world.KINDS)
    colours = list(world.COLOURS)
    return torch.tensor(
        [(kinds.index(s.kind), colours.index(s.colour)) for story in stories for s in story]
    )


def _render_pixels(
    rng: random.Random, stories: Sequence[Story], pace: int, height: int, width: int
) -> torch.Tensor:
    """(frames of all clips, 3, height, width), normalized as the processor does it, with blur,
    brightness and noise as a codec and a resize cause them."""
    frames_per_scene = 2 * pace
    scenes = []
    numbers = []
    progress = []
    centres = []
    backgrounds = []
    for story in stories:
        background = world.draw_background(rng)
        drift = rng.uniform(-0.5, 0.5)
        for number, scene in enumerate(story, 1):
            centre = world.draw_centre(rng, scene)
            for frame in range(frames_per_scene):
                scenes.append(scene)
                numbers.append(number)
                progress.append((frame + 0.5 + drift) / frames_per_scene)
                centres.append(centre)
                backgrounds.append(background)
    pixels = world.render_frames(
        scenes,
        torch.tensor(numbers),
        torch.tensor(progress),
        torch.tensor(centres),
        background=torch.tensor(backgrounds),
        height=height,
        width=width,
    )
    if rng.random() < 0.5:
        pixels = F.avg_pool2d(F.pad(pixels, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    gain = rng.uniform(0.92, 1.06) / STD
    offset = rng.uniform(-6, 6) / STD - MEAN / STD
    # the same noise for every frame pair, and in place: rendering is a large part of a step
    pair = pixels[:2]
    start = rng.randrange(len(_NOISE) // 2)
    noise = _NOISE[start : start + pair.numel()].view_as(pair) * (rng.uniform(0, 4) / STD)
    by_pair = pixels.view(-1, *noise.shape)
    return by_pair.mul_(gain).add_(noise.add_(offset)).view_as(pixels)


def _patches(pixels: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """(frame pairs, patches, channels × 2 × 14 × 14), in the processor's order: patches in groups
    of 2 × 2."""
    x = pixels.view(-1, 2, 3, rows, 2, 14, columns, 2, 14)
    pairs = x.shape[0]
    in_order = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return in_order.reshape(pairs, rows * columns * 4, 3 * 2 * 14 * 14)


# ------------------------------------------------------------------------------------ conversations


class ConversationToken(NamedTuple):
    """One token behind a video.

    Args:
        branch: number of its conversation, from 1.
        offset: position within its conversation.
        target: token that it predicts, or `IGNORED`.
        unit: clause or answer that the target belongs to, or -1.
    """

    id: int
    branch: int
    offset: int
    target: int
    unit: int


def _conversations(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    stories: Sequence[Story],
    grid: tuple[int, int, int],
    *,
    questions: int,
    varied: bool,
) -> Conversations:
    """The video's placeholders and behind them its conversations, padded to one length.

    Args:
        grid: temporal patches, rows and columns of visual tokens.
    """
    frame_pairs, rows, columns = grid
    num_visual = frame_pairs * rows * columns
    opening = _encode(tokenizer, "<|im_start|>user\n<|vision_start|>")
    start = len(opening)
    end = start + num_visual  # of the video
    video_token = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    prefix = opening + [video_token] * num_visual + _encode(tokenizer, "<|vision_end|>")
    dialogues = [_dialogues(rng, tokenizer, story, questions) for story in stories]
    size = len(stories)
    length = len(prefix) + max(map(len, dialogues))

    ids = torch.full((size, length), tokenizer.pad_token_id)
    target = torch.full((size, length), IGNORED)
    unit = torch.full((size, length), -1)
    branch = torch.zeros(size, length, dtype=torch.long)
    positions = torch.zeros(3, size, length, dtype=torch.long)
    ids[:, : len(prefix)] = torch.tensor(prefix)
    positions[:, :, :start] = torch.arange(start)
    positions[:, :, start:end] = _video_positions(grid) + start
    for row, dialogue in enumerate(dialogues):
        text_start = start + _text_gap(rng, grid, varied)
        positions[:, row, end] = text_start  # <|vision_end|>
        columns_of = ConversationToken(*torch.tensor(dialogue).T)
        span = slice(len(prefix), len(prefix) + len(dialogue))
        ids[row, span] = columns_of.id
        branch[row, span] = columns_of.branch
        positions[:, row, span] = columns_of.offset + text_start + 1
        target[row, span] = columns_of.target
        unit[row, span] = columns_of.unit
    return Conversations(
        ids=ids,
        positions=positions,
        mask=_attention_mask(branch, len(prefix)),
        target=target,
        unit=unit,
        visual=slice(start, end),
    )


def _video_positions(grid: tuple[int, int, int]) -> torch.Tensor:
    """(3, 1, visual tokens): temporal, row and column index."""
    axes = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    return torch.stack(axes).reshape(3, 1, -1)


def _attention_mask(branch: torch.Tensor, prefix: int) -> torch.Tensor:
    """(B, 1, S, L): tokens behind the prefix attend to it and to their own conversation,
    causally."""
    length = branch.shape[1]
    behind = slice(prefix, length)
    same = (branch[:, None, :] == branch[:, behind, None]) | (branch[:, None, :] == 0)
    index = torch.arange(length)
    causal = index[None, :] <= index[behind, None]
    return (same & causal)[:, None]


def _text_gap(rng: random.Random, grid: tuple[int, int, int], varied: bool) -> int:
    """Positions from the video's first to the text's first.

    Usually the text continues behind the largest position of all three axes (the reference rule of
    `std_core.model.positions`); else as transformers 5 has it, or as behind another video.
    """
    usual = max(grid)
    if not varied or rng.random() >= 0.4:
        return usual
    _, rows, columns = grid
    return rng.choice((max(rows, columns), rng.randint(2, 30), rng.randint(2, 120)))


def _dialogues(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, story: Story, questions: int
) -> list[ConversationToken]:
    """The caption's conversation and those of some questions, token by token."""
    clauses = [
        ("" if number == 1 else " ") + f"Scene {number}: {scene}."
        for number, scene in enumerate(story, 1)
    ]
    pool = world.questions(story)
    *of_scenes, number_of_scenes = pool
    drawn = rng.sample(of_scenes, min(questions, len(pool)) - 1)
    exchanges = [(rng.choice(world.CAPTION_PROMPTS), clauses)]
    exchanges += [(question, [answer]) for question, answer in (*drawn, number_of_scenes)]
    tokens: list[ConversationToken] = []
    first_unit = 0
    for branch, (prompt, pieces) in enumerate(exchanges, 1):
        tokens += _dialogue(tokenizer, prompt, pieces, branch=branch, first_unit=first_unit)
        first_unit += len(pieces)
    return tokens


def _dialogue(
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    pieces: Sequence[str],
    *,
    branch: int,
    first_unit: int,
) -> list[ConversationToken]:
    """A prompt and its answer, whose pieces are units of their own; the end belongs to the last."""
    opening = _encode(tokenizer, prompt + "<|im_end|>\n<|im_start|>assistant\n")
    answer: list[int] = []
    units: list[int] = []
    for unit, piece in enumerate(pieces, first_unit):
        encoded = _encode(tokenizer, piece)
        answer += encoded
        units += [unit] * len(encoded)
    # the last token of the opening predicts the first of the answer
    ids = opening + answer
    targets = [IGNORED] * (len(opening) - 1) + answer + [tokenizer.eos_token_id]
    units = [-1] * (len(opening) - 1) + units + [first_unit + len(pieces) - 1]
    return [
        ConversationToken(token, branch, offset, target, unit)
        for offset, (token, target, unit) in enumerate(zip(ids, targets, units, strict=True))
    ]


_encoded: dict[str, list[int]] = {}


def _encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids, cached: there are few different texts, and encoding is slow."""
    if text not in _encoded:
        _encoded[text] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return _encoded[text]
