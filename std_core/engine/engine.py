"""The engine: a loaded model, its slots, and what it keeps between runs.

`batch.py` has what happens in the slots.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from std_core.decoding.generation_fields import refusals
from std_core.decoding.token_sampling import ResolvedSampling, resolve_sampling
from std_core.engine.batch import Batch
from std_core.engine.context import EngineContext, Resolve
from std_core.engine.draft_models import DraftModels
from std_core.engine.prefixes import PrefixStore
from std_core.engine.row import EndCheck
from std_core.model.checkpoint import DTYPE_BYTES, Checkpoint, ModelInputs
from std_core.model.model import Model
from std_core.model.tensor_parallel import SINGLE_RANK, join_group, unshardable_reason
from std_core.types import Counters, Draft, Dtype, GammaSchedule, Mode, Request, Result

logger = logging.getLogger(__name__)


@dataclass
class Engine:
    """A model and its slots.

    Args:
        max_num_seqs: slots, rows that decode together.
        prefill_chunk: most tokens of a prompt that one forward pass prefills.
        strict: tokens per row to which every verification is padded; γ must be less. The output
            then has the same bits whatever drafts, at any γ below it, and whichever rows share the
            batch, in bfloat16 too: those of the dense loop with the same slots and `strict`. 0: no
            padding.
        keep_prefixes: keep the prefix store between runs, for callers whose `Request.video_id`
            names the same content as long as the engine lives.
        counters: what the engine has done.
        prefixes: the store that is kept between runs; made by the first run.
        draft_models: made at construction.

    Raises:
        ValueError: a setting is out of range, or `strict` with more than two ranks, whose partial
            sums have no fixed order.
    """

    model: Model
    checkpoint: Checkpoint
    max_num_seqs: int = 8
    prefill_chunk: int = 2048
    strict: int = 0
    keep_prefixes: bool = False
    counters: Counters = field(default_factory=Counters)
    prefixes: PrefixStore | None = None
    draft_models: DraftModels = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        check_settings(**{name: getattr(self, name) for name in LEAST_SETTINGS})
        ranks = self.model.tp_group.size
        if self.strict and ranks > 2:
            raise ValueError(
                f"strict is for one or two ranks, not {ranks}: the order in which the partial sums"
                " of more ranks are added is not fixed"
            )
        if self.draft_models is None:
            self.draft_models = DraftModels(self.model, self.checkpoint)

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: Dtype = "float32",
        device: str = "cpu",
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        rank: int = 0,
        address: str = "",
        threads: int | None = None,
        **settings: int,
    ) -> Engine:
        """Load an engine from a local folder, a hub id or a `.gguf` file.

        Args:
            dtype: of weights and KV cache.
            device: the first device (`cuda` is `cuda:0`).
            pipeline_parallel_size: devices over which the layers are spread, from `device` on.
            tensor_parallel_size: processes that share each layer. Each of them loads an engine with
                its `rank` and runs the same requests with the same draft.
            address: where rank 0 listens for the others, `tcp://host:port`.
            threads: CPU threads of this process; PyTorch's default if not given.
            settings: fields of `Engine`.

        Raises:
            ValueError: another dtype, or a setting out of range; the checkpoint cannot be loaded,
                has an unsupported architecture, or has heads that `tensor_parallel_size` does not
                divide.
        """
        check_settings(**settings)  # before minutes of loading
        _check_least("pipeline_parallel_size", pipeline_parallel_size, least=1)
        _check_least("tensor_parallel_size", tensor_parallel_size, least=1)
        _check_least("threads", 1 if threads is None else threads, least=1)
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {dtype!r}: one of {', '.join(DTYPE_BYTES)} is needed")
        if threads is not None:
            torch.set_num_threads(threads)
        if tensor_parallel_size > 1 and pipeline_parallel_size > 1:
            raise ValueError(
                "tensor_parallel_size and pipeline_parallel_size are both above 1: a rank has one"
                " device, so its layers cannot be spread over several"
            )
        checkpoint = Checkpoint.load(path)
        if why := unshardable_reason(checkpoint.config, tensor_parallel_size):
            raise ValueError(f"tensor_parallel_size is {tensor_parallel_size}: {why}")
        devices = devices_from(device, pipeline_parallel_size)
        ranks = SINGLE_RANK
        if tensor_parallel_size > 1:
            ranks = join_group(tensor_parallel_size, rank, address, device)
        model = Model.load(checkpoint, getattr(torch, dtype), *devices, tp_group=ranks)
        for sentence in refusals(model.hf.generation_config).values():
            logger.warning("ignored in the generation configuration of %s: %s", path, sentence)
        return cls(model, checkpoint, **settings)  # type: ignore[arg-type]

    def resize(self, max_num_seqs: int) -> None:
        """Set the number of slots for the next runs; a change drops the kept prefixes.

        Raises:
            ValueError: it is below 1.
        """
        check_settings(max_num_seqs=max_num_seqs)
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
        *,
        resolve: Resolve | None = None,
        end_check: EndCheck | None = None,
    ) -> Iterator[Result]:
        """Answer every request once, in the order in which they finish.

        Args:
            requests: taken one by one as slots become free. None: no request is available yet, and
                the running rows continue. A gamma schedule is in force from there on, until the
                next one.
            draft: what drafts, and γ; None decodes densely. Under a gamma schedule γ is the
                maximum.
            prepare: makes a request's token ids and pixels; the checkpoint's own `inputs` if not
                given.
            mode: `sparse` outputs what is drafted, without verification: lossy.
            resolve: how a request's tokens are chosen; by its own sampling and the checkpoint's
                generation configuration if not given.
            end_check: ends rows for reasons that their sampling does not state; see
                `EngineContext`.

        Rows that sample without a seed draw from a generator of the run's own, which is seeded by
        a draw from torch's default one: every run is different, and `torch.manual_seed` repeats it.

        Raises:
            ValueError: the draft does not go with this model or mode, or a gamma schedule exceeds
                its γ.
        """
        synchronize_requests = self.model.tp_group.synchronize_requests(iter(requests))
        batch = self.new_batch(draft, prepare, mode, resolve=resolve, end_check=end_check)
        yield from batch.run(synchronize_requests)

    def new_batch(
        self,
        draft: Draft | None,
        prepare: Callable[[Request], ModelInputs] | None = None,
        mode: Mode = "std",
        *,
        resolve: Resolve | None = None,
        end_check: EndCheck | None = None,
    ) -> Batch:
        """Empty slots for one run; see `run`."""
        context = EngineContext(
            model=self.model,
            checkpoint=self.checkpoint,
            draft_models=self.draft_models,
            prefixes=self._prefix_store(),
            counters=self.counters,
            max_num_seqs=self.max_num_seqs,
            prefill_chunk=self.prefill_chunk,
            strict=self.strict,
            resolve=resolve or self._resolve,
            end_check=end_check,
        )
        return Batch(context, draft, prepare or self.checkpoint.preprocess, mode)

    def _resolve(self, request: Request, prompt: torch.Tensor) -> ResolvedSampling:
        return resolve_sampling(self.model.hf, request.sampling, prompt, self.model.vocab_size)

    def _prefix_store(self) -> PrefixStore:
        """The kept store, or an empty one."""
        store = self.prefixes if self.keep_prefixes else None
        if store is None:
            store = PrefixStore(self.model.new_cache(1), self.max_num_seqs)
        if self.strict:  # batches of one shape
            store.add_rows(store.max_rows)
        if self.keep_prefixes:
            self.prefixes = store
        return store


# the engine's settings that callers choose, and the least value of those that are numbers
LEAST_SETTINGS = {"max_num_seqs": 1, "prefill_chunk": 1, "strict": 0}
SETTINGS = (*LEAST_SETTINGS, "keep_prefixes")


def check_settings(**settings: Any) -> None:
    """Check settings before a model is loaded or changed for them.

    Raises:
        ValueError: a setting is unknown or out of range.
    """
    for name, value in settings.items():
        if name not in SETTINGS:
            raise ValueError(f"{name} is no setting of the engine: it has {', '.join(SETTINGS)}")
        if name in LEAST_SETTINGS:
            _check_least(name, value, least=LEAST_SETTINGS[name])


def _check_least(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value}: a whole number of at least {least} is needed")


def devices_from(device: str, count: int) -> list[str]:
    """`count` devices of a kind, `device` first; all CPUs are one device to torch."""
    if count == 1 or device == "cpu":
        return [device] * count
    kind, _, first = device.partition(":")
    return [f"{kind}:{int(first or 0) + n}" for n in range(count)]
