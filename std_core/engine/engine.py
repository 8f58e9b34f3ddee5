"""The engine: a model, its slots, and what it did. What happens in the slots is in `batch.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from std_core.engine.batch import Batch
from std_core.engine.prefill import Prefix
from std_core.model import sparsity
from std_core.model.cache import KVCache
from std_core.model.checkpoint import Checkpoint, ModelInputs
from std_core.model.drafters import build_drafter, pair_drafter, step_weight_bytes
from std_core.model.model import Model
from std_core.model.tensor_parallel import SINGLE_RANK, join_group, unshardable_reason
from std_core.types import Counters, Draft, GammaSchedule, Mode, Request, Result


@dataclass
class Engine:
    """A model and its slots.

    Args: max_num_seqs: slots, rows that decode together. prefill_chunk: tokens of a prompt that are
        prefilled at once, at most. seed: of draws by requests that sample and have no seed of their
        own. keep_prefixes: what is known of a video outlives a run, for callers whose
        `Request.video_id` names the same content
            for as long as the engine lives.
        strict: tokens per row to which every verification is padded; γ must be less. The same bits
            then come out whatever drafts, γ below it, and who shares the batch, in bfloat16 too:
            those of the dense loop with the same slots and `strict`. 0: each step as wide as it
            needs to be.

    Raises ValueError for `strict` on more than two ranks: the order in which their parts are summed
    is not fixed."""

    model: Model
    checkpoint: Checkpoint
    max_num_seqs: int = 8
    prefill_chunk: int = 2048
    seed: int = 0
    strict: int = 0
    keep_prefixes: bool = False
    counters: Counters = field(default_factory=Counters)
    prefixes: tuple[KVCache, list[Prefix]] | None = None  # those that are kept
    thresholds: dict[float, dict[str, float]] = field(
        default_factory=dict
    )  # by the share of channels kept
    drafters: dict[tuple[Any, ...], Model] = field(
        default_factory=dict
    )  # made when first asked for

    def __post_init__(self) -> None:
        if self.strict and self.model.tensor_parallel.size > 2:
            raise ValueError(
                f"strict is for one or two ranks, not {self.model.tensor_parallel.size}: their sums' order varies"
            )

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        rank: int = 0,
        address: str = "",
        threads: int | None = None,
        **settings: int,
    ) -> Engine:
        """An engine of a local folder, a hub id or a `.gguf` file.

        Args: dtype: `float32` or `bfloat16`. pipeline_parallel_size: devices over which the layers
            are spread, from `device` on (`cuda` is `cuda:0`). tensor_parallel_size: processes that
            share each layer; every one of them loads an engine, with its `rank`,
                and runs the same requests with the same draft.
            address: where rank 0 listens for the others, `tcp://host:port`.
            threads: CPU threads of this process; PyTorch's own choice if not given.
            settings: fields of `Engine`.

        Raises: ValueError: the checkpoint cannot be loaded, is of an architecture that cannot be
            driven, or has heads that
                cannot be divided by `tensor_parallel_size`.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        if tensor_parallel_size > 1 and pipeline_parallel_size > 1:
            raise ValueError(
                "a rank of a tensor-parallel engine has one device: its layers cannot be spread over more"
            )
        checkpoint = Checkpoint.load(path)
        if why := unshardable_reason(checkpoint.config, tensor_parallel_size):
            raise ValueError(f"tensor_parallel_size is {tensor_parallel_size}: {why}")
        devices = devices_from(device, pipeline_parallel_size)
        ranks = (
            join_group(tensor_parallel_size, rank, address, device)
            if tensor_parallel_size > 1
            else SINGLE_RANK
        )
        model = Model.load(checkpoint, getattr(torch, dtype), *devices, ranks=ranks)
        return cls(model, checkpoint, **settings)  # type: ignore[arg-type]

    def resize(self, max_num_seqs: int) -> None:
        """So many slots from the next run on. Where that is another number, what was kept of videos
        is forgotten."""
        if max_num_seqs != self.max_num_seqs:
            self.max_num_seqs = max_num_seqs
            self.prefixes = None

    @torch.inference_mode()
    def run(
        self,
        requests: Iterable[Request | GammaSchedule | None],
        draft: Draft | None,
        prepare: Callable[[Request], ModelInputs] | None = None,
        mode: Mode = "std",
    ) -> Iterator[Result]:
        """Answers every request once, in the order in which they finish.

        Args: requests: taken one by one, as slots become free; None says that there is none yet,
            and rows go on. A pace
                says how much is drafted from there on, until the next one does.
            draft: what drafts, and γ; None decodes densely. With a pace γ is how much a round has
                room for.
            prepare: in place of the checkpoint's own `inputs`.
            mode: `sparse` takes what is drafted for the answer, without a verification: lossy.

        Raises:
            ValueError: a draft that this model or mode cannot have, or a pace beyond its γ.
        """
        waiting = self.model.tensor_parallel.synchronize_requests(iter(requests))
        yield from Batch(self, draft, prepare or self.checkpoint.preprocess, mode).run(waiting)

    # ------------------------------------------------------------------------------------- drafters

    def drafter(self, draft: Draft) -> Model:
        """The model that drafts.

        Raises:
            ValueError: a second model that cannot be loaded or reads other tokens.
        """
        key = (draft.depth, draft.channels, draft.weights, draft.model)
        if key not in self.drafters:
            base = self._second(draft.model) if draft.model else self.model
            self.drafters[key] = build_drafter(base, draft, self.thresholds.get(draft.channels, {}))
        return self.drafters[key]

    def _second(self, path: str) -> Model:
        second = Checkpoint.load(path)
        second.check_can_draft_for(self.checkpoint)
        return pair_drafter(
            self.model, Model.load(second, self.model.dtype, str(self.model.device))
        )

    def weight_keep(self, draft: Draft | None) -> float:
        """Bytes of weights that a draft step reads, over those of a step of the model."""
        if draft is None:
            return 1.0
        return (
            0.0
            if draft.policy == "ngram"
            else step_weight_bytes(self.drafter(draft)) / step_weight_bytes(self.model)
        )

    def uncalibrated(self, draft: Draft | None) -> bool:
        """Whether the draft needs thresholds that no sample of activations has given yet."""
        return draft is not None and draft.channels < 1 and draft.channels not in self.thresholds

    def calibrate(self, draft: Draft, seen: dict[str, torch.Tensor]) -> None:
        """Settles the thresholds of a share of channels from a sample of the projections'
        inputs."""
        self.thresholds[draft.channels] = sparsity.calibrate_thresholds(
            self.model.decoder, seen, draft.channels
        )


def devices_from(device: str, count: int) -> list[str]:
    """`count` devices of a kind, the given one first; of CPUs torch knows one."""
    if count == 1 or device == "cpu":
        return [device] * count
    kind, _, first = device.partition(":")
    return [f"{kind}:{int(first or 0) + n}" for n in range(count)]
