"""Whether a plan's memory terms are what an engine takes: one model and load per term, run with all
slots full, each in a process of its own.

`peak` is what tensors held at most, weights included, by the allocator's own account; `predicted`
the plan's total; `ratio` predicted over peak. `resident` is the process's resident memory beyond
that before the model was made; on a CPU it counts large pages whole, and what the C library
keeps."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.table import Table

from jobs.suites.memory.cases import Case, CaseRun, case_prompts, cases
from jobs.suites.memory.meter import resident_peak, tensors_peak
from jobs.suites.shared.flags import parse_suite_flags
from jobs.suites.shared.process_memory import resident_bytes
from jobs.suites.shared.tables import figures_table, stderr_console
from jobs.suites.shared.timing import Stopwatch
from pipeline.command_line import flag
from pipeline.records import UsageError
from std_core.cost_model.memory import peak_memory

TOLERANCE = 0.1  # of the measured peak, by which the predicted one may differ
COLUMNS = (
    "case", "slots", "context", "peak_mb", "predicted_mb", "ratio", "resident_mb", "terms",
)  # fmt: skip


@dataclass(frozen=True)
class Flags:
    """The suite's command line."""

    device: str = flag("cpu", "cpu or cuda")
    case: tuple[str, ...] = flag((), "may be given several times; default: all")
    scale: int = flag(2, "factor of the cases' sizes")
    threads: int = flag(1, "CPU threads of PyTorch")


@dataclass(frozen=True)
class CaseFigures:
    """One case; memory in MB. `resident_mb` is None where it was not measured."""

    case: str
    slots: int
    context: int
    peak_mb: float
    predicted_mb: float
    ratio: float
    terms_mb: dict[str, float]
    resident_mb: float | None = None

    @property
    def matches(self) -> bool:
        """Whether the prediction is within the tolerance."""
        return abs(self.ratio - 1) <= TOLERANCE


def run(argv: list[str]) -> dict[str, Any]:
    """Return the suite's figures; progress and the table go to standard error."""
    flags = parse_suite_flags(Flags, argv, "memory", __doc__)
    known = {case.name: case for case in cases(flags.scale)}
    if unknown := set(flags.case) - set(known):
        raise UsageError(f"--case {min(unknown)!r} is none of {', '.join(known)}")
    watch = Stopwatch()
    console = stderr_console(140)
    measured: list[CaseFigures] = []
    for name in flags.case or known:
        case = replace(known[name], device=flags.device)
        measured.append(_in_new_process(case, flags.threads))
        console.log(_progress(measured[-1]))
    console.print(table(measured))
    found: dict[str, Any] = {
        "cases": [asdict(figures) for figures in measured],
        "seconds": round(watch.seconds, 1),
    }
    wrong = [f"{figures.case} {figures.ratio}" for figures in measured if not figures.matches]
    if wrong:
        found["failed"] = (
            f"predicted over measured peak is off by over {TOLERANCE}: {', '.join(wrong)}"
        )
    return found


def _in_new_process(case: Case, threads: int) -> CaseFigures:
    """Measure in a process that has allocated nothing yet."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as executor:
        return executor.submit(measure_with_resident, case, threads).result()


def measure_with_resident(case: Case, threads: int = 1) -> CaseFigures:
    """One case's figures, resident memory included."""
    torch.set_num_threads(threads)
    prompts = case_prompts(case)
    before = resident_bytes()
    case_run = CaseRun(case, prompts)
    # first, and without the profiler, whose records are resident too
    resident = resident_peak(case_run.run) - before
    return replace(measure(case, case_run), resident_mb=_mb(resident))


def measure(case: Case, case_run: CaseRun) -> CaseFigures:
    """What was predicted and what tensors held."""
    terms = case.memory_breakdown()
    predicted = peak_memory(terms)
    peak = case_run.weights + tensors_peak(case_run.run, case.device)
    return CaseFigures(
        case=case.name,
        slots=case.slots,
        context=case.longest.context,
        peak_mb=_mb(peak),
        predicted_mb=_mb(predicted),
        ratio=round(predicted / peak, 3),
        terms_mb={name: _mb(size) for name, size in terms.items() if size},
    )


def table(measured: list[CaseFigures]) -> Table:
    """The figures, for people; terms of 1 MB and more."""
    rows = []
    for figures in measured:
        large = [f"{name} {size}" for name, size in figures.terms_mb.items() if size >= 1]
        rows.append({**asdict(figures), "terms": ", ".join(large)})
    return figures_table("memory", COLUMNS, rows)


def _progress(figures: CaseFigures) -> str:
    fields = asdict(figures)
    del fields["terms_mb"]
    return " ".join(f"{name} {value}" for name, value in fields.items())


def _mb(size: float) -> float:
    return round(size / 1e6, 1)
