"""Peak memory of tensors, by the allocator's own account, and of the process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import profile

from jobs.suites.shared.process_memory import peak_resident_bytes, reset_peak


def tensors_peak(work: Callable[[], None], device: str = "cpu") -> int:
    """Bytes that the allocator has given out at the peak of `work` beyond those before it,
    temporaries inside operations included.

    On a CPU the profiler records every allocation and release.
    """
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(profile_memory=True, acc_events=False) as recorded:
        work()
    allocations = [e for e in _events(recorded) if hasattr(e.extra_fields, "alloc_size")]
    live: dict[int, int] = {}  # size by address
    total = 0
    peak = 0
    for event in sorted(allocations, key=lambda e: e.start_time_ns):
        block = event.extra_fields
        if block.alloc_size > 0:
            live[block.ptr] = block.alloc_size
            total += block.alloc_size
            peak = max(peak, total)
        else:
            # the size of a block from before `work` is unknown, and none of `work`'s
            total -= live.pop(block.ptr, 0)
    return peak


def _events(recorded: profile) -> Iterator[Any]:
    assert recorded.kineto_results is not None
    pending = list(recorded.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        yield event
        pending += event.children


def resident_peak(work: Callable[[], None]) -> int:
    """The process's resident bytes at the peak of `work`, those before it included."""
    reset_peak()
    work()
    return peak_resident_bytes()


def weight_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of parameters and buffers, each storage once."""
    storages = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
