"""What `calibrate.py` measures: over a grid of cells, each a batch at a context, the dense loop and
every draft decode in turn; their times and acceptance become the parameters of a profile."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from jobs.calibration import agreement, retrieval
from jobs.suites.shared import activations, workload
from jobs.suites.shared.flags import require_device
from jobs.suites.shared.paired_timing import LoopTimes, PairedLoops
from jobs.suites.shared.timing import read_bandwidth, wall_seconds
from jobs.suites.shared.workload import Workload
from pipeline.config import model_path
from pipeline.records import UsageError
from std_core.cost_model.acceptance import (
    AcceptanceCounts,
    KeepAgreement,
    count_accepted_rejected,
)
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

VERIFICATION_WIDTHS = (3, 9)  # tokens per row, of verifications that no draft of the grid has
BANDWIDTH_GIGABYTES = {"cpu": 2.0, "cuda": 8.0}  # read in each repetition
BANDWIDTH_REPEATS = 6
MATRIX_SIDES = {"cpu": 1024, "cuda": 8192}  # of the products whose FLOP/s are measured
MATRIX_REPEATS = 5
UNION_BATCHES = (1, 2, 4, 8)  # whose u_B is measured
CAPTION_FACTOR = 4  # tokens of a caption over those of an answer
WARMUP_PAIRS = 1
SCENES = 12  # of a clip
DENSE = Draft("full", gamma=1)  # selects nothing


@dataclass(frozen=True)
class CalibrationGrid:
    """What is measured.

    Args:
        contexts: tokens of a prompt; of a Video-LLM, visual tokens.
        rows: batch sizes.
        tokens: per row of a timed segment, and of an answer.
        pairs: of segments in each cell.
        texts: of each context, at least.
        keeps: shares of the visual entries, at which drafts that select entries are compared.
        retrieval: whether drafts are also tried without verification.
    """

    contexts: list[int]
    rows: list[int]
    drafts: list[Draft]
    tokens: int = 24
    pairs: int = 3
    texts: int = 8
    keeps: tuple[float, ...] = ()
    retrieval: bool = False

    @property
    def tokens_per_row(self) -> int:
        """Room for all segments of a row; a drafted segment may exceed `tokens` by γ + 1."""
        widest = max(draft.gamma for draft in self.drafts) + 1
        return (self.pairs + WARMUP_PAIRS) * (2 * self.tokens + widest) + 2


class SizedTime(NamedTuple):
    """Seconds of a request's prefill, vision or selection, and the tokens they are for."""

    tokens: float
    seconds: float


@dataclass
class Measurements:
    """What the cells have shown so far; times in seconds.

    Args:
        full_steps: of the full model, dense steps and verifications.
        draft_steps: of each draft.
        one_time: of each draft, the time per request beyond a dense prefill.
        noise: time that a sampled token takes longer than a greedy one.
        prefill, vision: per request.
    """

    full_steps: list[TimedStep] = field(default_factory=list)
    draft_steps: dict[Draft, list[TimedStep]] = field(default_factory=dict)
    one_time: dict[Draft, list[SizedTime]] = field(default_factory=dict)
    acceptance: dict[Draft, list[AcceptanceCounts]] = field(default_factory=dict)
    agreements: dict[Draft, list[KeepAgreement]] = field(default_factory=dict)
    retrieved: dict[Draft, list[RetrievalScore]] = field(default_factory=dict)
    noise: list[float] = field(default_factory=list)
    prefill: list[SizedTime] = field(default_factory=list)
    vision: list[SizedTime] = field(default_factory=list)


def measure_profile(
    model: str, device: str, dtype: str, grid: CalibrationGrid, threads: int
) -> Profile:
    """Calibrate this device and model.

    Raises:
        UsageError: there is no such model or device, or the grid exceeds the model's window.
    """
    require_device(device)
    with tempfile.TemporaryDirectory() as folder:  # of a tiny model
        engine = workload.load_engine(model, Path(folder), threads, dtype=dtype, device=device)
    if max(grid.contexts) + grid.tokens_per_row > engine.checkpoint.max_model_len:
        raise UsageError(f"--contexts {max(grid.contexts)} is beyond the model's window")
    measured_device = measure_device(device, dtype)
    calibration = Calibration(engine, grid, engine.checkpoint.model_size(dtype), measured_device)
    for context in grid.contexts:
        calibration.measure_context(context)
    return calibration.profile(dtype)


def measure_device(device: str, dtype: str) -> Device:
    """This machine's device with its measured read bandwidth and FLOP/s of matrix products."""
    known = local_device(device)
    side = MATRIX_SIDES[known.kind]
    matrix = torch.ones(side, side, dtype=getattr(torch, dtype), device=device)
    product_s = min(wall_seconds(lambda: matrix @ matrix, device) for _ in range(MATRIX_REPEATS))
    bandwidth = read_bandwidth(
        BANDWIDTH_GIGABYTES[known.kind] * 1e9, times=BANDWIDTH_REPEATS, device=device
    )
    return replace(known, bandwidth=bandwidth, flops=2 * side**3 / product_s)


def latency_by_draft(profile: Profile) -> dict[str, LatencyModel]:
    """The fitted latencies by name, for the summary."""
    drafts = {f"{t.draft.policy} {t.draft.weights}": t.latency for t in profile.drafts}
    return {"full": profile.latency, **drafts}


def retrieval_by_draft(profile: Profile) -> dict[str, tuple[RetrievalScore, ...]]:
    """The retrieval tests by name, for the summary; drafts without one are left out."""
    return {
        f"{t.draft.policy} {t.draft.weights}": t.retrieval_scores
        for t in profile.drafts
        if t.retrieval_scores
    }


# ------------------------------------------------------------------------------------------ a model


class Calibration:
    """Measures one context after another and fits a profile to all of them."""

    def __init__(self, engine: Engine, grid: CalibrationGrid, size: ModelSize, device: Device):
        self.engine = engine
        self.grid = grid
        self.size = size
        self.device = device
        self.measured = Measurements()

    def measure_context(self, context: int) -> None:
        """All batches and drafts at one context; its texts or clips are prefilled once."""
        grid = self.grid
        texts = max(grid.texts, *grid.rows)
        whole = workload.build_workload(
            self.engine.checkpoint,
            context,
            range(texts),
            grid.tokens_per_row,
            stagger=0,
            scene_counts=(SCENES,),
        )
        prefixes = workload.empty_prefix_store(self.engine, texts)
        engine = replace(self.engine, prefixes=prefixes)
        self._measure_prefill(engine, whole)
        for rows in grid.rows:
            captions = workload.requests_of_kind(whole, "caption")[:rows]
            cell = CalibrationCell(
                replace(engine, max_num_seqs=rows),
                replace(whole, requests=captions),
                self.size,
                self.device.bandwidth,
            )
            self._measure_cell(cell)
        all_rows = replace(engine, max_num_seqs=max(grid.rows))
        self._measure_acceptance(all_rows, whole)
        self._measure_agreement(all_rows, whole)
        if grid.retrieval:
            drafts = [draft for draft in grid.drafts if draft.supports_unverified]
            for draft, result in retrieval.measure_retrieval(self.engine, drafts, context).items():
                self.measured.retrieved.setdefault(draft, []).append(result)

    def profile(self, dtype: str) -> Profile:
        """The fitted profile."""
        measured = self.measured
        full = LatencyModel.fit(measured.full_steps)
        worst = 1 + full.residual.p90
        vision_s = sum(time.seconds for time in measured.vision)
        vision_tokens = sum(time.tokens for time in measured.vision)
        return Profile(
            self.device,
            model=self.engine.checkpoint.revision,
            dtype=dtype,
            model_size=self.size,
            latency=full,
            prefill=_fit_prefill(measured.prefill),
            vision_s_per_token=vision_s / max(1.0, vision_tokens),
            drafts=tuple(self._fit_draft(draft, dtype) for draft in self.grid.drafts),
            union_fractions=self._measure_unions(),
            spread=PredictionSpread(1 / worst, worst),
            sampling_s_per_token=max(0.0, statistics.median(measured.noise)),
        )

    def _measure_prefill(self, engine: Engine, whole: Workload) -> None:
        """Vision and prefill of every text or clip, which fills the prefix store."""
        one_slot = replace(engine, max_num_seqs=1)
        for request in workload.requests_of_kind(whole, "caption"):
            loops = PairedLoops(one_slot, [request], whole.prepare, DENSE)
            (row,) = loops.batch.rows
            assert row is not None
            self.measured.prefill.append(SizedTime(float(row.prompt_tokens), row.prefill_s))
            self.measured.vision.append(SizedTime(float(row.visual_tokens), row.vision_s))

    def _measure_cell(self, cell: CalibrationCell) -> None:
        dense_prefill_s = cell.start_loops(DENSE).prefill_s
        self.measured.noise.append(self._sampling_noise(cell))
        for draft in self.grid.drafts:
            self._measure_draft(cell, draft, dense_prefill_s)

    def _sampling_noise(self, cell: CalibrationCell) -> float:
        """Seconds that a row's dense step takes longer if its token is sampled."""
        greedy = cell.start_loops(DENSE)
        sampled = cell.start_loops(DENSE, sampled=True)
        for _ in range(WARMUP_PAIRS + self.grid.pairs):
            greedy.run_segments(self.grid.tokens)
            sampled.run_segments(self.grid.tokens)
        return (sampled.dense.verify_s - greedy.dense.verify_s) / cell.rows

    def _measure_draft(self, cell: CalibrationCell, draft: Draft, dense_prefill_s: float) -> None:
        """A draft's steps and one-time cost, and the dense steps that take turns with them."""
        measured = self.measured
        if draft not in measured.one_time:
            # packs weights and calibrates thresholds, once per engine: no cost of a request
            cell.start_loops(draft)
        loops = cell.start_loops(draft)
        extra_s = max(0.0, loops.prefill_s - dense_prefill_s) / cell.rows
        one_time = SizedTime(cell.context, extra_s)
        measured.one_time.setdefault(draft, []).append(one_time)
        for pair in range(WARMUP_PAIRS + self.grid.pairs):
            if pair == WARMUP_PAIRS:
                loops.dense = LoopTimes()
                loops.drafted = LoopTimes()
            loops.run_segments(self.grid.tokens)
        measured.full_steps += cell.full_steps(loops)
        measured.draft_steps.setdefault(draft, []).append(cell.draft_step(loops))

    def _measure_acceptance(self, engine: Engine, whole: Workload) -> None:
        """Acceptance of each draft on every text, with captions longer than answers."""
        tokens = self.grid.tokens
        for kind, max_tokens in (("caption", CAPTION_FACTOR * tokens), ("question", tokens)):
            requests = workload.requests_of_kind(whole, kind)
            greedy = workload.with_max_tokens(requests, max_tokens)
            context = round(_mean_prompt(whole, greedy))
            for draft, sampled in itertools.product(self.grid.drafts, (False, True)):
                chosen = workload.sampled(greedy) if sampled else greedy
                results = list(engine.run(chosen, draft, whole.prepare))
                counts = count_accepted_rejected(results)
                accepted = AcceptanceCounts(context, kind, *counts, sampled)
                self.measured.acceptance.setdefault(draft, []).append(accepted)

    def _measure_agreement(self, engine: Engine, whole: Workload) -> None:
        """Agreement of each draft that selects entries, at every keep, on greedy captions."""
        drafts = [draft for draft in self.grid.drafts if agreement.can_choose_keep(draft)]
        if not drafts or not self.grid.keeps:
            return
        captions = workload.with_max_tokens(
            workload.requests_of_kind(whole, "caption"), CAPTION_FACTOR * self.grid.tokens
        )
        context = round(_mean_prompt(whole, captions))
        texts = agreement.write_texts(engine, captions, whole.prepare)
        for draft in drafts:
            keeps = sorted({*self.grid.keeps, draft.keep})
            self.measured.agreements.setdefault(draft, []).extend(
                agreement.measure_agreement(
                    engine,
                    captions,
                    whole.prepare,
                    texts=texts,
                    draft=draft,
                    keep=keep,
                    context=context,
                )
                for keep in keeps
            )

    def _measure_unions(self) -> tuple[UnionFraction, ...]:
        """u_B for every share of channels that a draft of the grid computes with."""
        shares = sorted({draft.channels for draft in self.grid.drafts if draft.channels < 1})
        if not shares:
            return ()
        eight = workload.build_workload(
            self.engine.checkpoint,
            min(self.grid.contexts),
            range(activations.SEQUENCES),
            activations.STEPS + 1,
            stagger=0,
        )
        captions = workload.captions_only(eight)
        recorded = activations.record_activations(self.engine, captions)
        unions = []
        for channels in shares:
            thresholds = activations.fit_thresholds(self.engine, recorded, channels)
            joint = activations.joint_weight_shares(
                self.engine, recorded, thresholds, UNION_BATCHES
            )
            unions += [
                UnionFraction(channels, int(batch), fraction) for batch, fraction in joint.items()
            ]
        return tuple(unions)

    def _fit_draft(self, draft: Draft, dtype: str) -> CalibratedDraft:
        measured = self.measured
        second = _second_model_size(draft, dtype) if draft.model else None
        return CalibratedDraft(
            draft,
            latency=LatencyModel.fit(measured.draft_steps[draft]),
            setup=_fit_setup(measured.one_time[draft]),
            acceptance=tuple(measured.acceptance[draft]),
            second_model=second,
            retrieval_scores=tuple(measured.retrieved.get(draft, ())),
            keep_agreements=tuple(measured.agreements.get(draft, ())),
        )


def _mean_prompt(whole: Workload, requests: Sequence[workload.Request]) -> float:
    """Tokens of a prompt."""
    return statistics.fmean(whole.prepare(request).ids.shape[1] for request in requests)


def _second_model_size(draft: Draft, dtype: str) -> ModelSize:
    return Checkpoint.load(model_path(draft.model)).model_size(dtype)


def _fit_setup(times: Sequence[SizedTime]) -> DraftSetupLatency:
    """All of a draft's one-time cost is taken to be per token of the context."""
    seconds = sum(time.seconds for time in times)
    tokens = sum(time.tokens for time in times)
    return DraftSetupLatency(per_token=seconds / tokens)


def _fit_prefill(times: Sequence[SizedTime]) -> PrefillLatency:
    terms = [(1.0, time.tokens, time.tokens**2) for time in times]
    fit = fit_non_negative(terms, [time.seconds for time in times])
    return PrefillLatency(*fit.coefficients)


# ------------------------------------------------------------------------------------------- a cell


class CalibrationCell:
    """A batch at a context.

    Args:
        engine: with as many slots as the workload has requests.
        bandwidth: bytes/s.
    """

    def __init__(self, engine: Engine, captions: Workload, size: ModelSize, bandwidth: float):
        self.engine = engine
        self.captions = captions
        self.size = size
        self.bandwidth = bandwidth
        self.rows = len(captions.requests)
        self.context = _mean_prompt(captions, captions.requests)

    def start_loops(self, draft: Draft, sampled: bool = False) -> PairedLoops:
        requests = self.captions.requests
        if sampled:
            requests = workload.sampled(requests)
        return PairedLoops(self.engine, requests, self.captions.prepare, draft)

    def full_steps(self, loops: PairedLoops) -> list[TimedStep]:
        """Dense steps, the draft's verifications, and verifications of other widths.

        Those are timed alone; what a round does beside its forward pass is added.
        """
        entries = self.rows * (self.context + _mean_written(loops) / 2)
        read = self.size.weights_read() + entries * self.size.entry_bytes
        dense_s = loops.dense.verify_s
        beside_s = max(0.0, dense_s - loops.verification_seconds(1))
        seconds_by_width = {1: dense_s, loops.policy.gamma + 1: loops.drafted.verify_s}
        for width in VERIFICATION_WIDTHS:
            seconds_by_width[width] = loops.verification_seconds(width) + beside_s
        return [
            self._step(read, entries, seconds, width=width)
            for width, seconds in seconds_by_width.items()
        ]

    def draft_step(self, loops: PairedLoops) -> TimedStep:
        draft = loops.policy
        if draft.policy == "ngram":
            return self._step(0.0, 0.0, loops.drafted.draft_s)
        size = self.size
        if draft.model:
            dtype = str(self.engine.model.dtype).removeprefix("torch.")
            size = _second_model_size(draft, dtype)
        kept = sum(row.kv_keep for row in loops.batch.rows if row is not None) / draft.depth
        entries = kept * self.context + self.rows * _mean_written(loops) / 2
        weights = size.weights_read(None if draft.model else draft, self.rows)
        read = weights + entries * size.kv_read(draft)
        return self._step(read, entries, loops.drafted.draft_s)

    def _step(self, read: float, entries: float, seconds: float, *, width: int = 1) -> TimedStep:
        """
        Args:
            read: bytes.
            entries: that one token per row attends to, all rows together.
            width: tokens per row.
        """
        return TimedStep(read / self.bandwidth, self.rows * width, entries * width, seconds)


def _mean_written(loops: PairedLoops) -> float:
    """Tokens of a row so far."""
    return statistics.fmean(map(len, loops.written))
