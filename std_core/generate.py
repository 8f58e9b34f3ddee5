"""The engine behind `generate`'s own signature, for notebooks and for code that has a loaded
Hugging Face model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from std_core.engine.engine import Engine
from std_core.model.checkpoint import ModelInputs
from std_core.model.model import Model
from std_core.types import Draft, Request, Result, Sampling


def sparse_to_dense(model: Any, draft: Draft | None = None, **settings: int) -> SparseToDense:
    """A drop-in for a loaded model's `generate`: the same tokens, drafted sparsely and verified
    densely.

    Args: model: any supported Hugging Face Video-LLM or text model. Its own `generate` goes on
        working. draft: what drafts; top-K by the question's attention (Sparse-to-Dense §3.2) if not
        given. settings: fields of `Engine`: `max_num_seqs`, `prefill_chunk`, `seed`, `strict`.

    Raises:
        ValueError: the model's architecture cannot be driven.
    """
    return SparseToDense(model, draft or Draft(), **settings)


class SparseToDense:
    """See `sparse_to_dense`. `results` are those of the last call, row by row: rounds, proposed and
    accepted tokens, share of the KV entries that the draft read, times."""

    def __init__(self, hf: Any, draft: Draft, **settings: int):
        self.hf = hf
        self.draft = draft
        self.results = list[Result]()
        model = Model(hf)
        window = int(hf.config.get_text_config().max_position_embeddings)
        self._engine = Engine(model, _Given(window), **settings)  # type: ignore[arg-type]
        model.restore_attention()

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        min_new_tokens: int = 0,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        pad_token_id: int | None = None,
        **shown: Any,
    ) -> torch.Tensor:
        """What `model.generate` with the same arguments returns (greedy, and as the generation
        configuration has it).

        Args: input_ids, attention_mask: (B, n); masked places are skipped, on whichever side. seed:
            of row i is `seed` + i; with it a sampled text is the same again, without it is a fresh
            draw. shown: the processor's other outputs (`pixel_values_videos`, `video_grid_thw`,
            `mm_token_type_ids`, …), as
                one batch.

        Returns:
            (B, n + longest), prompts included; shorter rows end in the padding token.

        Raises:
            ValueError: no `max_new_tokens`, or more than the model's window holds.
            RequestError: a row that the model cannot answer.
        """
        theirs = self.hf.generation_config
        limit = max_new_tokens if max_new_tokens is not None else theirs.max_new_tokens
        if limit is None:
            raise ValueError(
                "max_new_tokens is missing: neither the call nor the generation configuration has one"
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        longest = int(mask.sum(1).max())
        window = self._engine.checkpoint.max_model_len
        if longest + limit > window:
            raise ValueError(
                f"{longest} tokens of prompt and max_new_tokens = {limit}: the window holds {window}"
            )
        if do_sample and temperature is None:
            temperature = theirs.temperature or 1.0
        if do_sample is False:
            temperature = 0.0
        fed = dict(
            zip(
                map(str, range(len(input_ids))),
                _rows(self.hf.config, input_ids, mask, shown),
                strict=True,
            )
        )
        requests = [
            Request(
                name,
                "",
                sampling=Sampling(
                    limit,
                    min_tokens=min_new_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    top_k=top_k,
                    repetition_penalty=repetition_penalty,
                    seed=seed + int(name) if seed is not None else None,
                ),
            )
            for name in fed
        ]
        self.results = self._run(requests, fed)
        return self._padded(
            input_ids, theirs.pad_token_id if pad_token_id is None else pad_token_id
        )

    def _run(self, requests: list[Request], fed: dict[str, ModelInputs]) -> list[Result]:
        # outside of calls the model keeps its own, so that its own `generate` works
        self._engine.model.install_attention()
        try:
            results = {
                r.request_id: r
                for r in self._engine.run(requests, self.draft, lambda r: fed[r.request_id])
            }
        finally:
            self._engine.model.restore_attention()
        for result in results.values():
            if result.error is not None:
                raise result.error
        return [results[request.request_id] for request in requests]

    def _padded(self, input_ids: torch.Tensor, pad: int | None) -> torch.Tensor:
        if pad is None:  # as `generate` has it
            eos = self.hf.generation_config.eos_token_id
            pad = eos[0] if isinstance(eos, list) else eos
        longest = max(len(r.token_ids) for r in self.results)
        written = [r.token_ids + [pad or 0] * (longest - len(r.token_ids)) for r in self.results]
        return torch.cat([input_ids, torch.tensor(written, device=input_ids.device)], dim=1)


@dataclass(frozen=True)
class _Given:
    """In place of a checkpoint: prompts come as ids and leave as ids."""

    max_model_len: int

    def decode(self, ids: list[int]) -> str:
        return ""


def _rows(
    config: Any, ids: torch.Tensor, mask: torch.Tensor, shown: dict[str, Any]
) -> Iterator[ModelInputs]:
    """What a processor made of a batch, row by row and without padding.

    Raises:
        TypeError: outputs that no supported model takes.
        ValueError: rows whose placeholders are not those of whole videos or images.
    """
    rest = dict(shown)
    types = rest.pop("mm_token_type_ids", None)
    if types is None:
        places = (getattr(config, f"{kind}_token_id", -1) for kind in ("image", "video"))
        types = sum(kind * (ids == place).long() for kind, place in enumerate(places, 1))
    images = _items(
        config,
        rest.pop("pixel_values", None),
        rest.pop("image_grid_thw", rest.pop("image_sizes", None)),
    )
    videos = _items(config, rest.pop("pixel_values_videos", None), rest.pop("video_grid_thw", None))
    counts = rest.pop("batch_num_images", None)  # LLaVA-OneVision's: how many images a row has
    seconds = rest.pop("second_per_grid_ts", None)
    pace = iter(() if seconds is None else seconds)
    if rest:
        raise TypeError(f"generate takes no {', '.join(sorted(rest))}")
    for row in range(len(ids)):
        there = mask[row].bool()
        kinds = types[row, there]
        known = None if counts is None else int(counts[row])
        pictures = _take(images, int((kinds == 1).sum()), row, "image", count=known)
        clips = _take(videos, int((kinds == 2).sum()), row, "video")
        yield ModelInputs(
            ids[row : row + 1, there],
            kinds[None],
            *_joined(clips),
            *_joined(pictures),
            second_per_grid=torch.tensor([float(next(pace)) for _ in clips])
            if clips and seconds is not None
            else None,
        )


@dataclass(frozen=True)
class _Item:
    """One video or image of a batch."""

    patches: torch.Tensor
    grid: torch.Tensor  # (1, …), as `ModelInputs` has it
    tokens: int


def _items(config: Any, patches: Any, grids: torch.Tensor | None) -> Iterator[_Item]:
    """Videos or images of a batch, in its order; their tokens are 0 where only the model knows."""
    if patches is None:
        return
    if grids is None:  # LLaVA-OneVision's videos, (videos, T, 3, height, width)
        side = math.ceil(config.vision_config.image_size // config.vision_config.patch_size / 2)
        for clip in patches:
            size = torch.tensor([[len(clip), *clip.shape[2:]]])
            yield _Item(clip, size, len(clip) * side**2 + 1)
    elif grids.shape[1] == 2:  # and its images, (images, crops, 3, height, width)
        for image, size in zip(patches, grids, strict=True):
            yield _Item(image[None], size[None], 0)
    else:
        at = 0
        for grid in grids:
            count = int(grid.prod())
            yield _Item(
                patches[at : at + count],
                grid[None],
                count // config.vision_config.spatial_merge_size**2,
            )
            at += count


def _take(
    items: Iterator[_Item], tokens: int, row: int, name: str, count: int | None = None
) -> list[_Item]:
    """The next of them, as many as a row has placeholders for."""
    if count is not None:
        return list(islice(items, count))
    taken: list[_Item] = []
    while sum(item.tokens for item in taken) < tokens and (item := next(items, None)) is not None:
        taken.append(item)
    if sum(item.tokens for item in taken) != tokens:
        raise ValueError(
            f"row {row} has {tokens} places of its {name}s, which is no number of whole {name}s"
        )
    return taken


def _joined(items: list[_Item]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not items:
        return None, None
    return torch.cat([item.patches for item in items]), torch.cat([item.grid for item in items])
