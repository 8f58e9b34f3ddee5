"""Rounds as CUDA graphs.

γ draft steps, verification, acceptance and commit are captured once per shape and replayed. A
captured round never waits for a length: lengths stay on the device, kernels cover the caches'
capacity, and all the room that a row may need is reserved at its admission (`Slots.headroom`). A
graph is bound to addresses. It is captured per γ, number of slots and size of the caches, and the
small tensors that change with the running rows are copied into buffers that stay in place. A round
that needs the host is not captured: sampling without a seed, refresh, kept scores, and logits
processors that `LogitsProcessors` does not support.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from std_core.decoding.logits import LogitsProcessors
from std_core.decoding.round import Round
from std_core.decoding.slots import Slots
from std_core.model.model import Model

Body = Callable[[], Round]
Replay = Callable[[], None]
Recorder = Callable[[Body], tuple[Replay, Round]]


def graph_recorder(model: Model) -> Recorder | None:
    """Return what captures a model's rounds; None if they cannot be captured.

    Capturing needs all layers on one CUDA device.
    """
    if model.device.type != "cuda" or len(set(model.layer_devices)) > 1:
        return None
    # One memory pool for all graphs: they never run at the same time, and the result of one is read
    # before the next runs. So all together take the memory of the largest.
    return partial(_record, torch.cuda.graph_pool_handle())


def _record(pool: Any, body: Body) -> tuple[Replay, Round]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        done = body()
    return graph.replay, done


class CapturedRounds:
    """The captured rounds of a batch's slots."""

    def __init__(self, slots: Slots, record: Recorder):
        self.slots = slots
        self._record = record
        self._buffers: dict[Hashable, torch.Tensor] = {}  # by name and shape
        self._rounds: dict[Hashable, tuple[Replay, Round] | None] = {}
        self._shapes: Hashable = None  # of what grows, and moves when it does

    @torch.inference_mode()
    def round(self, key: Hashable, body: Body) -> Round:
        """Run `body`, or replay its graph.

        The first round of a shape runs uncaptured: it compiles kernels and picks algorithms, which
        is not allowed during capture.

        Args:
            key: γ, and whatever else distinguishes bodies of one shape.
        """
        slots = self.slots
        processors = slots.logits_processors
        if slots.sampling_state.fresh or processors is None or slots.keeps_scores:
            return body()
        self._move_to_buffers()
        shape = (key, *self._control_flow(processors))
        if shape not in self._rounds:
            self._rounds[shape] = None
            return body()
        captured = self._rounds[shape]
        if captured is None:
            captured = self._rounds[shape] = self._record(body)
        replay, done = captured
        replay()
        return done

    def _control_flow(self, processors: LogitsProcessors) -> tuple[Hashable, ...]:
        """What a round's control flow depends on, besides numbers on the device."""
        return (
            self.slots.sampling_state.sampled,
            processors.flags,
            processors.stop_ids.shape,
            self.slots.groups.members.shape,
            self.slots.stop_ids.shape,
        )

    def _move_to_buffers(self) -> None:
        """Copy what changes with the running rows to the addresses that graphs read.

        Graphs of smaller caches and of fewer slots are dropped.
        """
        slots = self.slots
        caches = (slots.prefix, slots.suffix, slots.draft)
        shapes = (*(cache.shape for cache in caches), slots.history.shape)
        if shapes != self._shapes:
            self._shapes = shapes
            self._rounds.clear()
        for name in ("active", "stop_ids"):
            setattr(slots, name, self._buffered(name, getattr(slots, name)))
        for name in ("groups", "sampling_state", "logits_processors"):
            setattr(slots, name, self._record_in_buffers(name, getattr(slots, name)))

    def _record_in_buffers(self, name: str, record: Any) -> Any:
        """A frozen dataclass with its tensors moved to buffers."""
        tensors = {field: x for field, x in vars(record).items() if isinstance(x, torch.Tensor)}
        moved = {field: self._buffered(f"{name}.{field}", x) for field, x in tensors.items()}
        return replace(record, **moved)

    def _buffered(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The buffer of that name and shape, with the tensor's values."""
        buffer = self._buffers.setdefault((name, x.shape), x)
        if buffer is not x:
            buffer.copy_(x)
        return buffer
