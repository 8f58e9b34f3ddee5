"""How fast a drafted loop decodes beside our dense loop and Hugging Face's `generate`: the same
prompts, segments in turn, in one process. Times are medians over pairs of segments, intervals are
bootstrapped over them.

A step's bound is its bytes over the bandwidth that this machine reads with, measured in the same
run, and stated only where a dense step reads more than 256 MB. `identical` counts rows whose text
is that of the dense loop with steps padded to the draft's verification, from the first token on;
`diverged` counts rows that departed from the plain dense loop in some segment."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from jobs.suites.decode import questions, shapes
from jobs.suites.shared import workload
from jobs.suites.shared.flags import (
    EngineFlags,
    parse_numbers,
    parse_suite_flags,
    require_device,
)
from jobs.suites.shared.generate_timing import GenerateTimes, time_generate, time_prompt_lookup
from jobs.suites.shared.paired_timing import PairedLoops
from jobs.suites.shared.random_models import TokenIdCheckpoint
from jobs.suites.shared.tables import figures_table, stderr_console
from jobs.suites.shared.timing import Stopwatch, paired_ratio, read_bandwidth
from jobs.suites.shared.workload import Workload
from pipeline.command_line import flag
from pipeline.records import UsageError
from std_core.cost_model.crossover import speedup
from std_core.cost_model.model_size import ModelSize
from std_core.engine.engine import Engine
from std_core.kernels.attention import implementation_name
from std_core.types import Draft, Dtype

LARGE_STEP = 256e6  # bytes of a dense step, below which caches serve part of the reads
TEXT_WINDOW = 64  # newest text entries, which a draft always reads
MAX_SEGMENT = 32  # tokens per row
WIDE = 8  # tokens per row of the verification that `verify_t8_ms` times
SCENES = 12  # of a clip
QUESTIONS_DRAFT = Draft("specvlm", keep=0.1, gamma=4)
VIDEO_CONTEXTS = "4096,16384"
TEXT_CONTEXTS = "2048,7936"
COLUMNS = (
    "batch",
    "context",
    "policy",
    "gamma",
    "dense_ms",
    "draft_ms",
    "verify_ms",
    "verify_t8_ms",
    "dense_fraction_of_bound",
    "accepted_per_round",
    "speedup",
    "speedup_low",
    "bound",
    "vs_hf_generate",
    "identical",
    "diverged",
)


@dataclass(frozen=True)
class Flags(EngineFlags):
    """The suite's command line."""

    dtype: Dtype = flag("bfloat16", "of weights and KV cache")
    batches: str = flag("1,8", "rows that decode together")
    contexts: str = flag(
        "", f"tokens; default {TEXT_CONTEXTS}, or {VIDEO_CONTEXTS} visual ones of a Video-LLM"
    )
    tokens: int = flag(256, "written per row")
    pairs: int = flag(9, "pairs of a dense and a drafted segment")
    hugging_face: bool = flag(True, "time Hugging Face's generate as well")


@dataclass(frozen=True)
class CellBaseline:
    """A batch at a context, and what a row's times are compared with. Times in seconds.

    Args:
        bandwidth: bytes/s that this machine reads with.
        vision_s, prefill_s: of all rows.
        generate: None if Hugging Face's `generate` was not timed.
        lookup_s: per token of Hugging Face's prompt lookup; None if it was not timed.
    """

    engine: Engine
    flags: Flags
    batch: int
    context: int
    bandwidth: float
    vision_s: float
    prefill_s: float
    generate: GenerateTimes | None
    lookup_s: float | None


def run(argv: list[str]) -> dict[str, Any]:
    """Return the suite's figures; the tables go to standard error."""
    flags = parse_suite_flags(Flags, argv, "decode", __doc__)
    require_device(flags.device)
    watch = Stopwatch()
    console = stderr_console(220)
    torch.set_num_threads(flags.threads)
    bandwidth = read_bandwidth()
    engine = _load_engine(flags)
    usual = VIDEO_CONTEXTS if engine.checkpoint.supports_video else TEXT_CONTEXTS
    contexts = parse_numbers("contexts", flags.contexts or usual)
    batches = parse_numbers("batches", flags.batches)
    rows: list[dict[str, Any]] = []
    for context in contexts:
        for batch in batches:
            own = replace(engine, max_num_seqs=batch, prefixes=None)
            cell_rows = measure_cell(own, flags, batch, context, bandwidth=bandwidth)
            console.print(figures_table(f"decoding of {flags.model}", COLUMNS, cell_rows))
            rows += cell_rows
    attention = implementation_name(engine.model.dtype, engine.model.device, engine.model.head_dim)
    return {
        "model": flags.model,
        "read_bandwidth_gbs": round(bandwidth / 1e9, 2),
        "dense_attention": attention,
        "random_weights": flags.model in shapes.SHAPES,
        "rows": rows,
        "questions": _time_questions(engine, flags, max(contexts)),
        "seconds": round(watch.seconds, 1),
    }


def drafts(engine: Engine) -> dict[str, Draft]:
    """The drafts of each cell; the budgets are Sparse-to-Dense's K + m_t = 1,024 entries and half
    of it."""
    whole = 1024 - TEXT_WINDOW
    half = 512 - TEXT_WINDOW
    by_name = {
        "std_1024": Draft("std", k=whole, gamma=3),
        "std_512": Draft("std", k=half, gamma=2),
        "std_512_int8": Draft("std", k=half, gamma=3, weights="int8"),
        "ngram": Draft("ngram", gamma=3),
    }
    if engine.checkpoint.supports_video:
        by_name["refresh_1024"] = Draft("std", k=whole, gamma=3, refresh=1)
    return by_name


def measure_cell(
    engine: Engine, flags: Flags, batch: int, context: int, *, bandwidth: float
) -> list[dict[str, Any]]:
    """Figures of each draft at one batch and context; all loops and `generate` take turns."""
    measured = _build_workload(engine, context, batch, flags.tokens)
    requests = measured.requests
    watch = Stopwatch()
    dense_loops = PairedLoops(engine, requests, measured.prepare, Draft("full", gamma=1))
    prefill_s = dense_loops.prefill_s
    vision_s = watch.seconds - prefill_s
    loops = {
        name: PairedLoops(engine, requests, measured.prepare, draft)
        for name, draft in drafts(engine).items()
    }
    segment = _segment_tokens(flags, loops)

    def run_all() -> None:
        for pair in loops.values():
            pair.run_segments(segment)

    prompts = [measured.prepare(request) for request in requests]
    generate = None
    if flags.hugging_face:
        generate = time_generate(engine.model, prompts, segment, flags.pairs, between=run_all)
    else:
        for _ in range(flags.pairs):
            run_all()
    lookup_s = None
    # prompt lookup takes one row, and on video prompts it drafts placeholders and fails
    if generate and batch == 1 and not engine.checkpoint.supports_video:
        lookup_s = time_prompt_lookup(engine.model, prompts, segment * flags.pairs)
    cell = CellBaseline(
        engine=engine,
        flags=flags,
        batch=batch,
        context=context,
        bandwidth=bandwidth,
        vision_s=vision_s,
        prefill_s=prefill_s,
        generate=generate,
        lookup_s=lookup_s,
    )
    return _rows(cell, loops)


def _rows(cell: CellBaseline, loops: dict[str, PairedLoops]) -> list[dict[str, Any]]:
    longest = max(len(row) for pair in loops.values() for row in pair.written)
    padded: dict[int, list[list[int]]] = {}  # dense texts by the width of their steps
    rows = []
    for name, pair in loops.items():
        steps = _step_figures(cell, pair)  # before the replay, which moves the rows
        width = pair.policy.gamma + 1
        if width not in padded:
            padded[width] = pair.replay_dense(width, longest)
        identical = sum(
            ours == dense[: len(ours)]
            for ours, dense in zip(pair.written, padded[width], strict=True)
        )
        rows.append(_row(cell, name, pair, steps=steps, identical=identical))
    return rows


def _row(
    cell: CellBaseline, name: str, pair: PairedLoops, *, steps: dict[str, Any], identical: int
) -> dict[str, Any]:
    """One draft's figures as JSON has them."""
    generate = cell.generate
    per_token = statistics.median(pair.drafted.per_token)
    row = {
        **asdict(pair.policy),
        "model": cell.flags.model,
        "batch": cell.batch,
        "context": cell.context,
        "policy": name,
        **steps,
        "vision_ms": _ms(cell.vision_s),
        "prefill_ms": _ms(cell.prefill_s),
        "hf_prefill_ms": _ms(generate.prefill_s) if generate else None,
        "identical": identical,
        "rows": cell.batch,
        "diverged": len(pair.diverged),
        "select_ms": _ms(pair.prefill_s),
        "decode_ms": _ms(per_token * cell.flags.tokens),
    }
    if generate:
        generate_per_token = statistics.median(generate.per_token)
        generate_s = generate.prefill_s + generate_per_token * cell.flags.tokens
        engine_s = cell.vision_s + cell.prefill_s + pair.prefill_s + per_token * cell.flags.tokens
        lookup_s = cell.lookup_s
        row["vs_hf_generate"] = round(generate_per_token / per_token, 3)
        row["vs_hf_lookup"] = round(lookup_s / per_token, 3) if lookup_s else None
        row["speedup_end_to_end"] = round(generate_s / engine_s, 3)
    return row


def _step_figures(cell: CellBaseline, pair: PairedLoops) -> dict[str, Any]:
    """Times of the steps in ms, their bytes, and the speed-up beside the one that bytes allow."""
    policy = pair.policy
    speed = paired_ratio(pair.dense.per_token, pair.drafted.per_token)
    tokens = statistics.fmean(pair.drafted.kept)
    item_bytes = cell.engine.model.dtype.itemsize
    size = ModelSize.of(cell.engine.model.hf.config, item_bytes, item_bytes)
    dense_bytes = size.step_bytes([cell.context] * len(pair.written))
    draft_bytes = 0.0
    if policy.policy != "ngram":
        entries = [row.kv_keep * cell.context for row in pair.batch.rows if row is not None]
        draft_bytes = size.step_bytes(entries, policy)
    fraction = None
    bound = None
    if dense_bytes > LARGE_STEP:
        fraction = round(dense_bytes / cell.bandwidth / pair.dense.verify_s, 3)
        bound = round(speedup(tokens, policy.gamma, draft_bytes, dense_bytes, dense_bytes), 3)
    return {
        "dense_ms": _ms(pair.dense.verify_s),
        "draft_ms": _ms(pair.drafted.draft_s),
        "verify_ms": _ms(pair.drafted.verify_s),
        "verify_t8_ms": _ms(pair.verification_seconds(WIDE)),
        "dense_bytes": round(dense_bytes),
        "draft_bytes": round(draft_bytes),
        "dense_fraction_of_bound": fraction,
        "bound": bound,
        "accepted_per_round": round(tokens - 1, 3),
        "speedup": round(speed.median, 3),
        "speedup_low": round(speed.lower_bound, 3),
    }


def _time_questions(engine: Engine, flags: Flags, context: int) -> dict[str, Any] | None:
    """Questions on videos, of a Video-LLM and beside `generate` alone."""
    if not (flags.hugging_face and engine.checkpoint.supports_video):
        return None
    return questions.time_questions(engine, context, QUESTIONS_DRAFT)


def _segment_tokens(flags: Flags, loops: dict[str, PairedLoops]) -> int:
    """Tokens per row of a segment, so that all segments fit into `--tokens`.

    Raises:
        UsageError: `--tokens` is too small for so many pairs.
    """
    widest = max(pair.policy.gamma for pair in loops.values()) + 1
    segment = min(MAX_SEGMENT, (flags.tokens - 2) // flags.pairs - widest)
    if segment < 1:
        least = flags.pairs * (widest + 1) + 2
        raise UsageError(f"--tokens is {flags.tokens}: {flags.pairs} pairs need at least {least}")
    return segment


def _load_engine(flags: Flags) -> Engine:
    if flags.model in shapes.SHAPES:
        return shapes.shape_engine(flags.model, flags.dtype, flags.device)
    with tempfile.TemporaryDirectory() as folder:
        return workload.load_engine(
            flags.model, Path(folder), flags.threads, dtype=flags.dtype, device=flags.device
        )


def _build_workload(engine: Engine, context: int, batch: int, max_tokens: int) -> Workload:
    if isinstance(engine.checkpoint, TokenIdCheckpoint):
        return shapes.random_workload(engine, context, batch, max_tokens)
    both = workload.build_workload(
        engine.checkpoint,
        context,
        range(batch),
        max_tokens,
        stagger=0,
        scene_counts=(SCENES,),
    )
    return workload.captions_only(both)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
