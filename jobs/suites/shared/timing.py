"""Timers of the suites and of calibration, read bandwidth, and ratios with a lower bound.

PyTorch is imported inside the functions that need it: suites that measure the memory or the CPU
time of processes without PyTorch use the stopwatch alone."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

BOOTSTRAP_SAMPLES = 2000
FLOAT32_BYTES = 4


class Stopwatch:
    """Wall-clock seconds since it was created or reset."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start


def wall_seconds(work: Callable[[], object], device: str = "cpu") -> float:
    """Wall-clock seconds of one call, including the kernels it launches on `device`."""
    _synchronize(device)
    watch = Stopwatch()
    work()
    _synchronize(device)
    return watch.seconds


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call, over all threads of this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def mean_seconds(
    work: Callable[[], object], *, repeats: int, warmup: int, device: str = "cpu"
) -> float:
    """Mean wall-clock seconds of `repeats` back-to-back calls, after `warmup` untimed ones."""
    for _ in range(warmup):
        work()

    def repeat() -> None:
        for _ in range(repeats):
            work()

    return wall_seconds(repeat, device) / repeats


def read_bandwidth(num_bytes: float = 2e9, *, times: int = 9, device: str = "cpu") -> float:
    """Bytes/s of read-only sums over `num_bytes`, the best of `times`.

    Args:
        num_bytes: more than the caches hold.
    """
    import torch

    memory = torch.ones(int(num_bytes) // FLOAT32_BYTES, device=device)
    return memory.nbytes / min(wall_seconds(memory.sum, device) for _ in range(times))


class RatioEstimate(NamedTuple):
    """A ratio of paired times, for instance a speed-up."""

    median: float
    lower_bound: float  # 95%, bootstrapped over pairs


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> RatioEstimate:
    """The median of the pairs' ratios and its 95% lower bound."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(BOOTSTRAP_SAMPLES)
    )
    return RatioEstimate(statistics.median(ratios), medians[BOOTSTRAP_SAMPLES // 20])


def _synchronize(device: str) -> None:
    """Wait for the kernels launched on a GPU."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)
