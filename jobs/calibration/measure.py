"""What `calibrate.py` measures: a grid of cells, each a batch at a context, in which the dense loop
and every draft decode in turn; from them the few numbers of a profile."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from jobs.calibration import retrieval
from jobs.suites.acceptance import measures, subjects
from jobs.suites.acceptance.subjects import Subject
from jobs.suites.shared.paired_timing import Clock, Pair, read_bandwidth
from pipeline.config import Job, draft_of, model_path
from pipeline.records import UsageError
from std_core.cost_model.acceptance import AcceptanceCounts, count_accepted_rejected
from std_core.cost_model.device_specs import local_device
from std_core.cost_model.model_size import ModelSize
from std_core.cost_model.profile import (
    CalibratedDraft,
    Device,
    DraftSetupLatency,
    LatencyModel,
    PredictionSpread,
    PrefillLatency,
    Profile,
    RetrievalScore,
    TimedStep,
    UnionFraction,
    fit_non_negative,
)
from std_core.engine.engine import Engine
from std_core.model.checkpoint import Checkpoint
from std_core.types import Draft

WIDTHS = (3, 9)  # tokens a row, of verifications that are timed apart
BANDWIDTH_GIGABYTES = {"cpu": 2.0, "cuda": 8.0}  # that the bandwidth is measured over
SIDES = {"cpu": 1024, "cuda": 8192}  # of the matrices of which the peak is taken
SIZES = (1, 2, 4, 8)  # batches whose u_B is measured
LONG = 4  # answers that a caption is as long as
WARM = 1  # pairs of segments before those that count
PLAIN = Draft("full", gamma=1)  # seats rows and selects nothing


@dataclass(frozen=True)
class Grid:
    """What is measured. tokens: of a segment, per row, and of an answer, of which a caption has
    `LONG` times as many; pairs: of segments in each cell; texts: of each context, at the least;
    retrieval: whether drafts are tried without verification too."""

    contexts: list[int]
    rows: list[int]
    drafts: list[Draft]
    tokens: int = 24
    pairs: int = 3
    texts: int = 8
    retrieval: bool = False


@dataclass
class _Found:
    """What the cells have shown so far. Times in seconds."""

    full: list[TimedStep] = field(default_factory=list)
    steps: dict[Draft, list[TimedStep]] = field(default_factory=dict)
    once: dict[Draft, list[tuple[float, float]]] = field(
        default_factory=dict
    )  # (context, of a request)
    acceptance: dict[Draft, list[AcceptanceCounts]] = field(default_factory=dict)
    retrieved: dict[Draft, list[RetrievalScore]] = field(default_factory=dict)
    noise: list[float] = field(default_factory=list)  # of a drawn token
    prefill: list[tuple[float, float]] = field(default_factory=list)  # (context, of a request)
    vision: list[tuple[float, float]] = field(default_factory=list)  # (visual tokens, of a request)


def measure_profile(model: str, device: str, dtype: str, grid: Grid, threads: int) -> Profile:
    """A profile of this device and model.

    Raises:
        UsageError: there is no such model or device, or the grid goes beyond its window.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: this machine has none")
    with tempfile.TemporaryDirectory() as folder:  # of a tiny model
        engine = subjects.engine_of(model, Path(folder), threads, dtype=dtype, device=device)
    here = measured_device(device, dtype)
    found = _Found()
    model_size = engine.checkpoint.model_size(dtype)
    room = (grid.pairs + WARM) * (
        2 * grid.tokens + max(d.gamma for d in grid.drafts) + 1
    ) + 2  # some write more
    if max(grid.contexts) + room > engine.checkpoint.max_model_len:
        raise UsageError(f"--contexts {max(grid.contexts)} is beyond the model's window")
    for context in grid.contexts:
        count = max(grid.texts, *grid.rows)
        asked = subjects.subject(
            engine.checkpoint, context, range(count), room, step=0, scenes=(12,)
        )
        known = replace(engine, prefixes=subjects.prefix_store(engine, count))
        _prompts(known, asked, found)
        for rows in grid.rows:
            _cell(
                replace(known, max_num_seqs=rows), grid, asked, model_size, here=here, found=found
            )
        _accepted(replace(known, max_num_seqs=max(grid.rows)), grid, asked, found)
        if grid.retrieval:
            for draft, one in retrieval.measured(
                engine, [d for d in grid.drafts if d.supports_unverified], context
            ).items():
                found.retrieved.setdefault(draft, []).append(one)
    tried = tuple(_tried(draft, found, _pair(draft, dtype)) for draft in grid.drafts)
    full = LatencyModel.fit(found.full)
    return Profile(
        here,
        model=engine.checkpoint.revision,
        dtype=dtype,
        model_size=model_size,
        latency=full,
        prefill=_prefill(found.prefill),
        vision_s_per_token=sum(s for _, s in found.vision)
        / max(1.0, sum(tokens for tokens, _ in found.vision)),
        drafts=tried,
        union_fractions=_unions(engine, grid),
        spread=PredictionSpread(1 / (1 + full.residual.p90), 1 + full.residual.p90),
        sampling_s_per_token=max(0.0, statistics.median(found.noise)),
    )


def costs_by_draft(profile: Profile) -> dict[str, LatencyModel]:
    """By what they are of, for people."""
    named = {f"{t.draft.policy} {t.draft.weights}": t.latency for t in profile.drafts}
    return {"full": profile.latency, **named}


def retrieval_by_draft(profile: Profile) -> dict[str, tuple[RetrievalScore, ...]]:
    """By the draft that wrote alone, for people."""
    return {
        f"{t.draft.policy} {t.draft.weights}": t.retrieval_scores
        for t in profile.drafts
        if t.retrieval_scores
    }


def parse_numbers(name: str, text: str) -> list[int]:
    """Of a flag that lists them with commas. Raises UsageError."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UsageError(
            f"--{name} is {text!r}: whole numbers above 0 are needed, with commas between them"
        )
    return [int(word) for word in words]


def parse_drafts(text: str) -> list[Draft]:
    """The drafts of `conf/draft` that a flag names. Raises UsageError."""
    found = (draft_of(Job(draft=name.strip())) for name in text.split(","))
    return [draft for draft in found if draft is not None]


def measured_device(device: str, dtype: str) -> Device:
    """The device at hand, with the bandwidth that it reads with and the peak of its matrix
    products."""
    known = local_device(device)
    side = SIDES[known.kind]
    a = torch.ones(side, side, dtype=getattr(torch, dtype), device=device)
    seconds = min(_timed_product(a) for _ in range(5))
    bandwidth = (
        read_bandwidth(BANDWIDTH_GIGABYTES["cpu"], 5) * 1e9
        if device == "cpu"
        else _cuda_bandwidth(device)
    )
    return replace(known, bandwidth=bandwidth, flops=2 * side**3 / seconds)


def _timed_product(a: torch.Tensor) -> float:
    began = _now(a.device)
    a @ a
    return _now(a.device) - began


def _cuda_bandwidth(device: str) -> float:
    """Bytes/s of read-only sums over a working set that no cache holds."""
    memory = torch.ones(int(BANDWIDTH_GIGABYTES["cuda"] * 1e9) // 4, device=device)
    times = []
    for _ in range(6):
        began = _now(memory.device)
        memory.sum()
        times.append(_now(memory.device) - began)
    return memory.nbytes / min(times)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# ------------------------------------------------------------------------------------------- a cell


@dataclass(frozen=True)
class _Cell:
    """A batch at a context. `bandwidth` in bytes/s."""

    engine: Engine
    asked: Subject
    context: float  # tokens of a prompt, mean
    model_size: ModelSize
    bandwidth: float

    @property
    def rows(self) -> int:
        return len(self.asked.requests)

    def seat(self, draft: Draft, drawn: bool = False) -> Pair:
        asked = subjects.drawn(self.asked.requests) if drawn else self.asked.requests
        return Pair(self.engine, asked, self.asked.prepare, draft)

    def step(self, read: float, width: int, entries: float, seconds: float) -> TimedStep:
        """
        Args:
            entries: that all rows' tokens look at, each once per row.
        """
        return TimedStep(read / self.bandwidth, self.rows * width, entries * width, seconds)


def _prompts(engine: Engine, asked: Subject, found: _Found) -> None:
    """Every text or clip, seen and prefilled once for all that follows."""
    for request in subjects.of_kind(asked, "caption"):
        (row,) = Pair(replace(engine, max_num_seqs=1), [request], asked.prepare, PLAIN).batch.rows
        assert row is not None
        found.prefill.append((float(row.prompt), row.prefill_s))
        found.vision.append((float(row.visual), row.vision_s))


def _cell(
    engine: Engine, grid: Grid, whole: Subject, model_size: ModelSize, here: Device, found: _Found
) -> None:
    asked = replace(whole, requests=subjects.of_kind(whole, "caption")[: engine.max_num_seqs])
    length = statistics.fmean(asked.prepare(r).ids.shape[1] for r in asked.requests)
    cell = _Cell(
        engine, asked=asked, context=length, model_size=model_size, bandwidth=here.bandwidth
    )
    known = cell.seat(PLAIN).prefill_s  # nothing is selected
    found.noise.append(_noise(cell, grid))
    for draft in grid.drafts:
        _draft(cell, grid, draft, known, found=found)


def _noise(cell: _Cell, grid: Grid) -> float:
    """What a row's dense step takes longer where its token is drawn."""
    pairs = [cell.seat(PLAIN), cell.seat(PLAIN, drawn=True)]
    for _ in range(WARM + grid.pairs):
        for pair in pairs:
            pair.once(grid.tokens)
    greedy, drawn = (statistics.median(pair.dense.verify) for pair in pairs)
    return (drawn - greedy) / cell.rows


def _draft(cell: _Cell, grid: Grid, draft: Draft, known: float, found: _Found) -> None:
    """A draft's steps, its one-time costs, and the dense steps that are timed beside it."""
    if draft not in found.once:
        cell.seat(draft)  # packs weights and settles thresholds, which is done once for all
    pair = cell.seat(draft)
    found.once.setdefault(draft, []).append(
        (cell.context, max(0.0, pair.prefill_s - known) / cell.rows)
    )
    for turn in range(WARM + grid.pairs):
        if turn == WARM:
            pair.dense = Clock()
            pair.drafted = Clock()
        pair.once(grid.tokens)
    found.full += _full_steps(cell, pair)
    found.steps.setdefault(draft, []).append(_draft_step(cell, pair))


def _accepted(engine: Engine, grid: Grid, asked: Subject, found: _Found) -> None:
    """What is accepted of each draft of every text, each as long as its kind is."""
    for kind, tokens in (("caption", LONG * grid.tokens), ("question", grid.tokens)):
        requests = subjects.cut(subjects.of_kind(asked, kind), tokens)
        context = round(statistics.fmean(asked.prepare(r).ids.shape[1] for r in requests))
        for draft, drawn in itertools.product(grid.drafts, (False, True)):
            put = subjects.drawn(requests) if drawn else requests
            counts = count_accepted_rejected(list(engine.run(put, draft, asked.prepare)))
            found.acceptance.setdefault(draft, []).append(
                AcceptanceCounts(context, kind, *counts, drawn)
            )


def _full_steps(cell: _Cell, pair: Pair) -> list[TimedStep]:
    """Dense steps, the draft's verifications, and verifications of other widths, to which what a
    round does besides is added."""
    entries = cell.rows * (cell.context + _written(pair) / 2)
    read = cell.model_size.weights_read() + entries * cell.model_size.entry_bytes
    dense = statistics.median(pair.dense.verify)
    verified = statistics.median(pair.drafted.verify)
    beside = max(0.0, dense - pair.verification(1))
    times = {1: dense, pair.policy.gamma + 1: verified} | {
        w: pair.verification(w) + beside for w in WIDTHS
    }
    return [cell.step(read, width, entries, seconds) for width, seconds in times.items()]


def _draft_step(cell: _Cell, pair: Pair) -> TimedStep:
    draft = pair.policy
    model_size = cell.model_size
    seconds = statistics.median(pair.drafted.draft)
    if draft.policy == "ngram":
        return cell.step(0.0, 1, 0.0, seconds)
    if draft.model:
        model_size = Checkpoint.load(model_path(draft.model)).model_size(
            str(cell.engine.model.dtype).split(".")[1]
        )
    held = sum(row.kv_keep for row in pair.batch.rows if row is not None) / draft.depth
    entries = held * cell.context + cell.rows * _written(pair) / 2
    weights = model_size.weights_read(None if draft.model else draft, cell.rows)
    return cell.step(weights + entries * model_size.kv_read(draft), 1, entries, seconds)


def _written(pair: Pair) -> float:
    """Tokens of a row so far, mean."""
    return statistics.fmean(map(len, pair.written))


# -------------------------------------------------------------------------------------- few numbers


def _tried(draft: Draft, found: _Found, pair: ModelSize | None) -> CalibratedDraft:
    contexts, seconds = zip(*found.once[draft], strict=True)
    once = DraftSetupLatency()
    if max(seconds) > 0:
        once = DraftSetupLatency(per_token=sum(seconds) / sum(contexts))
    retrieved = tuple(found.retrieved.get(draft, ()))
    return CalibratedDraft(
        draft,
        latency=LatencyModel.fit(found.steps[draft]),
        setup=once,
        acceptance=tuple(found.acceptance[draft]),
        second_model=pair,
        retrieval_scores=retrieved,
    )


def _prefill(seen: Sequence[tuple[float, float]]) -> PrefillLatency:
    fit = fit_non_negative([(1.0, n, n**2) for n, _ in seen], [seconds for _, seconds in seen])
    return PrefillLatency(*fit.coefficients)


def _pair(draft: Draft, dtype: str) -> ModelSize | None:
    return Checkpoint.load(model_path(draft.model)).model_size(dtype) if draft.model else None


def _unions(engine: Engine, grid: Grid) -> tuple[UnionFraction, ...]:
    """u_B of every share of channels that some draft computes with."""
    shares = sorted({draft.channels for draft in grid.drafts if draft.channels < 1})
    if not shares:
        return ()
    eight = subjects.subject(
        engine.checkpoint, min(grid.contexts), range(measures.SEQUENCES), measures.STEPS + 1, step=0
    )
    seen = measures.at_decode(engine, subjects.captions_of(eight))
    found = []
    for keep in shares:
        joint = measures.joint_shares(engine, seen, measures.calibrated(engine, seen, keep), SIZES)
        found += [UnionFraction(keep, int(rows), fraction) for rows, fraction in joint.items()]
    return tuple(found)
