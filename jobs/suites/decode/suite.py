"""How fast a draft's loop decodes over our dense loop and over Hugging Face's `generate`: the same
prompts, in turn, in one process. A table for people, then JSON. Times are medians over pairs of
segments, intervals bootstrapped.

A step's bound is its bytes over the bandwidth that this machine reads with, measured in the same
run, and stated only where a dense step reads more than 256 MB. `identical` compares with the dense
loop whose steps are padded to a draft's verification, from the first token on; `diverged` counts
rows that departed from the plain dense loop in some segment."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from jobs.suites.acceptance import subjects
from jobs.suites.acceptance.subjects import Subject
from jobs.suites.decode import questions, shapes
from jobs.suites.shared import generate_timing
from jobs.suites.shared.paired_timing import Pair, ratio, read_bandwidth
from pipeline.command_line import (
    parse_flags,
)
from pipeline.records import UsageError
from std_core.cost_model.crossover import speedup
from std_core.cost_model.model_size import ModelSize
from std_core.engine.engine import Engine
from std_core.kernels.attention import implementation_name
from std_core.types import Draft

LARGE = 256e6  # bytes of a dense step below which caches hide what memory does
SELECTED = 64  # of a text's last tokens that a draft always sees
COLUMNS = (
    "batch", "context", "policy", "gamma", "dense_ms", "draft_ms", "verify_ms", "verify_t8_ms",
    "dense_fraction_of_bound", "accepted_per_round", "speedup", "speedup_low", "bound", "vs_hf_generate", "identical",
    "diverged",
)  # fmt: skip


@dataclass(frozen=True)
class Flags:
    """The suite's command line."""

    model: str = "demo"
    device: str = "cpu"
    dtype: str = "bfloat16"
    batches: str = "1,8"
    # tokens, visual ones of a model that sees; 2048,7936 of text and 4096,16384 of video if empty
    contexts: str = ""
    tokens: int = 256  # written per row
    pairs: int = 9
    threads: int = 2
    hugging_face: bool = True  # measure `generate` beside


def run(argv: list[str]) -> dict[str, Any]:
    """The suite's figures; the table goes to standard error."""
    flags: Flags = parse_flags(Flags, argv, "benchmark.py --suite decode")
    if flags.device != "cpu" and not torch.cuda.is_available():
        raise UsageError(f"--device {flags.device}: this machine has none")
    began = time.monotonic()
    console = Console(stderr=True, width=220)
    torch.set_num_threads(flags.threads)
    bandwidth = read_bandwidth()
    engine = _engine(flags)
    usual = "4096,16384" if engine.checkpoint.supports_video else "2048,7936"
    contexts = numbers("contexts", flags.contexts or usual)
    batches = numbers("batches", flags.batches)
    rows: list[dict[str, Any]] = []
    for context in contexts:
        for batch in batches:
            rows += cell(
                replace(engine, max_num_seqs=batch, prefixes=None),
                flags,
                batch,
                context,
                bandwidth=bandwidth,
            )
            console.print(table(flags.model, rows[-len(drafts(engine)) :]))
    return {
        "model": flags.model,
        "read_bandwidth_gbs": round(bandwidth, 2),
        "dense_attention": implementation_name(
            engine.model.dtype, engine.model.device, engine.model.head_dim
        ),
        "random_weights": flags.model in shapes.SHAPES,
        "rows": rows,
        "questions": _questions(engine, flags, max(contexts)),
        "seconds": round(time.monotonic() - began, 1),
    }


def numbers(name: str, text: str) -> list[int]:
    """Of a flag that lists them with commas."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UsageError(
            f"--{name} is {text!r}: whole numbers above 0 are needed, with commas between them"
        )
    return [int(word) for word in words]


def drafts(engine: Engine) -> dict[str, Draft]:
    """What is tried in each cell; the budgets are Sparse-to-Dense's K + m_t = 1,024 and half of
    it."""
    tried = {
        "std_1024": Draft("std", k=1024 - SELECTED, gamma=3),
        "std_512": Draft("std", k=512 - SELECTED, gamma=2),
        "std_512_int8": Draft("std", k=512 - SELECTED, gamma=3, weights="int8"),
        "ngram": Draft("ngram", gamma=3),
    }
    if engine.checkpoint.supports_video:
        tried["refresh_1024"] = Draft("std", k=1024 - SELECTED, gamma=3, refresh=1)
    return tried


def cell(
    engine: Engine, flags: Flags, batch: int, context: int, bandwidth: float
) -> list[dict[str, Any]]:
    """One batch and context: every draft against the dense loop, Hugging Face's `generate` going on
    beside them."""
    asked = _asked(engine, context, batch, flags.tokens)
    began = time.perf_counter()
    prefill = Pair(engine, asked.requests, asked.prepare, Draft("full", gamma=1)).prefill_s
    vision = time.perf_counter() - began - prefill
    pairs = {
        name: Pair(engine, asked.requests, asked.prepare, draft)
        for name, draft in drafts(engine).items()
    }
    segment = _segment(flags, pairs)

    def turn() -> None:
        for pair in pairs.values():
            pair.once(segment)

    theirs = None
    prompts = [asked.prepare(request) for request in asked.requests]
    if flags.hugging_face:
        theirs = generate_timing.beside(engine.model, prompts, segment, flags.pairs, turn=turn)
    else:
        for _ in range(flags.pairs):
            turn()
    cost = {
        "vision_ms": vision,
        "prefill_ms": prefill,
        "hf_prefill_ms": theirs.prefill_s if theirs else None,
    }
    lookup = None
    if (
        theirs and batch == 1 and not engine.checkpoint.supports_video
    ):  # it drafts a video's placeholders and fails
        lookup = generate_timing.lookup(engine.model, prompts, segment * flags.pairs)
    padded: dict[int, list[list[int]]] = {}
    longest = max(len(row) for pair in pairs.values() for row in pair.written)
    rows = []
    for name, pair in pairs.items():
        row = {
            **asdict(pair.policy),
            "model": flags.model,
            "batch": batch,
            "context": context,
            "policy": name,
        }
        row |= _times(engine, pair, context, bandwidth) | {
            key: _ms(value) for key, value in cost.items()
        }
        width = pair.policy.gamma + 1
        padded[width] = padded.get(width) or pair.from_the_start(width, longest)
        same = [
            ours == dense[: len(ours)]
            for ours, dense in zip(pair.written, padded[width], strict=True)
        ]
        row |= {
            "identical": sum(same),
            "rows": batch,
            "diverged": len(pair.diverged),
            "select_ms": _ms(pair.prefill_s),
        }
        per_token = statistics.median(pair.drafted.per_token)
        row["decode_ms"] = _ms(per_token * flags.tokens)
        if theirs:
            row["vs_hf_generate"] = round(statistics.median(theirs.per_token) / per_token, 3)
            row["vs_hf_lookup"] = round(lookup / per_token, 3) if lookup else None
            whole = theirs.prefill_s + statistics.median(theirs.per_token) * flags.tokens
            ours_whole = vision + prefill + pair.prefill_s + per_token * flags.tokens
            row["speedup_end_to_end"] = round(whole / ours_whole, 3)
        rows.append(row)
    return rows


def _times(engine: Engine, pair: Pair, context: int, bandwidth: float) -> dict[str, Any]:
    """Times of the steps, in ms, and what bytes allow."""
    dense = pair.dense
    drafted = pair.drafted
    gamma = pair.policy.gamma
    dense_s, draft_s, verify_s = (
        statistics.median(x or [0.0]) for x in (dense.verify, drafted.draft, drafted.verify)
    )
    median, low = ratio(dense.per_token, drafted.per_token)
    tokens = statistics.fmean(drafted.kept)
    size = engine.model.dtype.itemsize
    model_size = ModelSize.of(engine.model.hf.config, size, size)
    rows = len(pair.written)
    whole = model_size.step_bytes([context] * rows)
    held = [row.kv_keep * context for row in pair.batch.rows if row is not None]
    part = 0.0 if pair.policy.policy == "ngram" else model_size.step_bytes(held, pair.policy)
    large = whole > LARGE
    return {
        "dense_ms": _ms(dense_s),
        "draft_ms": _ms(draft_s),
        "verify_ms": _ms(verify_s),
        "verify_t8_ms": _ms(pair.verification(8)),
        "dense_bytes": round(whole),
        "draft_bytes": round(part),
        "dense_fraction_of_bound": round(whole / bandwidth / 1e9 / dense_s, 3) if large else None,
        "bound": round(speedup(tokens, gamma, part, whole, whole), 3) if large else None,
        "accepted_per_round": round(tokens - 1, 3),
        "speedup": round(median, 3),
        "speedup_low": round(low, 3),
    }


def table(model: str, rows: Sequence[dict[str, Any]]) -> Table:
    """For people; some of the same figures."""
    found = Table(*COLUMNS, title=f"decoding of {model}")
    for row in rows:
        found.add_row(*(str(row.get(column, "")) for column in COLUMNS))
    return found


def _questions(engine: Engine, flags: Flags, context: int) -> dict[str, Any] | None:
    """Eight questions on each of four videos, of a model that sees."""
    if not (flags.hugging_face and engine.checkpoint.supports_video):
        return None
    return questions.measured(engine, context, Draft("specvlm", keep=0.1, gamma=4))


def _segment(flags: Flags, pairs: dict[str, Pair]) -> int:
    """Tokens of a segment, so that all of them fit what a row may write."""
    widest = max(pair.policy.gamma for pair in pairs.values()) + 1
    segment = min(32, (flags.tokens - 2) // flags.pairs - widest)
    if segment < 1:
        raise UsageError(
            f"--tokens is {flags.tokens}: {flags.pairs} pairs need at least {flags.pairs * (widest + 1) + 2}"
        )
    return segment


def _engine(flags: Flags) -> Engine:
    if flags.model in shapes.SHAPES:
        return shapes.engine(flags.model, flags.dtype, flags.device)
    with tempfile.TemporaryDirectory() as folder:
        return subjects.engine_of(
            flags.model, Path(folder), flags.threads, dtype=flags.dtype, device=flags.device
        )


def _asked(engine: Engine, context: int, batch: int, tokens: int) -> Subject:
    if not engine.checkpoint.supports_video and isinstance(engine.checkpoint, shapes.Shaped):
        return shapes.subject(engine, context, batch, tokens)
    asked = subjects.subject(engine.checkpoint, context, range(batch), tokens, step=0, scenes=(12,))
    return subjects.captions_of(asked)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
