"""Whether the plan's choice of a draft is the right one: over a mix of cells (context, slots,
length of the answer, greedy or drawn) the dense loop, every fixed setting and the scheduler's
choice, in turn, in one process. JSON comes last.

A cell is a wave as a run has it: more requests than slots, which are filled again as rows finish,
through the engine; the scheduler's with its gamma schedule. Its time is that of all rounds,
and what a draft costs once per row; vision and prefill, which are the same whatever drafts, are
done before. The oracle is chosen on every second turn and timed, as all others are, on the rest.
Where no setting is far from the best of each cell, or few are ever the best, there is nothing to
choose and the suite says so. Calibration runs in a process of its own, at contexts that are none of
the cells'."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from jobs.calibration import measure
from jobs.suites.acceptance import subjects
from jobs.suites.acceptance.subjects import Subject
from jobs.suites.shared.paired_timing import ratio
from pipeline.command_line import (
    parse_flags,
)
from pipeline.plan.choose import DEFAULT_LENGTHS, DraftPlanner
from pipeline.plan.dryrun import describe_draft
from pipeline.plan.history import History
from pipeline.plan.profile_file import read_profile
from pipeline.plan.settings import WaveConfig, WaveSummary
from pipeline.records import DraftOption, UsageError
from std_core.cost_model.memory import LongestRequest
from std_core.cost_model.profile import Profile, TextLength
from std_core.engine.engine import Engine
from std_core.types import Draft, Request, Result

# below which a mix tells nothing
WINNERS = 3
HEADROOM = 1.08
CELLS = 12
APART = 1.4  # factor by which calibrated contexts differ from the cells'


@dataclass(frozen=True)
class Flags:
    """The command line."""

    model: str = "demo"
    device: str = "cpu"
    dtype: str = "float32"
    contexts: str = "512,4096,16384"
    rows: str = "1,8"
    answers: str = (
        "16,160"  # their tokens; with a `d` behind them such as are drawn at temperature 1
    )
    drafts: str = "std,int8,int4,ngram"
    gammas: str = "2,5"  # of the fixed settings
    turns: int = 4  # of all settings in a cell
    texts: int = 8  # of a cell, at the least: how much is accepted differs from one to another
    fills: int = 3  # requests of a cell for each slot, at the least
    threads: int = 2
    profile: str = ""  # calibrated here if not given


@dataclass
class Timed:
    """A setting's waves in a cell, turn by turn, in seconds: all rounds, and each request's way
    into its slot."""

    rounds: list[float] = field(default_factory=list)
    arrivals: list[list[float]] = field(default_factory=list)

    def add(self, results: Sequence[Result]) -> None:
        self.rounds.append(sum(r.decode_s for r in results))
        self.arrivals.append([r.prefill_s for r in results])

    @property
    def once(self) -> float:
        """Seconds of a request on its way, median."""
        return statistics.median(itertools.chain.from_iterable(self.arrivals))


@dataclass(frozen=True)
class Answer:
    """Its tokens at most, and whether they are drawn, not greedy."""

    length: int
    drawn: bool = False


@dataclass(frozen=True)
class Cell:
    """What was timed, and what the scheduler had said.

    Args:
        count: requests.
        plan: waves of the scheduler's choice; those of the dense loop where that is it.
    """

    context: int
    rows: int
    answer: Answer
    count: int
    times: dict[Draft | None, Timed]
    ways: tuple[DraftOption, ...]
    plan: Timed

    def seconds(self, timed: Timed, turn: int) -> float:
        """Of a wave, by the turns of one parity."""
        return statistics.median(timed.rounds[turn::2]) + self.once(timed)

    def fixed(self, draft: Draft | None, turn: int) -> float:
        return self.seconds(self.times[draft], turn)

    def once(self, timed: Timed) -> float:
        """Of all requests, beyond what it is without a draft."""
        return self.count * max(0.0, timed.once - self.times[None].once)

    def speedup(self) -> tuple[float, float]:
        """Of the scheduler's choice over the dense loop, one-time costs included: median and 95%
        lower bound."""
        if self.ways[0].draft is None:
            return 1.0, 1.0
        return ratio(
            self.times[None].rounds,
            [seconds + self.once(self.plan) for seconds in self.plan.rounds],
        )


def run(argv: list[str]) -> dict[str, Any]:
    """The suite's figures; the table goes to standard error."""
    flags: Flags = parse_flags(Flags, argv, "benchmark.py --suite schedule")
    contexts, rows = (
        measure.parse_numbers(name, getattr(flags, name)) for name in ("contexts", "rows")
    )
    answers = _answers(flags.answers)
    gammas = measure.parse_numbers("gammas", flags.gammas)
    if len(contexts) * len(rows) * len(answers) > CELLS or flags.turns < 2:
        raise UsageError(f"at most {CELLS} cells and at least 2 turns are needed")
    began = time.monotonic()
    console = Console(stderr=True, width=160)
    torch.set_num_threads(flags.threads)
    profile = _profile(flags, contexts, rows)
    fixed = [
        replace(draft, gamma=gamma)
        for draft in measure.parse_drafts(flags.drafts)
        for gamma in gammas
    ]
    with tempfile.TemporaryDirectory() as folder:
        engine = subjects.engine_of(
            flags.model, Path(folder), flags.threads, dtype=flags.dtype, device=flags.device
        )
    cells: list[Cell] = []
    for context in contexts:
        cells += _cells(engine, flags, context, rows, answers=answers, fixed=fixed, profile=profile)
        console.print(table(cells, fixed))
    return {
        "model": flags.model,
        **count_accepted_rejected(cells, [None, *fixed]),
        "seconds": round(time.monotonic() - began, 1),
    }


def _answers(text: str) -> list[Answer]:
    """Of the flag. Raises UsageError."""
    words = [word.strip() for word in text.split(",")]
    lengths = measure.parse_numbers("answers", ",".join(word.removesuffix("d") for word in words))
    return [Answer(length, word.endswith("d")) for length, word in zip(lengths, words, strict=True)]


def _profile(flags: Flags, contexts: Sequence[int], rows: Sequence[int]) -> Profile:
    """Given, or calibrated in a process of its own."""
    if flags.profile:
        return read_profile(flags.profile)
    grid = sorted({round(n / APART) for n in contexts} | {round(contexts[0] * APART)})
    with tempfile.TemporaryDirectory() as folder:
        words = {"output": f"{folder}/profile.json", "contexts": grid, "rows": rows}
        words |= {
            name: getattr(flags, name) for name in ("model", "device", "dtype", "drafts", "threads")
        }
        listed = {
            k: ",".join(map(str, v)) if isinstance(v, (list, tuple)) else v
            for k, v in words.items()
        }
        script = Path(__file__).resolve().parent.parent / "calibrate.py"
        done = subprocess.run(
            [sys.executable, str(script), *(f"--{name}={value}" for name, value in listed.items())],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UsageError(f"calibration ended with {done.returncode}")
        print(json.loads(done.stdout.splitlines()[-1]), file=sys.stderr)
        return read_profile(f"{folder}/profile.json")


def _cells(
    engine: Engine,
    flags: Flags,
    context: int,
    rows: Sequence[int],
    answers: Sequence[Answer],
    fixed: Sequence[Draft],
    profile: Profile,
) -> Iterator[Cell]:
    """Of one context, whose texts or clips are prefilled once for all."""
    longest = max(answer.length for answer in answers)
    texts = max(flags.texts, *rows)
    whole = subjects.subject(
        engine.checkpoint, context, range(texts), longest, step=0, scenes=(12,)
    )
    known = replace(engine, max_num_seqs=1, prefixes=subjects.prefix_store(engine, texts))
    for draft in (None, *fixed):  # sees and prefills all texts, packs weights
        list(known.run(subjects.cut(subjects.of_kind(whole, "caption"), 2), draft, whole.prepare))
    for count in rows:
        for answer in answers:
            yield _cell(
                replace(known, max_num_seqs=count),
                flags,
                context,
                answer,
                whole=whole,
                fixed=fixed,
                profile=profile,
            )


def _cell(
    engine: Engine,
    flags: Flags,
    context: int,
    answer: Answer,
    whole: Subject,
    fixed: Sequence[Draft],
    profile: Profile,
) -> Cell:
    """All settings in turn; what the scheduler chooses is settled once it is known how long answers
    are."""
    kind = "question" if answer.length <= DEFAULT_LENGTHS["question"] else "caption"
    asked = _asked(
        subjects.cut(subjects.of_kind(whole, kind), answer.length),
        engine.max_num_seqs,
        answer,
        flags,
    )
    times: dict[Draft | None, Timed] = {draft: Timed() for draft in (None, *fixed)}
    dense = list(engine.run(asked, None, whole.prepare))
    ways = _ways(engine.max_num_seqs, dense, kind, answer, profile=profile)
    chosen = ways[0]
    plan = times[None] if ways[0].draft is None else Timed()
    for _ in range(flags.turns):
        for draft, timed in times.items():
            timed.add(list(engine.run(asked, draft, whole.prepare)))
        if chosen.draft is not None:
            scheduled = [chosen.gamma_schedule, *asked]
            plan.add(list(engine.run(scheduled, chosen.widest_draft, whole.prepare)))
    return Cell(
        context,
        rows=engine.max_num_seqs,
        answer=answer,
        count=len(asked),
        times=times,
        ways=ways,
        plan=plan,
    )


def _asked(requests: Sequence[Request], rows: int, answer: Answer, flags: Flags) -> list[Request]:
    """Every text equally often, until each slot has been filled often enough."""
    some = requests[: max(flags.texts, rows)]
    every = [*some] * math.ceil(flags.fills * rows / len(some))
    return subjects.drawn(every) if answer.drawn else every


def _ways(
    rows: int, dense: Sequence[Result], kind: str, answer: Answer, profile: Profile
) -> tuple[DraftOption, ...]:
    """What the scheduler makes of a cell whose answers' lengths it knows."""
    count = len(dense)
    config = WaveConfig(
        rows, max_tokens=answer.length, sampling_mode="seeded" if answer.drawn else "greedy"
    )
    visual = statistics.fmean(r.num_visual_tokens for r in dense)
    context = visual + statistics.fmean(r.num_prompt_tokens for r in dense)
    longest = LongestRequest(
        round(context), round(visual), answer.length, sampling=config.sampling_mode
    )
    wave = WaveSummary(
        count, context=context, visual=visual, videos=count, longest=longest, kinds=((kind, count),)
    )
    length = statistics.fmean(len(result.token_ids) for result in dense)
    known = replace(profile, text_lengths=(TextLength(kind, length),))
    return DraftPlanner(known, History(), config).options(wave, wave_index=0)


# ---------------------------------------------------------------------------------------- judgement


def count_accepted_rejected(
    cells: Sequence[Cell], settings: Sequence[Draft | None]
) -> dict[str, Any]:
    """Figures over all cells; `failed` says so where one setting is as good as any choice."""
    oracle = [min(settings, key=lambda draft: cell.fixed(draft, 1)) for cell in cells]
    best = {draft: sum(cell.fixed(draft, 0) / cell.count for cell in cells) for draft in settings}
    fixed, least = min(best.items(), key=lambda item: item[1])
    by_oracle = sum(
        cell.fixed(draft, 0) / cell.count for cell, draft in zip(cells, oracle, strict=True)
    )
    by_plan = sum(cell.seconds(cell.plan, 0) / cell.count for cell in cells)
    winners = len(set(oracle))
    headroom = least / by_oracle
    return {
        "predicted_vs_measured": _errors(cells),
        "scheduler_vs_best_fixed": round(least / by_plan, 3),
        "scheduler_vs_oracle": round(by_oracle / by_plan, 3),
        "best_fixed": describe_draft(fixed),
        "oracle_winners": winners,
        "oracle_vs_best_fixed": round(headroom, 3),
        "failed": _uninformative(winners, headroom),
        "cells": [_row(cell, winner) for cell, winner in zip(cells, oracle, strict=True)],
    }


def _uninformative(winners: int, headroom: float) -> str | None:
    """Why the cells tell nothing of a scheduler; None if they do."""
    if winners >= WINNERS and headroom >= HEADROOM:
        return None
    return (
        f"the cells are uninformative: {winners} settings are the best of some cell ({WINNERS} are needed), and the "
        f"best of each is {headroom:.3f} times as fast as the best throughout ({HEADROOM} is needed)"
    )


def _errors(cells: Sequence[Cell]) -> dict[str, float]:
    """Relative errors of what was predicted of every wave, densely and as chosen."""
    found = []
    for cell in cells:
        for way in cell.ways:
            if way.draft is None or way is cell.ways[0]:
                measured = cell.seconds(cell.plan if way is cell.ways[0] else cell.times[None], 0)
                found.append(abs(way.seconds_per_request * cell.count - measured) / measured)
    found.sort()
    return {
        "median": round(statistics.median(found), 4),
        "p90": round(found[min(len(found) - 1, math.ceil(0.9 * len(found)) - 1)], 4),
    }


def _row(cell: Cell, oracle: Draft | None) -> dict[str, Any]:
    median, low = cell.speedup()
    return {
        "context": cell.context,
        "rows": cell.rows,
        "length": cell.answer.length,
        "drawn": cell.answer.drawn,
        "chosen": describe_draft(cell.ways[0].draft),
        "oracle": describe_draft(oracle),
        "requests": cell.count,
        "predicted_s": round(cell.ways[0].seconds_per_request * cell.count, 4),
        "measured_s": round(cell.seconds(cell.plan, 0), 4),
        "dense_s": round(cell.fixed(None, 0), 4),
        "speedup": round(median, 3),
        "speedup_low": round(low, 3),
    }


def table(cells: Sequence[Cell], fixed: Sequence[Draft]) -> Table:
    """For people: seconds of each wave."""
    found = Table(
        "context",
        "rows",
        "length",
        "dense",
        *map(describe_draft, fixed),
        "scheduler",
        title="seconds of a wave",
    )
    for cell in cells:
        each = [f"{cell.fixed(draft, 0):.3f}" for draft in (None, *fixed)]
        choice = f"{describe_draft(cell.ways[0].draft)} {cell.seconds(cell.plan, 0):.3f}"
        found.add_row(
            str(cell.context),
            str(cell.rows),
            f"{cell.answer.length}{' drawn' * cell.answer.drawn}",
            *each,
            choice,
        )
    return found
