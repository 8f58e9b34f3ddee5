"""How many drafted tokens the full model accepts, of every draft of the papers, on long contexts:
acceptance against what is kept and against γ, the share of weights that sequences activate
together, and what a draft's view costs in perplexity.

Budgets are equal where `kv_entries` is: entries that a draft reads per layer and KV head, text and
sinks included. `alpha` is accepted over proposed, `stderr` the standard error of
`accepted_per_round` over rounds."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jobs.suites.acceptance import measures, subjects
from jobs.suites.acceptance.subjects import Subject
from pipeline.command_line import (
    parse_flags,
)
from pipeline.records import UsageError
from std_core.engine.engine import Engine
from std_core.model.drafters import step_weight_bytes
from std_core.types import Draft, Result

GAMMA = 5
KEEP = 0.2
CHANNELS = 0.5
PRUNED = 0.1  # what SpecVLM keeps
KEEPS = (0.05, 0.1, 0.2, 0.3, 0.5)
GAMMAS = (2, 5, 9)
NUCLEI = (0.1, 0.3, 0.5, 0.9)
SAMPLES = 2  # prompts besides the measured ones, from which λ is chosen
BATCHES = (1, 2, 4, 8)
SHORT = 512  # tokens of context where activations are recorded
PROMPTS, TOKENS = (
    {False: 4, True: 8},
    {False: 40, True: 96},
)  # by whether the model sees; tokens are per request
SCORED = 128  # tokens of each prompt's continuation that perplexity is of
COLUMNS = (
    "draft",
    "budget",
    "gamma",
    "context",
    "accepted_per_round",
    "stderr",
    "alpha",
    "kv_entries",
    "weight_bytes",
)


@dataclass(frozen=True)
class Flags:
    """The suite's command line."""

    model: str = "demo"
    context: int = 4100  # tokens, of a model that sees visual tokens
    prompts: int | None = None  # pieces of prose, 4, or clips, 8
    tokens: int | None = None  # per request; 40 of prose, up to 96 of a clip
    threads: int = 2


def run(argv: list[str]) -> dict[str, Any]:
    """The suite's figures; the table goes to standard error."""
    flags: Flags = parse_flags(Flags, argv, "benchmark.py --suite acceptance")
    for name, least in (("context", 128), ("prompts", 1), ("tokens", 2)):
        if (value := getattr(flags, name)) is not None and value < least:
            raise UsageError(f"--{name} is {value}: at least {least} is needed")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        engine = subjects.engine_of(flags.model, Path(folder), flags.threads)
    prompts = flags.prompts or PROMPTS[engine.checkpoint.supports_video]
    asked = _asked(flags, engine, range(prompts))
    engine = replace(engine, max_num_seqs=asked.contexts())
    chosen, tried = nucleus(engine, _asked(flags, engine, range(prompts, prompts + SAMPLES)))
    dense = {r.request_id: r.token_ids for r in _answered(engine, asked, None)}
    console = Console(stderr=True, width=140)
    rows = []
    for name, draft in drafts(chosen):
        rows.append(figures(engine, asked, name, draft, dense=dense))
        console.log(
            f"{name} {rows[-1]['budget']}: {rows[-1]['accepted_per_round']}, {rows[-1]['seconds']} s"
        )
    console.print(table(flags.model, rows))
    return {
        "model": flags.model,
        "rows": rows,
        "nucleus": chosen,
        "nuclei": tried,
        **_sparsity(flags, engine),
        "perplexity": _perplexities(engine, asked),
        "seconds": round(time.monotonic() - began, 1),
    }


def drafts(nucleus: float) -> Iterator[tuple[str, Draft]]:
    """What is measured, by name: each draft of the papers, then the curves over K and γ of those
    that select."""
    sees_all: dict[str, Any] = {"policy": "full", "keep": 1.0, "gamma": GAMMA}
    yield "std", Draft("std", keep=1.0, gamma=GAMMA)
    for keep in KEEPS:
        for policy in ("std", "snapkv", "specvlm", "random", "window"):
            yield policy, Draft(policy, keep=keep, gamma=GAMMA, nucleus=nucleus)
    yield "specvlm_stage1", Draft("specvlm", keep=PRUNED, gamma=GAMMA, nucleus=1.0)
    for rounds in (1, 2):
        yield f"refresh_{rounds}", Draft("std", keep=KEEP, gamma=GAMMA, refresh=rounds)
    for gamma in GAMMAS:
        if gamma != GAMMA:
            yield "std", Draft("std", keep=KEEP, gamma=gamma)
    yield "layerskip", Draft(**sees_all, depth=0.5)
    yield "teal", Draft(**sees_all, channels=CHANNELS)
    yield "composition", Draft("snapkv", keep=0.3, gamma=GAMMA, channels=CHANNELS)
    yield "int8", Draft(**sees_all, weights="int8")
    yield "int4", Draft(**sees_all, weights="int4")
    yield "ngram", Draft("ngram", gamma=GAMMA)


def nucleus(engine: Engine, samples: Subject) -> tuple[float, dict[str, float]]:
    """λ of `specvlm` at 90% pruning, by acceptance on samples that are not measured later; and the
    acceptance of each."""
    own = replace(engine, max_num_seqs=samples.contexts(), prefixes=None)
    tried = {}
    for share in NUCLEI:
        results = _answered(own, samples, Draft("specvlm", keep=PRUNED, gamma=GAMMA, nucleus=share))
        tried[share] = round(_accepted(results)[0], 4)
    return max(tried, key=lambda share: tried[share]), {
        str(share): rate for share, rate in tried.items()
    }


def figures(
    engine: Engine, asked: Subject, name: str, draft: Draft, dense: dict[str, list[int]]
) -> dict[str, Any]:
    """One row: what became of all requests under a draft."""
    began = time.monotonic()
    results = _answered(engine, asked, draft)
    contexts = {r.request_id: r.num_prompt_tokens + r.num_visual_tokens for r in results}
    rate, stderr = _accepted(results)
    questions = [subjects.is_question(r.request_id) for r in results]
    row = {
        "draft": name,
        "budget": 0.0 if draft.policy == "ngram" else draft.keep,
        "gamma": draft.gamma,
        "context": round(statistics.mean(contexts.values()), 1),
        "accepted_per_round": round(rate, 4),
        "stderr": round(stderr, 4),
        "alpha": round(
            sum(r.accepted for r in results) / max(1, sum(r.proposed for r in results)), 4
        ),
        "kv_entries": round(
            statistics.mean(r.kv_keep * contexts[r.request_id] for r in results), 1
        ),
        "weight_bytes": 0 if draft.policy == "ngram" else step_weight_bytes(engine.drafter(draft)),
        "rounds": sum(r.rounds for r in results),
        "identical": sum(r.token_ids == dense[r.request_id] for r in results),
        "requests": len(results),
    }
    if any(questions):
        row["captions"] = round(
            _accepted([r for r, q in zip(results, questions, strict=True) if not q])[0], 4
        )
        row["questions"] = round(
            _accepted([r for r, q in zip(results, questions, strict=True) if q])[0], 4
        )
    return row | {"seconds": round(time.monotonic() - began, 1)}


def table(model: str, rows: list[dict[str, Any]]) -> Table:
    """For people; the same figures."""
    columns = [*COLUMNS, *(name for name in ("captions", "questions") if name in rows[0])]
    found = Table(*columns, title=f"acceptance of {model}")
    for row in rows:
        found.add_row(*(f"{row[c]:,}" if isinstance(row[c], int) else str(row[c]) for c in columns))
    return found


def _asked(flags: Flags, engine: Engine, prompts: range) -> Subject:
    tokens = flags.tokens or TOKENS[engine.checkpoint.supports_video]
    return subjects.subject(engine.checkpoint, flags.context, prompts, tokens, SCORED + 1)


def _answered(engine: Engine, asked: Subject, draft: Draft | None) -> list[Result]:
    results = list(engine.run(asked.requests, draft, asked.prepare))
    for result in results:
        if result.error is not None:
            raise result.error
    return results


def _accepted(results: list[Result]) -> tuple[float, float]:
    """Drafted tokens accepted per round, and the standard error."""
    rounds = [i for r in results for i, n in enumerate(r.accept_counts) for _ in range(n)]
    if not rounds:
        return 0.0, 0.0
    return statistics.fmean(rounds), statistics.pstdev(rounds) / len(rounds) ** 0.5


def _sparsity(flags: Flags, engine: Engine) -> dict[str, Any]:
    """u_B with thresholds of a half of the recorded decode steps, measured on the other; and what
    the thresholds that the engine drafted with, which a prompt gave it, keep at decode steps."""
    whole = subjects.subject(
        engine.checkpoint, min(SHORT, flags.context), range(measures.SEQUENCES), 1
    )
    seen = measures.at_decode(engine, subjects.captions_of(whole))
    half = measures.STEPS // 2
    fitted = measures.calibrated(engine, {name: x[:half] for name, x in seen.items()}, CHANNELS)
    held_out = {name: x[half:] for name, x in seen.items()}
    drafted = measures.joint_shares(engine, held_out, engine.thresholds[CHANNELS], (1,))
    return {
        "u": measures.joint_shares(engine, held_out, fitted, BATCHES),
        "teal_keep": drafted["1"],
    }


def _perplexities(engine: Engine, asked: Subject) -> dict[str, float]:
    """Of prose alone: what follows a clip is not known."""
    if not asked.following:
        return {}
    views = {"dense": Draft("full"), f"snapkv {PRUNED}": Draft("snapkv", keep=PRUNED)}
    for keep in (KEEP, 0.3):
        views |= {
            f"{policy} {keep}": Draft(policy, keep=keep) for policy in ("snapkv", "std", "window")
        }
    views |= {
        f"random {KEEP}": Draft("random", keep=KEEP),
        f"channels {CHANNELS}": Draft("full", channels=CHANNELS),
        f"snapkv 0.3, channels {CHANNELS}": Draft("snapkv", keep=0.3, channels=CHANNELS),
    }
    return {
        name: round(measures.perplexity(engine, asked, draft), 3) for name, draft in views.items()
    }
