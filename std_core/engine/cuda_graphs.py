"""Rounds as CUDA graphs: γ draft steps, verification, acceptance and commit are recorded once per
shape and replayed.

A round waits for no length: lengths live on the device, kernels cover the caches' capacity, and the
room that a row may ever need is made at its admission (`Slots.ahead`). A recording is bound to
addresses: it is made per γ, number of slots and capacity of the caches, and the small tensors that
change with who sits where are copied into ones that stay. What asks the host for something is not
recorded: draws without a seed, refresh, processors of logits that `LogitsProcessors` lacks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from std_core.decoding.round import Round, Slots
from std_core.kernels.shared.constants import SPLIT_SIZE
from std_core.model.model import Model
from std_core.types import Draft

Body = Callable[[], Round]
Replay = Callable[[], None]
Recorder = Callable[[Body], tuple[Replay, Round]]


def graph_recorder(model: Model) -> Recorder | None:
    """What records rounds of a model; None where none can be recorded."""
    if model.device.type != "cuda" or len(set(model.layer_devices)) > 1:
        return None
    # recordings never run at the same time, and what one has given is read before the next one
    # runs: together they take the memory of the widest
    return partial(_record, torch.cuda.graph_pool_handle())


def _record(pool: Any, body: Body) -> tuple[Replay, Round]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        done = body()
    return graph.replay, done


class CapturedRounds:
    """The recorded rounds of some slots."""

    def __init__(self, slots: Slots, record: Recorder):
        self.slots = slots
        self._record = record
        self._stay: dict[Hashable, torch.Tensor] = {}  # by name and shape
        self._rounds: dict[Hashable, tuple[Replay, Round] | None] = {}
        self._capacity: Hashable = None

    @torch.inference_mode()
    def round(self, gamma: Hashable, body: Body) -> Round:
        """Runs `body`, or what was recorded of it. The first of a shape runs as it is: it compiles
        kernels and picks algorithms, which a recording may not.

        Args:
            gamma: γ, and what else tells bodies of one shape apart.
        """
        slots = self.slots
        if slots.sampling_state.fresh or slots.logits_processors is None:
            return body()
        self._settle()
        # what a round's course depends on besides numbers on the device
        shapes = [
            slots.groups.members.shape,
            slots.stop_ids.shape,
            slots.logits_processors.stop_ids.shape,
        ]
        logits_processors = slots.logits_processors
        key = (
            gamma,
            slots.sampling_state.sampled,
            logits_processors.penalises,
            logits_processors.holds,
            logits_processors.heats,
            logits_processors.cuts,
            *shapes,
        )
        if key not in self._rounds:
            self._rounds[key] = None
            return body()
        found = self._rounds[key]
        if found is None:
            found = self._rounds[key] = self._record(body)
        replay, done = found
        replay()
        return done

    def _settle(self) -> None:
        """Brings what changes with the rows to where recordings look for it, and forgets those of
        smaller caches."""
        slots = self.slots
        caches = slots.prefix.capacity, slots.suffix.capacity, slots.draft.capacity
        if (capacity := (*caches, slots.history.shape[1])) != self._capacity:
            self._capacity = capacity
            self._rounds.clear()
        for name in ("active", "stop_ids"):
            setattr(slots, name, self._staying(name, getattr(slots, name)))
        for name in ("groups", "sampling_state", "logits_processors"):
            setattr(slots, name, self._all_staying(name, getattr(slots, name)))

    def _all_staying(self, name: str, record: Any) -> Any:
        """A frozen dataclass whose tensors stay where those of the first of their shape were."""
        tensors = {field: x for field, x in vars(record).items() if isinstance(x, torch.Tensor)}
        return replace(
            record, **{field: self._staying(f"{name}.{field}", x) for field, x in tensors.items()}
        )

    def _staying(self, name: str, x: torch.Tensor) -> torch.Tensor:
        kept = self._stay.setdefault((name, x.shape), x)
        if kept is not x:
            kept.copy_(x)
        return kept


def pool_bytes(
    entry_bytes: int,
    slots: int,
    prompt: int,
    shared: int,
    visual: int,
    limit: int,
    draft: Draft | None,
) -> int:
    """Bytes of the caches of `slots` rows, each with a bucket's longest request: what a plan holds
    to free memory. Not among them are those of a second model, and the numbers that a step works
    on.

    Args: entry_bytes: of one token's keys and values in all layers. prompt: tokens of it, of which
        the first `shared` are in the prefix store and `visual` can be left out. limit: tokens that
        a row may write.
    """
    spare = limit + (draft.gamma if draft else 0) + 1
    entries = [shared, prompt - shared + spare]
    if draft is not None and draft.policy not in ("full", "ngram") and not draft.model:
        entries.append(prompt - visual + draft.budget(visual) + spare)
    return slots * entry_bytes * sum(-(-n // SPLIT_SIZE) * SPLIT_SIZE for n in entries)
