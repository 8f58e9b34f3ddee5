"""A processor's batch, split into the rows that the engine takes one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from std_core.model.checkpoint import ModelInputs
from std_core.model.families import IMAGE, VIDEO


@dataclass(frozen=True)
class _Item:
    """One video or image of a batch."""

    patches: torch.Tensor
    grid: torch.Tensor  # (1, …), as in `ModelInputs`
    tokens: int  # 0 if unknown before the vision tower has run


def split_rows(
    config: Any, ids: torch.Tensor, mask: torch.Tensor, visual_inputs: dict[str, Any]
) -> Iterator[ModelInputs]:
    """Split a processor's batch into rows without padding.

    Args:
        ids, mask: (B, n).
        visual_inputs: the processor's other outputs.

    Raises:
        ValueError: outputs that no supported model takes; a row without unmasked tokens; a row's
            placeholders are no whole number of videos or images; the batch has more of these than
            its rows.
    """
    rest = dict(visual_inputs)
    types = rest.pop("mm_token_type_ids", None)
    image_grids = rest.pop("image_grid_thw", rest.pop("image_sizes", None))
    image_patches = rest.pop("pixel_values", None)
    images = _items(config, image_patches, image_grids)
    video_patches = rest.pop("pixel_values_videos", None)
    videos = _items(config, video_patches, rest.pop("video_grid_thw", None))
    image_counts = rest.pop("batch_num_images", None)  # LLaVA-OneVision: images of each row
    seconds = rest.pop("second_per_grid_ts", None)
    if rest:
        raise ValueError(f"{', '.join(sorted(rest))}: the engine takes no such inputs")
    has_pixels = image_patches is not None or video_patches is not None
    if types is None:
        if has_pixels and config.model_type != "llava_onevision":
            raise ValueError(
                "mm_token_type_ids is missing: without it generate would give visual tokens the"
                " positions of text; the processor returns it beside input_ids"
            )
        types = _types_by_placeholder(config, ids)
    if config.model_type == "llava_onevision" and image_grids is not None:
        image_counts = _images_per_row(types * mask, len(image_grids), image_counts)
    seconds_left = iter(() if seconds is None else seconds)
    for row in range(len(ids)):
        unmasked = mask[row].bool()
        if not unmasked.any():
            raise ValueError(f"row {row} has no prompt: attention_mask masks all of its tokens")
        row_types = types[row, unmasked]
        count = None if image_counts is None else int(image_counts[row])
        row_images = _take(images, int((row_types == IMAGE).sum()), row, "image", count=count)
        row_videos = _take(videos, int((row_types == VIDEO).sum()), row, "video")
        video_patches, video_grid = _joined(row_videos)
        image_patches, image_grid = _joined(row_images)
        row_seconds = None
        if row_videos and seconds is not None:
            row_seconds = torch.tensor([float(s) for s in islice(seconds_left, len(row_videos))])
            if len(row_seconds) < len(row_videos):
                raise ValueError("second_per_grid_ts has fewer entries than the batch has videos")
        yield ModelInputs(
            ids[row : row + 1, unmasked],
            token_types=row_types[None],
            video_patches=video_patches,
            video_grid=video_grid,
            image_patches=image_patches,
            image_grid=image_grid,
            second_per_grid=row_seconds,
        )
    for left, name in ((images, "image"), (videos, "video")):
        if next(left, None) is not None:
            raise ValueError(f"the batch has more {name}s than its rows have placeholders for")


def _types_by_placeholder(config: Any, ids: torch.Tensor) -> torch.Tensor:
    """`mm_token_type_ids` for models whose processor does not return them."""
    is_image = ids == getattr(config, "image_token_id", -1)
    is_video = ids == getattr(config, "video_token_id", -1)
    return IMAGE * is_image.long() + VIDEO * is_video.long()


def _images_per_row(types: torch.Tensor, images: int, counts: Any) -> list[int]:
    """How many of LLaVA-OneVision's images each row has.

    Args:
        types: (B, n), 0 in masked places.
        counts: `batch_num_images`, which has an entry for each row with images; None if missing.

    Raises:
        ValueError: it cannot be told.
    """
    has_images = (types == IMAGE).any(1)
    rows = int(has_images.sum())
    if counts is None and rows not in (1, images):
        raise ValueError(
            f"batch_num_images is missing, which says how many of {images} images each row has"
        )
    given = [images // max(1, rows)] * rows if counts is None else [int(count) for count in counts]
    if [count > 0 for count in given] == has_images.tolist():
        return given
    if len(given) != rows:
        raise ValueError(
            f"batch_num_images has {len(given)} entries, and placeholders for images are in {rows}"
            f" of {len(types)} rows: give the processor a list of images for each row"
        )
    left = iter(given)
    return [next(left) if has else 0 for has in has_images.tolist()]


def _items(config: Any, patches: Any, grids: torch.Tensor | None) -> Iterator[_Item]:
    """Videos or images of a batch, in its order."""
    if patches is None:
        return
    if grids is None:
        yield from _llava_videos(config, patches)
    elif grids.shape[1] == 2:  # LLaVA-OneVision's images: (images, crops, 3, height, width)
        for image, size in zip(patches, grids, strict=True):
            yield _Item(image[None], grid=size[None], tokens=0)
    else:
        merged = config.vision_config.spatial_merge_size**2
        expected = int(grids.prod(1).sum())
        if len(patches) != expected:
            raise ValueError(f"the grids have {expected} patches, the pixel values {len(patches)}")
        start = 0
        for grid in grids:
            count = int(grid.prod())
            yield _Item(patches[start : start + count], grid=grid[None], tokens=count // merged)
            start += count


def _llava_videos(config: Any, videos: Any) -> Iterator[_Item]:
    """LLaVA-OneVision's videos: (videos, T, 3, height, width)."""
    vision = config.vision_config
    side = math.ceil(vision.image_size // vision.patch_size / 2)
    for video in videos:
        size = torch.tensor([[len(video), *video.shape[2:]]])
        yield _Item(video, grid=size, tokens=len(video) * side**2 + 1)


def _take(
    items: Iterator[_Item], tokens: int, row: int, name: str, count: int | None = None
) -> list[_Item]:
    """Take a row's items from the batch's.

    Args:
        tokens: placeholders of the row; items are taken until they are filled.
        count: number of items, if it is known.
    """
    if count is not None:
        return list(islice(items, count))
    taken: list[_Item] = []
    filled = 0
    while filled < tokens:
        item = next(items, None)
        if item is None:
            break
        taken.append(item)
        filled += item.tokens
    if filled != tokens:
        raise ValueError(
            f"row {row} has {tokens} placeholders of {name}s, which is no number of whole {name}s"
        )
    return taken


def _joined(items: list[_Item]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Patches and grids of all items."""
    if not items:
        return None, None
    return torch.cat([item.patches for item in items]), torch.cat([item.grid for item in items])
