"""Whether drafting changes a token: every preset of conf/draft, γ, slots, budgets, chunk sizes and
kinds of sampling on several models, compared with the dense loop and Hugging Face's `generate`.

The grid is too large to run whole; a seeded sample is taken in which every pair of values occurs.
In bfloat16 a step of another shape may round to another token: there the share of texts that depart
from the dense loop's is counted, with the difference of the two largest logits at that token. Under
`strict` none may depart."""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from jobs.demo_model import world
from jobs.suites.shared import reference
from jobs.suites.shared.flags import parse_suite_flags
from jobs.suites.shared.timing import Stopwatch
from jobs.suites.shared.tiny_models import FAMILIES
from jobs.suites.shared.workload import checkpoint_path, long_topics, raise_errors
from pipeline.command_line import flag
from pipeline.config import Job, draft_of, model_path, presets
from pipeline.records import UsageError
from std_core.engine.engine import Engine
from std_core.types import Draft, Request, Result, Sampling

STRICT_WIDTH = 13  # tokens per row of a strict verification
SECOND_SEED = 9  # of the tiny model that drafts for another
LARGE_MODEL = "smollm2"
LARGE_MODEL_REQUESTS = 4
POLICIES: dict[str, Draft | None] = {
    "dense": None,
    "full": Draft("full"),
    **{name: draft_of(Job(draft=name)) for name in presets("draft")},
}
BUDGETS: dict[str, dict[str, Any]] = {
    "k=1": {"k": 1},
    "k=9": {"k": 9},
    "r_KV=0.1": {"keep": 0.1},
    "r_KV=0.3": {"keep": 0.3},
    "k=10000": {"k": 10_000},
}
GRID: dict[str, Sequence[Any]] = {
    "model": ("demo", *FAMILIES, LARGE_MODEL),
    "policy": tuple(POLICIES),
    "gamma": tuple(range(1, 13)),
    "slots": (1, 3, 8),
    "budget": tuple(BUDGETS),
    "kind": ("greedy", "stops", "penalties", "seeded"),
    "chunk": (16, 100, 2048),
}
# policies and γ that are run in bfloat16
BF16_DRAFTS = (
    ("std", 5),
    ("random", 12),
    ("refresh", 3),
    ("ngram", 8),
    ("int4", 2),
)
BF16_BUDGET = "r_KV=0.1"
CANDIDATES = 60  # drawn for each case of the sample
GridCase = Mapping[str, Any]  # a value for each key of the grid
Texts = dict[str, list[int]]  # token ids by `request_id`


@dataclass(frozen=True)
class Flags:
    """The suite's command line."""

    seed: int = flag(0, "of the sample")
    model: tuple[str, ...] = flag((), "of the grid; may be given several times; default: all")
    cases: int | None = flag(None, "at most; default: until every pair has occurred")
    requests: int = flag(8, "per case; at most 4 on the largest model")
    threads: int = flag(2, "CPU threads of PyTorch")


@dataclass
class PolicyTally:
    """Sums over the cases of one policy."""

    identical: int = 0
    total: int = 0
    proposed: int = 0
    accepted: int = 0
    cases: int = 0

    def add(self, results: Sequence[Result], identical: int) -> None:
        self.identical += identical
        self.total += len(results)
        self.proposed += sum(r.proposed for r in results)
        self.accepted += sum(r.accepted for r in results)
        self.cases += 1


def run(argv: list[str]) -> dict[str, Any]:
    """Return the suite's figures."""
    flags = parse_suite_flags(Flags, argv, "lossless", __doc__)
    models = flags.model or GRID["model"]
    if unknown := set(models) - set(GRID["model"]):
        raise UsageError(f"--model {min(unknown)!r} is none of {', '.join(GRID['model'])}")
    watch = Stopwatch()
    torch.set_num_threads(flags.threads)
    cases = pairwise_cases(GRID | {"model": models}, flags.seed)[: flags.cases]
    cases.sort(key=lambda case: case["model"])
    policies = {name: PolicyTally() for name in POLICIES}
    bfloat16 = Bfloat16Figures()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for name, cases_of_model in itertools.groupby(cases, key=lambda case: case["model"]):
            tested = ModelUnderTest.load(name, Path(folder), flags.requests)
            for case in cases_of_model:
                results = tested.run_case(case)
                accepted_texts = tested.accepted_texts(case["kind"])
                identical = sum(r.token_ids in accepted_texts[r.request_id] for r in results)
                policies[case["policy"]].add(results, identical)
                if identical < len(results):
                    wrong.append({**case, "identical": identical, "total": len(results)})
            compare_in_bfloat16(tested, bfloat16)
    return {
        "policies": {name: asdict(tally) for name, tally in policies.items()},
        "identical": sum(tally.identical for tally in policies.values()),
        "total": sum(tally.total for tally in policies.values()),
        "wrong": wrong,
        "bf16": bfloat16.as_json(),
        "models": list(models),
        "cases": len(cases),
        "seed": flags.seed,
        "seconds": round(watch.seconds, 1),
    }


def pairwise_cases(grid: Mapping[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Cases in which every two values of different keys occur together at least once.

    Greedy: each case is drawn around a missing pair, the best of `CANDIDATES` that have it.
    """
    rng = random.Random(f"lossless {seed}")
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(grid, 2)
        for x in grid[a]
        for y in grid[b]
    }
    cases = []
    while missing:
        fixed = dict(rng.choice(sorted(missing, key=str)))
        candidates = [
            {key: fixed.get(key, rng.choice(values)) for key, values in grid.items()}
            for _ in range(CANDIDATES)
        ]
        best = max(candidates, key=lambda case: len(_pairs(case) & missing))
        missing -= _pairs(best)
        cases.append(best)
    return cases


def _pairs(case: GridCase) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(case.items(), 2))


# ------------------------------------------------------------------------------------------ a model


class ModelUnderTest:
    """A model, its requests, and their reference texts.

    Args:
        path, second_path: checkpoints of the model and of one that drafts for it.
    """

    def __init__(self, name: str, path: str, second_path: str, requests: int):
        self.path = path
        self.second_path = second_path
        self.engine = Engine.load(path)
        large = name == LARGE_MODEL
        if self.engine.checkpoint.supports_video:
            drawn = _clip_requests()
        else:
            drawn = _prose_requests(max_chars=1500 if large else 500)
        count = min(requests, LARGE_MODEL_REQUESTS) if large else requests
        self.requests = list(itertools.islice(drawn, count))
        self.accepted_texts = functools.cache(self._accepted_texts)
        self.dense_texts = functools.cache(self._dense_texts)

    @classmethod
    def load(cls, name: str, folder: Path, requests: int) -> ModelUnderTest:
        path = checkpoint_path(name, folder / name)
        if name == "demo":
            second_path = model_path("demo_small")
        elif name == LARGE_MODEL:
            second_path = path  # there is no smaller model with its tokenizer
        else:
            second_path = checkpoint_path(name, folder / f"{name}-2", seed=SECOND_SEED)
        return cls(name, path, second_path, requests)

    def draft(self, policy: str, gamma: int, budget: str) -> Draft | None:
        draft = POLICIES[policy]
        if draft is None:
            return None
        second_path = self.second_path if draft.model else ""
        return replace(draft, gamma=gamma, **BUDGETS[budget], model=second_path)

    def run_case(self, case: GridCase) -> list[Result]:
        engine = replace(self.engine, max_num_seqs=case["slots"], prefill_chunk=case["chunk"])
        draft = self.draft(case["policy"], case["gamma"], case["budget"])
        return _run_engine(engine, self.requests_of(case["kind"]), draft)

    def requests_of(self, kind: str) -> list[Request]:
        """The requests with one kind of sampling."""
        return [
            replace(request, sampling=self._sampling(kind, index, request))
            for index, request in enumerate(self.requests)
        ]

    def _sampling(self, kind: str, index: int, request: Request) -> Sampling:
        """Stop ids are taken from the request's greedy text, so that they fall inside drafts; the
        minimum length has to delay one."""
        base = request.sampling
        if kind == "seeded":
            return replace(
                base, temperature=0.9, top_p=0.95, top_k=40, repetition_penalty=1.1, seed=index
            )
        if kind == "greedy":
            return base
        greedy = self.dense_texts("greedy")[request.request_id]
        if kind == "stops":
            return replace(base, stop_token_ids=(greedy[len(greedy) // 2],))
        return replace(
            base,
            repetition_penalty=1.3,
            min_tokens=base.max_tokens // 3,
            stop_token_ids=(greedy[0],),
        )

    def _dense_texts(self, kind: str) -> Texts:
        one_slot = replace(self.engine, max_num_seqs=1)
        return _texts(one_slot, self.requests_of(kind), None)

    def _accepted_texts(self, kind: str) -> dict[str, list[list[int]]]:
        """By request, the texts that count as identical: the dense loop's, and none where that
        differs from `generate`'s."""
        dense = self.dense_texts(kind)
        if kind == "seeded":  # `generate` has no seed per row
            return {name: [text] for name, text in dense.items()}
        accepted = {}
        for request in self.requests_of(kind):
            inputs = self.engine.checkpoint.preprocess(request)
            expected = reference.generate(self.engine.model, inputs, request.sampling)
            text = dense[request.request_id]
            accepted[request.request_id] = [text] if text == expected else []
        return accepted


def _run_engine(engine: Engine, requests: Sequence[Request], draft: Draft | None) -> list[Result]:
    return list(raise_errors(engine.run(requests, draft)))


def _texts(engine: Engine, requests: Sequence[Request], draft: Draft | None) -> Texts:
    return {r.request_id: r.token_ids for r in _run_engine(engine, requests, draft)}


def _prose_requests(max_chars: int) -> Iterator[Request]:
    """Pieces of the standard library's documentation of at most `max_chars` characters."""
    rng = random.Random(7)
    topics = long_topics()
    for number in itertools.count():
        start = rng.randrange(1000)
        length = rng.randint(40, max_chars)
        prompt = topics[number % len(topics)][start : start + length]
        yield Request(str(number), prompt, sampling=_random_length(rng))


def _clip_requests() -> Iterator[Request]:
    """Requests of different contexts and lengths: some share a video, one has two videos, one
    images, one nothing but text."""
    rng = random.Random(7)
    clips = []
    for scenes in (4, 1, 6, 2, 3):
        height, width = rng.choice(((84, 112), (112, 84), (84, 84)))
        pixels = world.clip_frames(rng, world.draw_scenes(rng, scenes), height, width, rate=2)
        clips.append(torch.from_numpy(pixels))
    caption = rng.choice(world.CAPTION_PROMPTS)
    first = clips[0]
    yield Request("caption", caption, first, video_id="0", sampling=_random_length(rng))
    question = "Which shape is in scene 2?"
    yield Request("question", question, first, video_id="0", sampling=_random_length(rng))
    yield Request("text", "Which shapes are there?", sampling=_random_length(rng))
    yield Request("two", "Compare.", clips[1], videos=(clips[3],), sampling=_random_length(rng))
    images = (clips[2][0], clips[4][0])
    yield Request("images", "What is in these?", images=images, sampling=_random_length(rng))
    for number in itertools.count():
        clip = rng.randrange(len(clips))
        yield Request(
            str(number),
            prompt=f"What is in scene {number}?",
            frames=clips[clip],
            video_id=str(clip),
            sampling=_random_length(rng),
        )


def _random_length(rng: random.Random) -> Sampling:
    return Sampling(rng.randint(6, 36))


# ----------------------------------------------------------------------------------------- bfloat16


@dataclass
class Bfloat16Figures:
    """Texts compared in bfloat16, over all models.

    Args:
        rows, strict_rows: drafted texts compared, without and with `strict`.
        gaps: differences of the two largest logits, one for each text that departed.
        strict_from_dense: strict dense texts that depart from the plain dense loop's.
    """

    rows: int = 0
    gaps: list[float] = field(default_factory=list)
    strict_rows: int = 0
    strict_diverged: int = 0
    strict_from_dense: int = 0

    def as_json(self) -> dict[str, Any]:
        gaps = self.gaps
        return {
            "rows": self.rows,
            "diverged": len(gaps),
            "rate": round(len(gaps) / self.rows, 4),
            "top2_gap": {"median": statistics.median(gaps), "max": max(gaps)} if gaps else {},
            "strict": {"rows": self.strict_rows, "diverged": self.strict_diverged},
            "strict_dense_from_width_1": self.strict_from_dense,
        }


def compare_in_bfloat16(tested: ModelUnderTest, figures: Bfloat16Figures) -> None:
    """Add one model's texts to the figures. The strict drafts run in the opposite order, so that
    other rows share the batch."""
    plain = replace(Engine.load(tested.path, dtype="bfloat16"), max_num_seqs=8)
    strict = replace(plain, strict=STRICT_WIDTH, max_num_seqs=3)
    requests = tested.requests_of("greedy")
    dense = _texts(plain, requests, None)
    strict_dense = _texts(strict, requests, None)
    figures.strict_from_dense += _count_different(strict_dense, dense)
    for policy, gamma in BF16_DRAFTS:
        draft = tested.draft(policy, gamma, BF16_BUDGET)
        drafted = _texts(plain, requests, draft)
        figures.rows += len(drafted)
        for request in requests:
            name = request.request_id
            if drafted[name] != dense[name]:
                figures.gaps.append(_logit_gap(plain, request, dense[name], drafted[name]))
        strict_drafted = _texts(strict, requests[::-1], draft)
        figures.strict_rows += len(strict_drafted)
        figures.strict_diverged += _count_different(strict_drafted, strict_dense)


def _count_different(texts: Texts, expected: Texts) -> int:
    return sum(text != expected[name] for name, text in texts.items())


@torch.inference_mode()
def _logit_gap(
    engine: Engine, request: Request, text: Sequence[int], other: Sequence[int]
) -> float:
    """Difference of the two largest logits at the first token in which two texts differ."""
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))
    prefix = torch.tensor([[token for token, _ in equal]], dtype=torch.long)
    inputs = engine.checkpoint.preprocess(request)
    with_prefix = replace(
        inputs,
        ids=torch.cat([inputs.ids, prefix], dim=1),
        token_types=torch.cat([inputs.token_types, torch.zeros_like(prefix)], dim=1),
    )
    largest = engine.model.prompt_logits(with_prefix).float().topk(2).values
    return float(largest[0] - largest[1])
