"""Positions of a prompt's tokens, also those of M-RoPE (Qwen2-VL §2.1, Qwen2.5-VL §2.1.2).

M-RoPE gives every token three positions: temporal, row and column. Text has the same on all three.
Inside an image or video they count from the position behind the text before it.

The rules differ in where the text behind a video continues:

- `reference`: behind the largest position of all three axes. The Qwen models were trained so, and
  vLLM and transformers 4 compute it.
- `transformers`: as the installed transformers' `get_rope_index` computes it. Version 5 continues
  behind the larger side of the grid and ignores the number of frames, so the text behind a video of
  many frames gets positions in the middle of the video.

They agree for text, images, and Qwen3-VL, which has text between any two temporal patches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, get_args

import torch

from std_core.model.checkpoint import ModelInputs
from std_core.model.families import IMAGE, TEXT, VIDEO
from std_core.types import RequestError

PositionRule = Literal["reference", "transformers"]
CONFIG_KEY = "mrope_position_rule"  # in a checkpoint's config.json; `reference` if absent
AXES = 3

Grid = tuple[int, int, int]  # temporal patches, rows and columns of visual tokens


@dataclass(frozen=True)
class MRope:
    """How a model of the Qwen-VL family numbers visual tokens.

    Args:
        merge_size: patches per side of a visual token.
        tokens_per_second: temporal positions per second of video (Qwen2.5-VL); None counts temporal
            patches.
        splits_videos: every temporal patch is a run of placeholders of its own, as Qwen3-VL's
            timestamps separate them.
    """

    merge_size: int
    tokens_per_second: float | None = None
    splits_videos: bool = False

    @classmethod
    def of(cls, config: Any) -> MRope | None:
        """The M-RoPE of a model's configuration; None for a model without one."""
        text = config.get_text_config()
        if "mrope_section" not in (getattr(text, "rope_parameters", None) or {}):
            return None
        vision = config.vision_config
        return cls(
            merge_size=vision.spatial_merge_size,
            tokens_per_second=getattr(vision, "tokens_per_second", None),
            splits_videos=config.model_type == "qwen3_vl",
        )


def rule_of(config: Any) -> PositionRule:
    """Return the rule that a checkpoint's configuration names.

    Raises:
        ValueError: there is no such rule.
    """
    named = getattr(config, CONFIG_KEY, "reference")
    for rule in get_args(PositionRule):
        if rule == named:
            return rule
    known = " and ".join(get_args(PositionRule))
    raise ValueError(f"{CONFIG_KEY} of the configuration is {named!r}; there are {known}")


def text_positions(length: int) -> torch.Tensor:
    """Return positions (1, 1, n) that count tokens."""
    return torch.arange(length)[None, None]


def transformers_positions(hf: Any, inputs: ModelInputs) -> torch.Tensor:
    """Return positions (3, 1, n) by the installed transformers' `get_rope_index`."""
    positions, _ = hf.model.get_rope_index(
        inputs.ids,
        mm_token_type_ids=inputs.token_types,
        image_grid_thw=inputs.image_grid,
        video_grid_thw=inputs.video_grid,
        second_per_grid_ts=inputs.second_per_grid,
    )
    return positions


def reference_positions(inputs: ModelInputs, mrope: MRope) -> torch.Tensor:
    """Return positions (3, 1, n) by the reference rule.

    Raises:
        RequestError: `placeholder_mismatch`: the placeholders are not those of the images and
            videos.
    """
    images = _grids(inputs.image_grid, mrope, split=False)
    videos = _grids(inputs.video_grid, mrope, split=mrope.splits_videos)
    visual = {
        IMAGE: ((grid, None) for grid in images),
        VIDEO: zip(videos, _seconds(inputs, mrope), strict=False),
    }
    spans: list[torch.Tensor] = []
    start = 0
    for kind, run in groupby(inputs.token_types[0].tolist()):
        length = len(list(run))
        if kind == TEXT:
            spans.append(start + torch.arange(length).expand(AXES, -1))
            start += length
            continue
        while length > 0:
            grid, seconds = next(visual[kind], (None, None))
            if grid is None:
                raise _mismatch(f"{length} placeholders are not covered by an image or video")
            span = start + _visual_positions(grid, seconds, mrope)
            spans.append(span)
            start = int(span.max()) + 1
            length -= span.shape[1]
        if length < 0:
            raise _mismatch(f"an image or video has {-length} tokens more than placeholders")
    return torch.cat(spans, dim=1)[:, None]


def _mismatch(message: str) -> RequestError:
    return RequestError("placeholder_mismatch", message)


def _grids(grid: torch.Tensor | None, mrope: MRope, split: bool) -> Iterator[Grid]:
    """Grids of visual tokens of each image or video, or of each temporal patch."""
    for times, height, width in [] if grid is None else grid.tolist():
        rows = height // mrope.merge_size
        columns = width // mrope.merge_size
        if split:
            yield from [(1, rows, columns)] * times
        else:
            yield times, rows, columns


def _seconds(inputs: ModelInputs, mrope: MRope) -> Iterable[float]:
    """Seconds per temporal patch of each video; 1 where they are not given."""
    if inputs.video_grid is None:
        return []
    if inputs.second_per_grid is None or mrope.splits_videos:
        return [1.0] * int(inputs.video_grid[:, 0].sum())
    return inputs.second_per_grid.tolist()


def _visual_positions(grid: Grid, seconds: float | None, mrope: MRope) -> torch.Tensor:
    """Positions (3, tokens) of an image or video, from 0."""
    times, rows, columns = grid
    temporal = torch.arange(times)
    if mrope.tokens_per_second is not None and seconds is not None:
        # in float32 and cut to integers afterwards, as vLLM does it: integers would lose a second
        # per temporal patch below 1
        temporal = (temporal.float() * seconds * mrope.tokens_per_second).long()
    axes = torch.meshgrid(temporal, torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack(axes).flatten(1)
