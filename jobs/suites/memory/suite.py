"""Whether a plan's terms are what an engine takes of memory: one model and load for each term, run
with all slots full, each in a process of its own.

`peak` is what tensors held at most, weights among them, by the allocator's own account; `predicted`
the plan's total, `ratio` of the two. `resident` is what the process had more than before the model
was made; on a CPU that counts large pages whole, and what the C library keeps."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from jobs.suites.memory.cases import Case, Subject, cases, prompts_of
from jobs.suites.memory.meter import resident, resident_peak, tensors_peak
from pipeline.command_line import (
    parse_flags,
)
from pipeline.records import UsageError
from std_core.cost_model.memory import peak_memory

OFF = 0.1  # of the measured peak that the predicted one may be off


@dataclass(frozen=True)
class Flags:
    """The suite's command line."""

    device: str = "cpu"
    case: tuple[str, ...] = ()  # all if not given
    scale: int = 2  # of the cases' sizes
    threads: int = 1


def run(argv: list[str]) -> dict[str, Any]:
    """The suite's figures; the table goes to standard error."""
    flags: Flags = parse_flags(Flags, argv, "benchmark.py --suite memory")
    known = {case.name: case for case in cases(flags.scale)}
    if unknown := set(flags.case) - set(known):
        raise UsageError(f"--case {min(unknown)!r} is none of {', '.join(known)}")
    began = time.monotonic()
    console = Console(stderr=True, width=140)
    rows = []
    for name in flags.case or known:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context) as alone:
            case = replace(known[name], device=flags.device)
            rows.append(alone.submit(measured, case, flags.threads).result())
        console.log(
            " ".join(
                f"{key} {value}" for key, value in rows[-1].items() if not isinstance(value, dict)
            )
        )
    console.print(table(rows))
    found = {"cases": rows, "seconds": round(time.monotonic() - began, 1)}
    wrong = [f"{row['case']} {row['ratio']}" for row in rows if abs(row["ratio"] - 1) > OFF]
    return found | (
        {"failed": f"predicted over measured peak is off by over {OFF}: {', '.join(wrong)}"}
        if wrong
        else {}
    )


def measured(case: Case, threads: int = 1) -> dict[str, Any]:
    """One case's figures, in MB, in a process that has measured nothing yet."""
    torch.set_num_threads(threads)
    prompts = prompts_of(case)
    before = resident()
    subject = Subject(case, prompts)
    most = resident_peak(subject.run) - before  # without the profiler, which keeps records
    return figures(case, subject) | {"resident_mb": _mb(most)}


def figures(case: Case, subject: Subject) -> dict[str, Any]:
    """What was predicted and what tensors held."""
    found = case.memory_breakdown()
    peak = subject.weights + tensors_peak(subject.run, case.device)
    return {
        "case": case.name,
        "slots": case.slots,
        "context": case.load.context,
        "peak_mb": _mb(peak),
        "predicted_mb": _mb(peak_memory(found)),
        "ratio": round(peak_memory(found) / peak, 3),
        "terms_mb": {name: _mb(size) for name, size in found.items() if size},
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """For people; the same figures."""
    columns = ["case", "slots", "context", "peak_mb", "predicted_mb", "ratio", "resident_mb"]
    found = Table(*columns, "terms", title="memory")
    for row in rows:
        terms = ", ".join(f"{name} {size}" for name, size in row["terms_mb"].items() if size >= 1)
        found.add_row(*(str(row[name]) for name in columns), terms)
    return found


def _mb(size: float) -> float:
    return round(size / 1e6, 1)
