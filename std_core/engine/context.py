"""What the code behind the slots needs of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from std_core.engine.draft_models import DraftModels
from std_core.engine.prefixes import PrefixStore
from std_core.model.checkpoint import Checkpoint
from std_core.model.model import Model
from std_core.types import Counters


@dataclass(frozen=True)
class EngineContext:
    """Model, stores and limits of one run. Made by the engine; see `Engine` for the limits."""

    model: Model
    checkpoint: Checkpoint
    draft_models: DraftModels
    prefixes: PrefixStore
    counters: Counters
    max_num_seqs: int
    prefill_chunk: int
    strict: int
