"""How much memory something takes at its peak: what tensors hold, by the allocator's own account,
and what the process has resident."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import profile

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def tensors_peak(work: Callable[[], None], device: str = "cpu") -> int:
    """Bytes that the allocator has given out at the peak beyond what it had at the start,
    temporaries inside of operations included. On a CPU the profiler notes every block that is given
    out or taken back."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(profile_memory=True, acc_events=False) as seen:
        work()
    blocks = [e for e in _events(seen) if hasattr(e.extra_fields, "alloc_size")]
    live: dict[int, int] = {}
    held = peak = 0
    for event in sorted(blocks, key=lambda e: e.start_time_ns):
        block = event.extra_fields
        if block.alloc_size > 0:
            live[block.ptr] = block.alloc_size
            held += block.alloc_size
            peak = max(peak, held)
        else:  # of one that was there before it knows no true size
            held -= live.pop(block.ptr, 0)
    return peak


def _events(seen: profile) -> Iterator[Any]:
    assert seen.kineto_results is not None
    waiting = list(seen.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children


def resident_peak(work: Callable[[], None]) -> int:
    """The process's resident bytes at their peak while something is done; those from before are
    among them."""
    CLEAR.write_text("5")  # forgets the peak so far
    work()
    return _status("VmHWM")


def resident() -> int:
    """Bytes."""
    return _status("VmRSS")


def held_by(modules: Iterable[nn.Module]) -> int:
    """Bytes of parameters and buffers, each storage once."""
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def _status(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10
