"""Whether the planner chooses the right draft. Over a grid of cells (context, slots, length of the
answer, greedy or sampled), the dense loop, every fixed draft and the planner's choice take turns in
one process.

A cell is a wave as a run has it: more requests than slots, which are refilled as rows finish. The
planner's choice runs with its gamma schedule. A wave's time is that of all its rounds, plus a
draft's one-time cost per request; vision and prefill, which are the same for all drafts, are done
before. The oracle is chosen on every second turn; it and all others are timed on the other turns.

Where no draft is far from the best of each cell, or only few are ever the best, there is nothing to
choose: the suite then fails. Calibration runs in a process of its own, at contexts that no cell
has."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from jobs.calibration import agreement
from jobs.suites.shared import workload
from jobs.suites.shared.flags import (
    EngineFlags,
    parse_drafts,
    parse_numbers,
    parse_suite_flags,
)
from jobs.suites.shared.tables import figures_table, stderr_console
from jobs.suites.shared.timing import RatioEstimate, Stopwatch, paired_ratio
from jobs.suites.shared.workload import Workload
from pipeline.command_line import flag
from pipeline.config import ROOT
from pipeline.plan.choose import DEFAULT_LENGTHS, DraftPlanner
from pipeline.plan.history import History
from pipeline.plan.profile_file import read_profile
from pipeline.plan.reason import describe_draft
from pipeline.plan.settings import WaveConfig, WaveSummary
from pipeline.records import DraftOption, UsageError
from std_core.cost_model.memory import LongestRequest
from std_core.cost_model.profile import Profile, TextLength
from std_core.engine.engine import Engine
from std_core.types import Draft, Request, Result

# a grid that has less than these cannot tell a good planner from a bad one
MIN_WINNERS = 3  # drafts that are the best of some cell
MIN_HEADROOM = 1.08  # speed of the oracle over the best fixed draft
MAX_CELLS = 12
MIN_TURNS = 2
CONTEXT_FACTOR = 1.4  # by which calibrated contexts differ from the cells'
SCENES = 12  # of a clip
# turns by parity: the oracle is chosen on one half and timed on the other
TIMED = 0
CHOOSING = 1


@dataclass(frozen=True)
class Flags(EngineFlags):
    """The suite's command line."""

    contexts: str = flag("512,4096,16384", "tokens of a prompt; of a Video-LLM, visual tokens")
    rows: str = flag("1,8", "slots")
    answers: str = flag("16,160", "their tokens; `160d` is sampled at temperature 1, else greedy")
    drafts: str = flag("std,int8,int4,ngram", "presets of conf/draft")
    gammas: str = flag("2,5", "γ of the fixed drafts")
    turns: int = flag(4, "waves of each draft in a cell")
    texts: int = flag(8, "different texts of a cell, at least: acceptance differs between texts")
    fills: int = flag(3, "requests of a cell per slot, at least")
    profile: str = flag("", "device profile; default: calibrate now")


@dataclass(frozen=True)
class AnswerSpec:
    """`length`: tokens at most; `sampled`: at temperature 1, not greedy."""

    length: int
    sampled: bool = False


@dataclass(frozen=True)
class WaveGrid:
    """What is measured: a cell for each context, number of slots and answer."""

    contexts: list[int]
    slots: list[int]
    answers: list[AnswerSpec]
    fixed: list[Draft]

    @property
    def cells(self) -> int:
        return len(self.contexts) * len(self.slots) * len(self.answers)

    @property
    def settings(self) -> list[Draft | None]:
        """The dense loop and the fixed drafts."""
        return [None, *self.fixed]


@dataclass
class WaveTimes:
    """Seconds of one setting's waves in a cell, turn by turn.

    Args:
        rounds: all rounds of a wave.
        admissions: of each request, prefill and the draft's one-time work.
    """

    rounds: list[float] = field(default_factory=list)
    admissions: list[list[float]] = field(default_factory=list)

    def add(self, results: Sequence[Result]) -> None:
        self.rounds.append(sum(r.decode_s for r in results))
        self.admissions.append([r.prefill_s for r in results])

    @property
    def admission_s(self) -> float:
        """Median of a request's admission."""
        return statistics.median(itertools.chain.from_iterable(self.admissions))


@dataclass(frozen=True)
class WaveCell:
    """A cell's times, and what the planner predicted.

    Args:
        slots: rows that decode together.
        requests: of a wave.
        times: of the dense loop (None) and of each fixed draft.
        options: of the planner, the chosen one first.
        planned: times of the chosen option; those of the dense loop where that is chosen.
    """

    context: int
    slots: int
    answer: AnswerSpec
    requests: int
    times: Mapping[Draft | None, WaveTimes]
    options: tuple[DraftOption, ...]
    planned: WaveTimes

    @property
    def chosen(self) -> DraftOption:
        return self.options[0]

    def one_time_s(self, times: WaveTimes) -> float:
        """Seconds of all admissions beyond those of the dense loop."""
        return self.requests * max(0.0, times.admission_s - self.times[None].admission_s)

    def wave_s(self, times: WaveTimes, parity: int) -> float:
        """Median seconds of a wave over the turns of one parity."""
        return statistics.median(times.rounds[parity::2]) + self.one_time_s(times)

    def fixed_s(self, draft: Draft | None, parity: int = TIMED) -> float:
        return self.wave_s(self.times[draft], parity)

    @property
    def planned_s(self) -> float:
        return self.wave_s(self.planned, TIMED)

    @property
    def oracle(self) -> Draft | None:
        """The best setting on the turns that are not timed."""
        return min(self.times, key=lambda draft: self.fixed_s(draft, CHOOSING))

    def speedup(self) -> RatioEstimate:
        """Of the planner's choice over the dense loop, one-time costs included."""
        if self.chosen.draft is None:
            return RatioEstimate(1.0, 1.0)
        one_time = self.one_time_s(self.planned)
        planned = [seconds + one_time for seconds in self.planned.rounds]
        return paired_ratio(self.times[None].rounds, planned)


def run(argv: list[str]) -> dict[str, Any]:
    """Return the suite's figures; tables go to standard error."""
    flags = parse_suite_flags(Flags, argv, "schedule", __doc__)
    grid = WaveGrid(
        contexts=parse_numbers("contexts", flags.contexts),
        slots=parse_numbers("rows", flags.rows),
        answers=parse_answers(flags.answers),
        fixed=_fixed_drafts(flags),
    )
    if grid.cells > MAX_CELLS or flags.turns < MIN_TURNS:
        raise UsageError(f"at most {MAX_CELLS} cells and at least {MIN_TURNS} turns are needed")
    watch = Stopwatch()
    console = stderr_console(160)
    torch.set_num_threads(flags.threads)
    profile = read_profile(flags.profile) if flags.profile else _calibrate(flags, grid)
    with tempfile.TemporaryDirectory() as folder:
        engine = workload.load_engine(
            flags.model, Path(folder), flags.threads, dtype=flags.dtype, device=flags.device
        )
    cells: list[WaveCell] = []
    for context in grid.contexts:
        cells += _measure_context(engine, flags, grid, context, profile=profile)
        console.print(table(cells, grid.settings))
    return {
        "model": flags.model,
        **summarize(cells, grid.settings),
        "seconds": round(watch.seconds, 1),
    }


def parse_answers(text: str) -> list[AnswerSpec]:
    """Parse `--answers`.

    Raises:
        UsageError: a length is not a whole number above 0.
    """
    words = [word.strip() for word in text.split(",")]
    lengths = parse_numbers("answers", ",".join(word.removesuffix("d") for word in words))
    return [
        AnswerSpec(length, sampled=word.endswith("d"))
        for length, word in zip(lengths, words, strict=True)
    ]


def _fixed_drafts(flags: Flags) -> list[Draft]:
    gammas = parse_numbers("gammas", flags.gammas)
    return [replace(draft, gamma=g) for draft in parse_drafts(flags.drafts) for g in gammas]


def _calibrate(flags: Flags, grid: WaveGrid) -> Profile:
    """Run `calibrate.py` at contexts around those of the cells.

    Raises:
        UsageError: calibration failed.
    """
    contexts = {round(context / CONTEXT_FACTOR) for context in grid.contexts}
    contexts.add(round(grid.contexts[0] * CONTEXT_FACTOR))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/profile.json"
        done = subprocess.run(
            [
                sys.executable,
                str(ROOT / "jobs" / "calibrate.py"),
                f"--output={path}",
                f"--contexts={','.join(map(str, sorted(contexts)))}",
                f"--rows={','.join(map(str, grid.slots))}",
                f"--model={flags.model}",
                f"--device={flags.device}",
                f"--dtype={flags.dtype}",
                f"--drafts={flags.drafts}",
                f"--threads={flags.threads}",
            ],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UsageError(f"calibration ended with exit code {done.returncode}")
        print(json.loads(done.stdout.splitlines()[-1]), file=sys.stderr)
        return read_profile(path)


# ------------------------------------------------------------------------------------------ cells


def _measure_context(
    engine: Engine, flags: Flags, grid: WaveGrid, context: int, *, profile: Profile
) -> Iterator[WaveCell]:
    """The cells of one context; its texts or clips are prefilled once."""
    texts = max(flags.texts, *grid.slots)
    whole = workload.build_workload(
        engine.checkpoint,
        context,
        range(texts),
        max(answer.length for answer in grid.answers),
        stagger=0,
        scene_counts=(SCENES,),
    )
    prefixes = workload.empty_prefix_store(engine, texts)
    warm = replace(engine, max_num_seqs=1, prefixes=prefixes)
    captions = workload.requests_of_kind(whole, "caption")
    short = workload.with_max_tokens(captions, 2)
    for draft in grid.settings:  # fills the prefix store, and packs each draft's weights
        for _ in warm.run(short, draft, whole.prepare):
            pass
    for slots in grid.slots:
        for answer in grid.answers:
            own = replace(warm, max_num_seqs=slots)
            yield _measure_cell(own, flags, grid, context, answer, whole=whole, profile=profile)


def _measure_cell(
    engine: Engine,
    flags: Flags,
    grid: WaveGrid,
    context: int,
    answer: AnswerSpec,
    *,
    whole: Workload,
    profile: Profile,
) -> WaveCell:
    """All settings in turn. A dense wave goes first, so that the planner knows the lengths of the
    answers."""
    slots = engine.max_num_seqs
    kind = "question" if answer.length <= DEFAULT_LENGTHS["question"] else "caption"
    texts = workload.with_max_tokens(workload.requests_of_kind(whole, kind), answer.length)
    requests = _wave_requests(texts, slots, answer, flags)

    def run_wave(wave: Sequence[Any], draft: Draft | None) -> list[Result]:
        return list(engine.run(wave, draft, whole.prepare))

    options = _plan(slots, run_wave(requests, None), kind, answer, profile=profile)
    chosen = options[0]
    times: dict[Draft | None, WaveTimes] = {draft: WaveTimes() for draft in grid.settings}
    planned = times[None] if chosen.draft is None else WaveTimes()
    for _ in range(flags.turns):
        for draft, wave_times in times.items():
            wave_times.add(run_wave(requests, draft))
        if chosen.draft is not None:
            planned.add(run_wave([chosen.gamma_schedule, *requests], chosen.widest_draft))
    return WaveCell(
        context=context,
        slots=slots,
        answer=answer,
        requests=len(requests),
        times=times,
        options=options,
        planned=planned,
    )


def _wave_requests(
    texts: Sequence[Request], slots: int, answer: AnswerSpec, flags: Flags
) -> list[Request]:
    """Every text equally often, until each slot is filled `--fills` times."""
    distinct = texts[: max(flags.texts, slots)]
    repeats = math.ceil(flags.fills * slots / len(distinct))
    requests = [*distinct] * repeats
    return workload.sampled(requests) if answer.sampled else requests


def _plan(
    slots: int, dense: Sequence[Result], kind: str, answer: AnswerSpec, *, profile: Profile
) -> tuple[DraftOption, ...]:
    """The planner's options for a wave whose answers' lengths are known."""
    count = len(dense)
    config = WaveConfig(
        slots, max_tokens=answer.length, sampling_mode="seeded" if answer.sampled else "greedy"
    )
    visual = statistics.fmean(r.num_visual_tokens for r in dense)
    context = visual + statistics.fmean(r.num_prompt_tokens for r in dense)
    longest = LongestRequest(
        round(context), round(visual), answer.length, sampling=config.sampling_mode
    )
    summary = WaveSummary(
        count, context=context, visual=visual, videos=count, longest=longest, kinds=((kind, count),)
    )
    length = statistics.fmean(len(r.token_ids) for r in dense)
    known = replace(profile, text_lengths=(TextLength(kind, length),))
    return DraftPlanner(known, History(), config).options(summary, wave_index=0)


# ---------------------------------------------------------------------------------------- figures


def summarize(cells: Sequence[WaveCell], settings: Sequence[Draft | None]) -> dict[str, Any]:
    """Figures over all cells, per request; `failed` is a sentence where the cells leave nothing to
    choose."""
    fixed_s = {
        draft: sum(cell.fixed_s(draft) / cell.requests for cell in cells) for draft in settings
    }
    best_fixed = min(settings, key=lambda draft: fixed_s[draft])
    oracle_s = sum(cell.fixed_s(cell.oracle) / cell.requests for cell in cells)
    planned_s = sum(cell.planned_s / cell.requests for cell in cells)
    winners = len({cell.oracle for cell in cells})
    headroom = fixed_s[best_fixed] / oracle_s
    return {
        "predicted_vs_measured": _prediction_errors(cells),
        "scheduler_vs_best_fixed": round(fixed_s[best_fixed] / planned_s, 3),
        "scheduler_vs_oracle": round(oracle_s / planned_s, 3),
        "best_fixed": describe_draft(best_fixed),
        "oracle_winners": winners,
        "chosen_keeps": _chosen_keeps(cells),
        "oracle_vs_best_fixed": round(headroom, 3),
        "failed": _uninformative(winners, headroom),
        "cells": [_row(cell) for cell in cells],
    }


def _chosen_keeps(cells: Sequence[WaveCell]) -> list[float]:
    """The different shares of visual entries among the choices that select entries."""
    drafts = [cell.chosen.draft for cell in cells]
    return sorted(
        {draft.keep for draft in drafts if draft is not None and agreement.can_choose_keep(draft)}
    )


def _uninformative(winners: int, headroom: float) -> str | None:
    """Why the cells say nothing about a planner; None if they do."""
    if winners >= MIN_WINNERS and headroom >= MIN_HEADROOM:
        return None
    return (
        f"the cells are uninformative: {winners} settings are the best of some cell "
        f"({MIN_WINNERS} are needed), and the best of each cell is {headroom:.3f} times as fast as "
        f"the best fixed one ({MIN_HEADROOM} is needed)"
    )


def _prediction_errors(cells: Sequence[WaveCell]) -> dict[str, float]:
    """Relative errors of the predicted times: of each cell's dense wave and of the chosen one."""
    errors = []
    for cell in cells:
        for option in cell.options:
            if option is cell.chosen:
                measured = cell.planned_s
            elif option.draft is None:
                measured = cell.fixed_s(None)
            else:
                continue
            errors.append(abs(option.seconds_per_request * cell.requests - measured) / measured)
    errors.sort()
    p90 = errors[min(len(errors) - 1, math.ceil(0.9 * len(errors)) - 1)]
    return {"median": round(statistics.median(errors), 4), "p90": round(p90, 4)}


def _row(cell: WaveCell) -> dict[str, Any]:
    speedup = cell.speedup()
    return {
        "context": cell.context,
        "rows": cell.slots,
        "length": cell.answer.length,
        "drawn": cell.answer.sampled,
        "chosen": describe_draft(cell.chosen.draft),
        "oracle": describe_draft(cell.oracle),
        "requests": cell.requests,
        "predicted_s": round(cell.chosen.seconds_per_request * cell.requests, 4),
        "measured_s": round(cell.planned_s, 4),
        "dense_s": round(cell.fixed_s(None), 4),
        "speedup": round(speedup.median, 3),
        "speedup_low": round(speedup.lower_bound, 3),
    }


def table(cells: Sequence[WaveCell], settings: Sequence[Draft | None]) -> Table:
    """Seconds of a wave in each cell, for people."""
    names = [describe_draft(draft) for draft in settings]
    rows = []
    for cell in cells:
        row: dict[str, Any] = {
            "context": cell.context,
            "rows": cell.slots,
            "length": f"{cell.answer.length}{' drawn' if cell.answer.sampled else ''}",
            "scheduler": f"{describe_draft(cell.chosen.draft)} {cell.planned_s:.3f}",
        }
        for name, draft in zip(names, settings, strict=True):
            row[name] = f"{cell.fixed_s(draft):.3f}"
        rows.append(row)
    return figures_table(
        "seconds of a wave", ["context", "rows", "length", *names, "scheduler"], rows
    )
