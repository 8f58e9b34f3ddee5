"""The engine: a model, its slots, and what it did. What happens in the slots is in `batch.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from std_core.batch import Batch
from std_core.checkpoint import Checkpoint, Inputs
from std_core.model import Model
from std_core.types import Counters, Draft, Request, Result


@dataclass
class Engine:
    """A model and its slots, on one device.

    Args:
        max_num_seqs: slots, rows that decode together.
        prefill_chunk: tokens of a prompt that are prefilled between two rounds, at most.
        seed: of draws by requests that sample and have no seed of their own.
        strict: tokens per row to which every verification is padded; γ must be less. The same bits then come out
            whatever drafts, γ below it, and who shares the batch, in bfloat16 too: those of the dense loop with the
            same slots and `strict`. 0: each step as wide as it needs to be.
    """

    model: Model
    checkpoint: Checkpoint
    max_num_seqs: int = 8
    prefill_chunk: int = 2048
    seed: int = 0
    strict: int = 0
    counters: Counters = field(default_factory=Counters)

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        threads: int | None = None,
        **settings: int,
    ) -> Engine:
        """An engine of a local folder, a hub id or a `.gguf` file.

        Args:
            dtype: `float32` or `bfloat16`.
            threads: CPU threads of this process; PyTorch's own choice if not given.
            settings: fields of `Engine`.

        Raises:
            ValueError: the checkpoint cannot be loaded or is of an architecture that cannot be driven.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        checkpoint = Checkpoint.load(path)
        return cls(Model.load(checkpoint, getattr(torch, dtype), device), checkpoint, **settings)  # type: ignore[arg-type]

    @torch.inference_mode()
    def run(
        self,
        requests: Iterable[Request | None],
        draft: Draft | None,
        prepare: Callable[[Request], Inputs] | None = None,
    ) -> Iterator[Result]:
        """Answers every request once, in the order in which they finish.

        Args:
            requests: taken one by one, as slots become free; None says that there is none yet, and rows go on.
            draft: what drafts and for how long; None decodes densely.
            prepare: in place of the checkpoint's own `inputs`.
        """
        yield from Batch(self, draft, prepare or self.checkpoint.inputs).through(iter(requests))
