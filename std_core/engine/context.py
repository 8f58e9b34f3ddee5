"""What the code behind the slots needs of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from std_core.decoding.token_sampling import ResolvedSampling
from std_core.engine.draft_models import DraftModels
from std_core.engine.prefixes import PrefixStore
from std_core.engine.row import EndCheck
from std_core.model.checkpoint import Checkpoint
from std_core.model.model import Model
from std_core.types import Counters, Request

Resolve = Callable[[Request, torch.Tensor], ResolvedSampling]


@dataclass(frozen=True)
class EngineContext:
    """Model, stores, limits and callbacks of one run. Made by the engine; see `Engine`.

    Args:
        resolve: how a request's tokens are chosen, given the ids (n,) of its prompt.
        end_check: called with a row after its prefill and after each of its rounds; the number of
            its tokens at which it ends, None if it goes on.
    """

    model: Model
    checkpoint: Checkpoint
    draft_models: DraftModels
    prefixes: PrefixStore
    counters: Counters
    max_num_seqs: int
    prefill_chunk: int
    strict: int
    resolve: Resolve
    end_check: EndCheck | None = None
