"""Correctness and speed on a GPU, in minutes, without a network: every kernel and captured round
against a reference, then decode rounds of models of real sizes with random weights, each beside its
byte bound.

    python jobs/benchmark.py --suite gpu                                   # 8 minutes at most
    TRITON_INTERPRET=1 python jobs/benchmark.py --suite gpu --device cpu   # rehearsal, tiny size

Needs torch, triton, transformers, click, PyYAML, numpy and pyarrow, and no other package. Speed-ups
are over the dense loop at one token a step; a draft's acceptance is assumed, since that of random
weights means nothing."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton

from jobs.suites.gpu import checks, grid, shapes
from jobs.suites.shared import triton_interpreter
from jobs.suites.shared.flags import parse_suite_flags
from jobs.suites.shared.timing import read_bandwidth
from pipeline.command_line import flag
from pipeline.records import UsageError
from std_core.kernels.flash_attention import kernel_name as prefill_kernel


@dataclass(frozen=True)
class Flags:
    """The suite's command line."""

    device: Literal["cuda", "cpu"] = flag(
        "cuda", "cpu rehearses the suite at a tiny size, whose times mean nothing"
    )
    seconds: int = flag(460, "after which no new measurement is begun")


def run(argv: list[str]) -> dict[str, Any]:
    """Return the suite's figures."""
    flags = parse_suite_flags(Flags, argv, "gpu", __doc__)
    _require_triton_for(flags.device)
    if flags.device == "cuda":
        return _measure(flags)
    with triton_interpreter.triton_on_cpu():
        return _measure(flags)


def _require_triton_for(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--suite gpu measures on a GPU and none was found; "
            "--device cpu with TRITON_INTERPRET=1 rehearses it"
        )
    if (os.environ.get("TRITON_INTERPRET") == "1") != (device == "cpu"):
        raise UsageError("TRITON_INTERPRET=1 goes with --device cpu, and only with it")


def _measure(flags: Flags) -> dict[str, Any]:
    start = time.monotonic()
    deadline = start + flags.seconds
    device = flags.device
    tiny = device == "cpu"
    dtype = torch.float32 if tiny else torch.bfloat16
    size = grid.TINY if tiny else grid.FULL
    bandwidth = read_bandwidth(size.bandwidth_bytes, times=size.repeats, device=device)
    checked = checks.run(device, tiny=tiny, deadline=start + flags.seconds / 2)
    decode: dict[str, Any] = {}
    for shape in shapes.TINY if tiny else shapes.FULL:
        model = shapes.random_shape(shape, device, dtype)
        decode[shape.name] = grid.measure_contexts(
            model, shape, size, bandwidth=bandwidth, device=device, deadline=deadline
        )
        del model
        if not tiny:
            torch.cuda.empty_cache()
    return {
        "suite": "gpu",
        "device": "cpu, in Triton's interpreter" if tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "paths": {
            "decode": "split-KV with packed heads (Triton)",
            "prefill": "the CPU's" if tiny else prefill_kernel(dtype),
        },
        "checks": checked.outcomes,
        "checks_failed": checked.failed,
        "checks_without_time": checked.skipped,
        "read_bytes_per_s": bandwidth,
        "decode": decode,
        "seconds": time.monotonic() - start,
    }
