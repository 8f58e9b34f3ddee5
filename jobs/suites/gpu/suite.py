"""Correctness and speed on a GPU, in minutes, with no network: every kernel and captured round
against what is right, then decode rounds of models of real shapes with random weights, each beside
its byte bound.

    python jobs/benchmark.py --suite gpu                                        # 8 minutes at most
    TRITON_INTERPRET=1 python jobs/benchmark.py --suite gpu --device cpu        # the same code at a
    tiny size

Takes torch, triton, transformers, jsonargparse, numpy and pyarrow, nothing else of ours. Speed-ups
are over the dense loop at one token a step; a draft's acceptance is put in as a number, since
random weights have none of their own."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton

from jobs.suites.gpu import checks, grid, shapes
from jobs.suites.shared import triton_interpreter
from pipeline.command_line import parse_flags
from pipeline.records import UsageError
from std_core.kernels.flash_attention import kernel_name as prefill_kernel


@dataclass(frozen=True)
class Flags:
    """The suite's command line."""

    device: Literal["cuda", "cpu"] = (
        "cuda"  # cpu: a rehearsal at a tiny size, whose times mean nothing
    )
    seconds: int = 460  # after which nothing new is begun


def run(argv: list[str]) -> dict[str, Any]:
    """The suite's figures."""
    flags: Flags = parse_flags(Flags, argv, "benchmark.py --suite gpu")
    _check(flags)
    tiny = flags.device == "cpu"
    if not tiny:
        return _measured(flags, tiny)
    with triton_interpreter.triton_on_cpu():
        return _measured(flags, tiny)


def _check(flags: Flags) -> None:
    if flags.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--suite gpu measures on a GPU and none was found; --device cpu with TRITON_INTERPRET=1 rehearses it"
        )
    if (os.environ.get("TRITON_INTERPRET") == "1") != (flags.device == "cpu"):
        raise UsageError("TRITON_INTERPRET=1 goes with --device cpu, and only with it")


def _measured(flags: Flags, tiny: bool) -> dict[str, Any]:
    began = time.monotonic()
    deadline = began + flags.seconds
    device = flags.device
    dtype = torch.float32 if tiny else torch.bfloat16
    size = grid.TINY if tiny else grid.FULL
    peak = grid.bandwidth(device, size)
    found, late = checks.run(device, tiny, began + flags.seconds / 2)
    decode: dict[str, Any] = {}
    for shape in shapes.TINY if tiny else shapes.FULL:
        model = shapes.random_model(shape, device, dtype)
        decode[shape.name] = dict(grid.grid(model, shape, size, peak, device, deadline))
        del model
        if not tiny:
            torch.cuda.empty_cache()
    return {
        "suite": "gpu",
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else "cpu, in Triton's interpreter",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "paths": {
            "decode": "split-KV with packed heads (Triton)",
            "prefill": prefill_kernel(dtype) if device == "cuda" else "the CPU's",
        },
        "checks": found,
        "checks_failed": [name for name, check in found.items() if not check["ok"]],
        "checks_without_time": late,
        "read_bytes_per_s": peak,
        "decode": decode,
        "seconds": time.monotonic() - began,
    }
