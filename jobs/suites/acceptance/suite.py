"""How many drafted tokens the full model accepts on long contexts, for every draft of the papers:
acceptance against the share of the cache that is kept and against γ, the share of weights that
sequences activate together, and the perplexity through a draft's view.

Drafts with equal `kv_entries` have equal budgets: entries that a draft reads per layer and KV head,
text and sinks included. `alpha` is accepted over proposed tokens, `stderr` the standard error of
`accepted_per_round` over rounds."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from jobs.suites.acceptance.perplexity import perplexity
from jobs.suites.shared import activations, workload
from jobs.suites.shared.flags import ModelFlags, parse_suite_flags, require_at_least
from jobs.suites.shared.tables import figures_table, stderr_console
from jobs.suites.shared.timing import Stopwatch
from jobs.suites.shared.workload import Workload, raise_errors
from pipeline.command_line import flag
from std_core.engine.engine import Engine
from std_core.model.drafters import step_weight_bytes
from std_core.types import Draft, Result

GAMMA = 5
OTHER_GAMMAS = (2, 9)
KEEP = 0.2
KEEPS = (0.05, 0.1, 0.2, 0.3, 0.5)
CHANNELS = 0.5
SPECVLM_KEEP = 0.1  # SpecVLM prunes 90% of the visual tokens
NUCLEI = (0.1, 0.3, 0.5, 0.9)
NUCLEUS_PROMPTS = 2  # from which λ is chosen, besides the measured ones
BATCHES = (1, 2, 4, 8)
ACTIVATIONS_CONTEXT = 512  # tokens of the prompts whose decode steps are recorded
SCORED = 128  # tokens of each continuation whose perplexity is measured
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
class WorkloadSize:
    """`tokens`: written per request."""

    prompts: int
    tokens: int


PROSE = WorkloadSize(prompts=4, tokens=40)
CLIPS = WorkloadSize(prompts=8, tokens=96)


@dataclass(frozen=True)
class Flags(ModelFlags):
    """The suite's command line."""

    context: int = flag(4100, "tokens of a prompt at least; of a Video-LLM, visual tokens")
    prompts: int | None = flag(None, "pieces of prose, default 4, or clips, default 8")
    tokens: int | None = flag(None, "per request: 40 on prose, up to 96 on a clip by default")


class Acceptance(NamedTuple):
    """Accepted drafted tokens per round."""

    per_round: float
    stderr: float  # over rounds


@dataclass(frozen=True)
class DraftFigures:
    """One row of the result: all requests under one draft."""

    draft: str
    budget: float
    gamma: int
    context: float
    accepted_per_round: float
    stderr: float
    alpha: float
    kv_entries: float
    weight_bytes: int
    rounds: int
    identical: int
    requests: int
    captions: float | None  # accepted per round; None on prose
    questions: float | None
    seconds: float

    def as_row(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class NucleusChoice(NamedTuple):
    """λ of `specvlm`, and the accepted tokens per round of each λ that was tried."""

    nucleus: float
    accepted: dict[str, float]


def run(argv: list[str]) -> dict[str, Any]:
    """Return the suite's figures; progress and the table go to standard error."""
    flags = parse_suite_flags(Flags, argv, "acceptance", __doc__)
    require_at_least(flags, context=128, prompts=1, tokens=2)
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        engine = workload.load_engine(flags.model, Path(folder), flags.threads)
    size = _workload_size(flags, engine)
    measured = _build_workload(flags, engine, range(size.prompts))
    samples = _build_workload(flags, engine, range(size.prompts, size.prompts + NUCLEUS_PROMPTS))
    engine = replace(engine, max_num_seqs=measured.prefix_count)
    choice = choose_nucleus(engine, samples)
    dense = {r.request_id: r.token_ids for r in _run_draft(engine, measured, None)}
    console = stderr_console(140)
    rows = []
    for name, draft in drafts(choice.nucleus):
        row = measure_draft(engine, measured, name, draft, dense_tokens=dense)
        console.log(f"{name} {row.budget}: {row.accepted_per_round}, {row.seconds} s")
        rows.append(row.as_row())
    console.print(table(flags.model, rows))
    return {
        "model": flags.model,
        "rows": rows,
        "nucleus": choice.nucleus,
        "nuclei": choice.accepted,
        **_weight_sparsity(flags, engine),
        "perplexity": _perplexities(engine, measured),
        "seconds": round(watch.seconds, 1),
    }


def drafts(nucleus: float) -> Iterator[tuple[str, Draft]]:
    """The measured drafts by name: each draft of the papers, and the curves over K and γ."""
    full_view: dict[str, Any] = {"policy": "full", "keep": 1.0, "gamma": GAMMA}
    yield "std", Draft("std", keep=1.0, gamma=GAMMA)
    for keep in KEEPS:
        for policy in ("std", "snapkv", "specvlm", "random", "window"):
            yield policy, Draft(policy, keep=keep, gamma=GAMMA, nucleus=nucleus)
    yield "specvlm_stage1", Draft("specvlm", keep=SPECVLM_KEEP, gamma=GAMMA, nucleus=1.0)
    for rounds in (1, 2):
        yield f"refresh_{rounds}", Draft("std", keep=KEEP, gamma=GAMMA, refresh=rounds)
    for gamma in OTHER_GAMMAS:
        yield "std", Draft("std", keep=KEEP, gamma=gamma)
    yield "layerskip", Draft(**full_view, depth=0.5)
    yield "teal", Draft(**full_view, channels=CHANNELS)
    yield "composition", Draft("snapkv", keep=0.3, gamma=GAMMA, channels=CHANNELS)
    yield "int8", Draft(**full_view, weights="int8")
    yield "int4", Draft(**full_view, weights="int4")
    yield "ngram", Draft("ngram", gamma=GAMMA)


def choose_nucleus(engine: Engine, samples: Workload) -> NucleusChoice:
    """Choose λ of `specvlm` at 90% pruning by acceptance on prompts that are not measured later."""
    own = replace(engine, max_num_seqs=samples.prefix_count, prefixes=None)
    accepted = {}
    for nucleus in NUCLEI:
        draft = Draft("specvlm", keep=SPECVLM_KEEP, gamma=GAMMA, nucleus=nucleus)
        accepted[nucleus] = round(acceptance(_run_draft(own, samples, draft)).per_round, 4)
    best = max(accepted, key=lambda nucleus: accepted[nucleus])
    return NucleusChoice(best, {str(nucleus): rate for nucleus, rate in accepted.items()})


def measure_draft(
    engine: Engine,
    measured: Workload,
    name: str,
    draft: Draft,
    dense_tokens: Mapping[str, list[int]],
) -> DraftFigures:
    """Run all requests under one draft.

    Args:
        dense_tokens: the dense loop's texts by `request_id`, for `identical`.
    """
    watch = Stopwatch()
    results = _run_draft(engine, measured, draft)
    accepted = acceptance(results)
    proposed = sum(r.proposed for r in results)
    lookup = draft.policy == "ngram"
    questions = [r for r in results if workload.is_question(r.request_id)]
    captions = [r for r in results if not workload.is_question(r.request_id)]
    return DraftFigures(
        draft=name,
        budget=0.0 if lookup else draft.keep,
        gamma=draft.gamma,
        context=round(statistics.mean(map(_context, results)), 1),
        accepted_per_round=round(accepted.per_round, 4),
        stderr=round(accepted.stderr, 4),
        alpha=round(sum(r.accepted for r in results) / max(1, proposed), 4),
        kv_entries=round(statistics.mean(r.kv_keep * _context(r) for r in results), 1),
        weight_bytes=0 if lookup else step_weight_bytes(engine.draft_models.get(draft)),
        rounds=sum(r.rounds for r in results),
        identical=sum(r.token_ids == dense_tokens[r.request_id] for r in results),
        requests=len(results),
        captions=round(acceptance(captions).per_round, 4) if questions else None,
        questions=round(acceptance(questions).per_round, 4) if questions else None,
        seconds=round(watch.seconds, 1),
    )


def acceptance(results: Sequence[Result]) -> Acceptance:
    """Accepted drafted tokens per round, over all rounds of all results."""
    per_round: list[int] = []
    for result in results:
        for accepted, rounds in enumerate(result.accept_counts):
            per_round += [accepted] * rounds
    if not per_round:
        return Acceptance(0.0, 0.0)
    stderr = statistics.pstdev(per_round) / len(per_round) ** 0.5
    return Acceptance(statistics.fmean(per_round), stderr)


def table(model: str, rows: Sequence[dict[str, Any]]) -> Table:
    """The rows' main figures, for people."""
    columns = [*COLUMNS, *(name for name in ("captions", "questions") if name in rows[0])]
    formatted = [
        {name: f"{value:,}" if isinstance(value, int) else value for name, value in row.items()}
        for row in rows
    ]
    return figures_table(f"acceptance of {model}", columns, formatted)


def _workload_size(flags: Flags, engine: Engine) -> WorkloadSize:
    usual = CLIPS if engine.checkpoint.supports_video else PROSE
    return WorkloadSize(flags.prompts or usual.prompts, flags.tokens or usual.tokens)


def _build_workload(flags: Flags, engine: Engine, numbers: range) -> Workload:
    return workload.build_workload(
        engine.checkpoint,
        flags.context,
        numbers,
        _workload_size(flags, engine).tokens,
        continuation=SCORED + 1,
    )


def _run_draft(engine: Engine, measured: Workload, draft: Draft | None) -> list[Result]:
    return list(raise_errors(engine.run(measured.requests, draft, measured.prepare)))


def _context(result: Result) -> int:
    return result.num_prompt_tokens + result.num_visual_tokens


def _weight_sparsity(flags: Flags, engine: Engine) -> dict[str, Any]:
    """u_B, with thresholds fitted on the first half of the recorded decode steps and measured on
    the second; and the share of weights that the engine's own thresholds, which it took from a
    prompt, keep at decode steps."""
    eight = workload.build_workload(
        engine.checkpoint,
        min(ACTIVATIONS_CONTEXT, flags.context),
        range(activations.SEQUENCES),
        max_tokens=1,
    )
    recorded = activations.record_activations(engine, workload.captions_only(eight))
    half = activations.STEPS // 2
    first_half = {name: x[:half] for name, x in recorded.items()}
    held_out = {name: x[half:] for name, x in recorded.items()}
    fitted = activations.fit_thresholds(engine, first_half, CHANNELS)
    shares = activations.joint_weight_shares(engine, held_out, fitted, BATCHES)
    own = activations.joint_weight_shares(
        engine, held_out, engine.draft_models.thresholds[CHANNELS], (1,)
    )
    return {"u": shares, "teal_keep": own["1"]}


def _perplexities(engine: Engine, measured: Workload) -> dict[str, float]:
    """By draft, on prose alone: the true continuation of a clip is not known."""
    if not measured.continuations:
        return {}
    views = {
        "dense": Draft("full"),
        f"snapkv {SPECVLM_KEEP}": Draft("snapkv", keep=SPECVLM_KEEP),
    }
    for keep in (KEEP, 0.3):
        for policy in ("snapkv", "std", "window"):
            views[f"{policy} {keep}"] = Draft(policy, keep=keep)
    views[f"random {KEEP}"] = Draft("random", keep=KEEP)
    views[f"channels {CHANNELS}"] = Draft("full", channels=CHANNELS)
    views[f"snapkv 0.3, channels {CHANNELS}"] = Draft("snapkv", keep=0.3, channels=CHANNELS)
    return {name: round(perplexity(engine, measured, draft), 3) for name, draft in views.items()}
