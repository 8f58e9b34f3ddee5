"""The engine behind `generate`'s own signature, for notebooks and for code that has a loaded Hugging Face model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from std_core.checkpoint import Inputs
from std_core.engine import Engine
from std_core.model import Model
from std_core.types import Draft, Request, Result, Sampling


def sparse_to_dense(model: Any, draft: Draft | None = None, **settings: int) -> SparseToDense:
    """A drop-in for a loaded model's `generate`: the same tokens, drafted sparsely and verified densely.

    Args:
        model: any supported Hugging Face Video-LLM or text model. Its own `generate` goes on working.
        draft: what drafts; top-K by the question's attention (Sparse-to-Dense §3.2) if not given.
        settings: fields of `Engine`: `max_num_seqs`, `prefill_chunk`, `seed`, `strict`.

    Raises:
        ValueError: the model's architecture cannot be driven.
    """
    return SparseToDense(model, draft or Draft(), **settings)


class SparseToDense:
    """See `sparse_to_dense`. `results` are those of the last call, row by row: rounds, proposed and accepted tokens,
    share of the KV entries that the draft read, times."""

    def __init__(self, hf: Any, draft: Draft, **settings: int):
        self.hf, self.draft, self.results = hf, draft, list[Result]()
        model = Model(hf)
        window = int(hf.config.get_text_config().max_position_embeddings)
        self._engine = Engine(model, _Given(window), **settings)  # type: ignore[arg-type]
        model.detach()

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
        **shown: torch.Tensor,
    ) -> torch.Tensor:
        """What `model.generate` with the same arguments returns (greedy, and as the generation configuration has it).

        Args:
            input_ids, attention_mask: (B, n); masked places are skipped, on whichever side.
            seed: of row i is `seed` + i; with it a sampled text is the same again, without it is a fresh draw.
            shown: the processor's other outputs (`pixel_values_videos`, `video_grid_thw`, `mm_token_type_ids`, …), as
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
            raise ValueError("max_new_tokens is missing: neither the call nor the generation configuration has one")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        longest, window = int(mask.sum(1).max()), self._engine.checkpoint.max_model_len
        if longest + limit > window:
            raise ValueError(f"{longest} tokens of prompt and max_new_tokens = {limit}: the window holds {window}")
        if do_sample and temperature is None:
            temperature = theirs.temperature or 1.0
        if do_sample is False:
            temperature = 0.0
        fed = dict(zip(map(str, range(len(input_ids))), _rows(self.hf.config, input_ids, mask, shown), strict=True))
        requests = [
            Request(
                name,
                "",
                sampling=Sampling(
                    limit,
                    min_new_tokens,
                    temperature,
                    top_p,
                    top_k,
                    repetition_penalty,
                    seed + int(name) if seed is not None else None,
                ),
            )
            for name in fed
        ]
        self.results = self._run(requests, fed)
        return self._padded(input_ids, theirs.pad_token_id if pad_token_id is None else pad_token_id)

    def _run(self, requests: list[Request], fed: dict[str, Inputs]) -> list[Result]:
        self._engine.model.attach()  # outside of calls the model keeps its own, so that its own `generate` works
        try:
            results = {r.request_id: r for r in self._engine.run(requests, self.draft, lambda r: fed[r.request_id])}
        finally:
            self._engine.model.detach()
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


def _rows(config: Any, ids: torch.Tensor, mask: torch.Tensor, shown: dict[str, torch.Tensor]) -> Iterator[Inputs]:
    """What a processor made of a batch, row by row and without padding.

    Raises:
        TypeError: outputs that no supported model takes.
        ValueError: rows whose placeholders are not those of whole videos or images.
    """
    rest = dict(shown)
    types = rest.pop("mm_token_type_ids", None)
    if types is None:
        types = (ids == getattr(config, "image_token_id", None)) + 2 * (ids == getattr(config, "video_token_id", None))
    images = _items(config, rest.pop("pixel_values", None), rest.pop("image_grid_thw", None))
    videos = _items(config, rest.pop("pixel_values_videos", None), rest.pop("video_grid_thw", None))
    if rest:
        raise TypeError(f"generate takes no {', '.join(sorted(rest))}")
    for row in range(len(ids)):
        there = mask[row].bool()
        kinds = types[row, there]
        seen = {
            name: part
            for kind, name, items in ((1, "image", images), (2, "video", videos))
            for name, part in _take(items, int((kinds == kind).sum()), name, row).items()
        }
        yield Inputs(ids[row : row + 1, there], kinds[None], **seen)


Item = tuple[torch.Tensor, torch.Tensor, int]  # patches, grid (1, 3), tokens


def _items(config: Any, patches: torch.Tensor | None, grids: torch.Tensor | None) -> Iterator[Item]:
    """The videos or images of a batch, in its order."""
    at = 0
    for grid in grids if grids is not None else ():
        assert patches is not None
        count = int(grid.prod())
        yield patches[at : at + count], grid[None], count // config.vision_config.spatial_merge_size**2
        at += count


def _take(items: Iterator[Item], tokens: int, name: str, row: int) -> dict[str, torch.Tensor]:
    """The next of them, as many as a row has placeholders for."""
    taken: list[Item] = []
    while sum(item[2] for item in taken) < tokens and (item := next(items, None)) is not None:
        taken.append(item)
    if sum(item[2] for item in taken) != tokens:
        raise ValueError(f"row {row} has {tokens} places of its {name}s, which is no number of whole {name}s")
    if not taken:
        return {}
    return {f"{name}_{what}": torch.cat([item[i] for item in taken]) for i, what in ((0, "patches"), (1, "grid"))}
