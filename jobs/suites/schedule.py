"""Whether the plan's choice of a draft is the right one: over a mix of cells (context, slots, length of the answer,
greedy or drawn) the dense loop, every fixed setting and the scheduler's choice, in turn, in one process. JSON comes
last.

A cell's time is that of one wave that fills the slots once: what a draft costs once per row, and its loop, until each
row has its tokens. The oracle is chosen on every second segment and timed, as all others are, on the rest. Where no
setting is far from the best of each cell, or few are ever the best, there is nothing to choose and the suite says so.
Calibration runs in a process of its own, at contexts that are none of the cells'.
"""

from __future__ import annotations

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

import acceptance_subjects as subjects
import calibration
from acceptance_subjects import Subject
from decode_pairs import Clock, Pair, ratio
from pipeline.choice import choose
from pipeline.config import parse_flags
from pipeline.dryrun import name_of
from pipeline.history import History
from pipeline.profile import read_profile
from pipeline.setting import Mix, Setting
from pipeline.types import Candidate, UsageError
from std_core.engine import Engine
from std_core.memory import Load
from std_core.profile import Profile
from std_core.types import Draft

WINNERS, HEADROOM = 3, 1.08  # below which a mix tells nothing
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
    answers: str = "16,160"  # their tokens; with a `d` behind them such as are drawn at temperature 1
    drafts: str = "std,int8,int4,ngram"
    gammas: str = "2,5"  # of the fixed settings
    tokens: int = 16  # of a segment
    pairs: int = 8
    texts: int = 4  # that a cell is timed on, at the least: how much is accepted differs from one to another
    threads: int = 2
    profile: str = ""  # calibrated here if not given


@dataclass
class Timed:
    """A setting in a cell, in seconds: once per row, and per token of every segment, dense and drafted in turn."""

    once: float = 0.0
    dense: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)

    @classmethod
    def mean(cls, each: Sequence[Timed]) -> Timed:
        """Of several batches, segment by segment."""
        dense, drafted = (
            [statistics.fmean(x) for x in zip(*lists, strict=True)]
            for lists in ([t.dense for t in each], [t.drafted for t in each])
        )
        return cls(statistics.fmean(t.once for t in each), dense, drafted)


@dataclass(frozen=True)
class Answer:
    """Its tokens, and whether they are drawn, not greedy."""

    length: int
    drawn: bool = False


@dataclass(frozen=True)
class Cell:
    """What was timed, and what the scheduler had said."""

    context: int
    rows: int
    answer: Answer
    times: dict[Draft | None, Timed]
    ways: tuple[Candidate, ...]

    def seconds(self, draft: Draft | None, turn: int) -> float:
        """Of a wave, by the segments of one parity."""
        if draft is None:
            return statistics.median(x for t in self.times.values() for x in t.dense[turn::2]) * self.answer.length
        timed = self.times[draft]
        return timed.once * self.rows + statistics.median(timed.drafted[turn::2]) * self.answer.length

    def speedup(self, draft: Draft | None) -> tuple[float, float]:
        """Over the dense loop beside it, one-time costs included: median and 95% lower bound."""
        if draft is None:
            return 1.0, 1.0
        timed = self.times[draft]
        added = timed.once * self.rows / self.answer.length
        return ratio(timed.dense, [seconds + added for seconds in timed.drafted])


def run(argv: list[str]) -> dict[str, Any]:
    """The suite's figures; the table goes to standard error."""
    flags: Flags = parse_flags(Flags, argv, "benchmark.py --suite schedule")
    contexts, rows = (calibration.numbers(name, getattr(flags, name)) for name in ("contexts", "rows"))
    answers, gammas = _answers(flags.answers), calibration.numbers("gammas", flags.gammas)
    if len(contexts) * len(rows) * len(answers) > CELLS or flags.pairs < 2:
        raise UsageError(f"at most {CELLS} cells and at least 2 pairs are needed")
    began, console = time.monotonic(), Console(stderr=True, width=160)
    torch.set_num_threads(flags.threads)
    profile = _profile(flags, contexts, rows)
    fixed = [replace(draft, gamma=gamma) for draft in calibration.presets(flags.drafts) for gamma in gammas]
    with tempfile.TemporaryDirectory() as folder:
        engine = subjects.engine_of(flags.model, Path(folder), flags.threads, dtype=flags.dtype, device=flags.device)
    cells: list[Cell] = []
    for context in contexts:
        for count in rows:
            cells += _cells(replace(engine, max_num_seqs=count, prefixes=None), flags, context, answers, fixed, profile)
    console.print(table(cells, fixed))
    return {"model": flags.model, **judged(cells, [None, *fixed]), "seconds": round(time.monotonic() - began, 1)}


def _answers(text: str) -> list[Answer]:
    """Of the flag. Raises UsageError."""
    words = [word.strip() for word in text.split(",")]
    lengths = calibration.numbers("answers", ",".join(word.removesuffix("d") for word in words))
    return [Answer(length, word.endswith("d")) for length, word in zip(lengths, words, strict=True)]


def _profile(flags: Flags, contexts: Sequence[int], rows: Sequence[int]) -> Profile:
    """Given, or calibrated in a process of its own."""
    if flags.profile:
        return read_profile(flags.profile)
    grid = sorted({round(n / APART) for n in contexts} | {round(contexts[0] * APART)})
    with tempfile.TemporaryDirectory() as folder:
        words = {"output": f"{folder}/profile.json", "contexts": grid, "rows": rows}
        words |= {name: getattr(flags, name) for name in ("model", "device", "dtype", "drafts", "threads")}
        listed = {k: ",".join(map(str, v)) if isinstance(v, (list, tuple)) else v for k, v in words.items()}
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
    engine: Engine, flags: Flags, context: int, answers: Sequence[Answer], fixed: Sequence[Draft], profile: Profile
) -> Iterator[Cell]:
    """One batch and context, and every answer: the same segments serve all lengths."""
    widest = max(draft.gamma for draft in fixed) + 12
    room = (flags.pairs + 1) * (flags.tokens + widest) + 2
    rows = engine.max_num_seqs
    count = rows * -(-flags.texts // rows)
    whole = subjects.captions_of(subjects.subject(engine.checkpoint, context, range(count), room, step=0, scenes=(12,)))
    batches = [replace(whole, requests=whole.requests[at : at + rows]) for at in range(0, count, rows)]
    inputs = [whole.prepare(request) for request in whole.requests]
    prompt, visual = (
        statistics.fmean(len(x) for x in each) for each in ([i.ids[0] for i in inputs], [i.selectable for i in inputs])
    )
    for drawn in sorted({answer.drawn for answer in answers}):
        ways = {one: _ways(rows, prompt, visual, one, profile) for one in answers if one.drawn == drawn}
        chosen = (found[0].draft for found in ways.values())
        drafts = list(dict.fromkeys([*fixed, *(draft for draft in chosen if draft)]))
        asked = [replace(one, requests=subjects.drawn(one.requests)) for one in batches] if drawn else batches
        each = [_times(engine, one, drafts, flags) for one in asked]
        times = {draft: Timed.mean([times[draft] for times in each]) for draft in each[0]}
        yield from (Cell(context, rows, one, times, found) for one, found in ways.items())


def _times(engine: Engine, asked: Subject, drafts: Sequence[Draft], flags: Flags) -> dict[Draft | None, Timed]:
    """All drafts in turn, the dense loop beside each."""
    Pair(engine, asked.requests, asked.prepare, calibration.PLAIN)  # sees and prefills what all share
    known = Pair(engine, asked.requests, asked.prepare, calibration.PLAIN).prefill_s
    pairs = {}
    for draft in drafts:
        Pair(engine, asked.requests, asked.prepare, draft)  # packs weights
        pairs[draft] = Pair(engine, asked.requests, asked.prepare, draft, each=True)
    for turn in range(flags.pairs + 1):
        for pair in pairs.values():
            if turn == 1:
                pair.dense, pair.drafted = Clock(), Clock()
            pair.once(flags.tokens)
    rows = engine.max_num_seqs
    return {
        draft: Timed(max(0.0, pair.prefill_s - known) / rows, pair.dense.per_token, pair.drafted.per_token)
        for draft, pair in pairs.items()
    }


def _ways(rows: int, context: float, visual: float, answer: Answer, profile: Profile) -> tuple[Candidate, ...]:
    """What the scheduler makes of a cell whose answers' lengths it knows."""
    setting = Setting(rows, max_tokens=answer.length, draws="seeded" if answer.drawn else "greedy")
    longest = Load(round(context), round(visual), answer.length, draws=setting.draws)
    mix = Mix(rows, context, visual, rows, longest, (("caption", rows),))
    known = replace(profile, lengths=(("caption", float(answer.length)),))
    return choose(mix, known, History(), setting, 0)


# --------------------------------------------------------------------------------------------------------- judgement


def judged(cells: Sequence[Cell], settings: Sequence[Draft | None]) -> dict[str, Any]:
    """Figures over all cells; `failed` says so where one setting is as good as any choice."""
    oracle = [min(settings, key=lambda draft: cell.seconds(draft, 1)) for cell in cells]
    best = {draft: sum(cell.seconds(draft, 0) / cell.rows for cell in cells) for draft in settings}
    fixed, least = min(best.items(), key=lambda item: item[1])
    by_oracle = sum(cell.seconds(draft, 0) / cell.rows for cell, draft in zip(cells, oracle, strict=True))
    by_plan = sum(cell.seconds(cell.ways[0].draft, 0) / cell.rows for cell in cells)
    winners, headroom = len(set(oracle)), least / by_oracle
    return {
        "predicted_vs_measured": _errors(cells),
        "scheduler_vs_best_fixed": round(least / by_plan, 3),
        "scheduler_vs_oracle": round(by_oracle / by_plan, 3),
        "best_fixed": name_of(fixed),
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
                measured = cell.seconds(way.draft, 0)
                found.append(abs(way.seconds * cell.rows - measured) / measured)
    found.sort()
    return {
        "median": round(statistics.median(found), 4),
        "p90": round(found[min(len(found) - 1, math.ceil(0.9 * len(found)) - 1)], 4),
    }


def _row(cell: Cell, oracle: Draft | None) -> dict[str, Any]:
    chosen = cell.ways[0].draft
    median, low = cell.speedup(chosen)
    return {
        "context": cell.context,
        "rows": cell.rows,
        "length": cell.answer.length,
        "drawn": cell.answer.drawn,
        "chosen": name_of(chosen),
        "oracle": name_of(oracle),
        "predicted_s": round(cell.ways[0].seconds * cell.rows, 4),
        "measured_s": round(cell.seconds(chosen, 0), 4),
        "dense_s": round(cell.seconds(None, 0), 4),
        "speedup": round(median, 3),
        "speedup_low": round(low, 3),
    }


def table(cells: Sequence[Cell], fixed: Sequence[Draft]) -> Table:
    """For people: seconds of each wave."""
    found = Table("context", "rows", "length", "dense", *map(name_of, fixed), "scheduler", title="seconds of a wave")
    for cell in cells:
        chosen = cell.ways[0].draft
        each = [f"{cell.seconds(draft, 0):.3f}" for draft in (None, *fixed)]
        choice = f"{name_of(chosen)} {cell.seconds(chosen, 0):.3f}"
        found.add_row(
            str(cell.context), str(cell.rows), f"{cell.answer.length}{' drawn' * cell.answer.drawn}", *each, choice
        )
    return found
