"""Two ranks that share a model, against one process with the whole model. The ranks are real
processes on a CPU, over gloo."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from pipeline.config import CONF, ROOT
from std_core.engine.engine import Engine
from std_core.model.drafters import step_weight_bytes
from std_core.model.tensor_parallel import TensorParallelGroup, _find_request
from std_core.types import Draft, GammaSchedule, Request, Result, Sampling

DRAFTS = {
    "dense": None,
    "std": Draft("std", keep=0.3, gamma=3),
    "specvlm": Draft("specvlm", keep=0.3, gamma=3),
    "snapkv": Draft("snapkv", k=6, gamma=3, refresh=2),
    "everything": Draft(
        "snapkv", keep=0.5, channels=0.6, depth=0.8, weights="int4", refresh=1, gamma=3
    ),
    "pair": Draft("std", keep=0.3, gamma=3, model=str(CONF / "model" / "demo_small")),
}
RANK = """
import pickle, sys, torch
from std_core.model.drafters import step_weight_bytes
from std_core.engine.engine import Engine
rank, address, work, answers = int(sys.argv[1]), *sys.argv[2:]
torch.set_num_threads(1)
torch.manual_seed(rank)  # processes of their own have generators of their own
done = []
for path, settings, requests, draft in pickle.load(open(work, "rb")):
    if not done or made != (path, settings):
        engine = Engine.load(path, tensor_parallel_size=2, rank=rank, address=address, **settings)
        made = path, settings
    late = [None, *requests[:2], None, None, *requests[2:]]  # None: no request is available yet
    results = list(engine.run(late if rank == 0 else requests[::-1], draft))
    kv_heads = engine.model.new_cache(1).key[0].shape[1]
    done.append((results, kv_heads, step_weight_bytes(engine.model)))
pickle.dump(done, open(answers, "wb"))
"""
SCHEDULE = GammaSchedule(((2, 0, 4, 5), (0, 3, 1, 2)), 0.6)
Tokens = dict[str, list[int]]


class Case(NamedTuple):
    path: str
    settings: dict[str, Any]
    requests: list[Request | GammaSchedule]
    draft: Draft | None


class Answer(NamedTuple):
    results: list[Result]
    kv_heads: int  # of the caches
    weights: int  # bytes

    @property
    def tokens(self) -> Tokens:
        return {r.request_id: r.token_ids for r in self.results}


@pytest.fixture(scope="session")
def clips(requests: list[Request]) -> list[Request]:
    """Three clips; the second one's text is sampled with a seed."""
    drawn = Sampling(9, temperature=0.7, seed=3)
    return [
        replace(r, sampling=drawn if i == 1 else Sampling(8 + i))
        for i, r in enumerate(requests[:3])
    ]


def two_ranks(cases: list[Case], folder: Path) -> list[tuple[Answer, Answer]]:
    """Run the cases on two ranks."""
    (folder / "work").write_bytes(pickle.dumps([tuple(case) for case in cases]))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                RANK,
                str(rank),
                address,
                str(folder / "work"),
                str(folder / str(rank)),
            ],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    first, second = (pickle.loads((folder / str(rank)).read_bytes()) for rank in range(2))
    return [(Answer(*a), Answer(*b)) for a, b in zip(first, second, strict=True)]


@pytest.fixture(scope="session")
def answers(
    tiny_model: Path,
    families: Callable[[str], Path],
    clips: list[Request],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Answer, Answer]]:
    """Run all cases in one pair of processes."""
    path = str(tiny_model)
    slots = {"max_num_seqs": 2}
    fresh = [replace(r, sampling=Sampling(8, temperature=1.0)) for r in clips]
    strict = slots | {"dtype": "bfloat16", "strict": 9}
    cases = {name: Case(path, slots, clips, draft) for name, draft in DRAFTS.items()}
    cases["fresh"] = cases["fresh_again"] = Case(path, slots, fresh, DRAFTS["std"])
    cases["strict"] = Case(path, strict, clips, None)
    cases["strict_std"] = Case(path, strict, clips[::-1], Draft("random", k=2, gamma=8))
    cases["qwen3_vl"] = Case(str(families("qwen3_vl")), slots, clips[:2], DRAFTS["specvlm"])
    cases["scheduled"] = Case(path, slots, [SCHEDULE, *clips], Draft("random", k=2, gamma=5))
    cases["demo"] = Case(str(CONF / "model" / "demo"), slots, clips[:2], DRAFTS["specvlm"])
    return dict(
        zip(cases, two_ranks(list(cases.values()), tmp_path_factory.mktemp("ranks")), strict=True)
    )


@pytest.fixture(scope="session")
def single_process(engine: Engine, clips: list[Request]) -> Callable[[str], list[Result]]:
    """Run a draft in a single process."""
    return lambda name: list(engine.run(clips, DRAFTS[name]))


@pytest.mark.parametrize("name", DRAFTS)
def test_two_ranks_generate_the_tokens_of_one_process(
    answers: dict[str, tuple[Answer, Answer]],
    single_process: Callable[[str], list[Result]],
    name: str,
) -> None:
    first, second = answers[name]
    expected = single_process(name)
    assert first.tokens == second.tokens == {r.request_id: r.token_ids for r in expected}
    assert sum(r.proposed for r in first.results) == sum(r.proposed for r in second.results)
    # the draft selected the same entries as in one process, head by head
    if name in ("std", "specvlm", "snapkv"):
        counts = [
            {r.request_id: r.accept_counts for r in results}
            for results in (first.results, expected)
        ]
        assert counts[0] == counts[1]
        assert sum(r.accepted for r in expected) > 0


@pytest.mark.parametrize("name", ["qwen3_vl", "demo"])
def test_the_default_plan_and_a_tied_head(
    answers: dict[str, tuple[Answer, Answer]],
    families: Callable[[str], Path],
    clips: list[Request],
    name: str,
) -> None:
    path = CONF / "model" / "demo" if name == "demo" else families(name)
    alone = Engine.load(str(path), max_num_seqs=2)
    first, second = answers[name]
    assert (
        first.tokens
        == second.tokens
        == {r.request_id: r.token_ids for r in alone.run(clips[:2], None)}
    )
    assert first.kv_heads == 1
    assert 0.49 < first.weights / step_weight_bytes(alone.model) < 0.51


def test_each_rank_holds_half_of_the_weights_and_kv_heads(
    answers: dict[str, tuple[Answer, Answer]], engine: Engine
) -> None:
    for answer in answers["std"]:
        assert 2 * answer.kv_heads == engine.model.kv_heads == 2
        assert 0.49 < answer.weights / step_weight_bytes(engine.model) < 0.51


def test_sampling_without_a_seed_is_the_same_on_all_ranks(
    answers: dict[str, tuple[Answer, Answer]],
) -> None:
    first, second = answers["fresh"]
    assert first.tokens == second.tokens
    assert all(len(tokens) > 1 for tokens in first.tokens.values())
    again, _ = answers["fresh_again"]
    assert again.tokens != first.tokens


def test_all_ranks_follow_rank_0s_gamma_schedule(
    answers: dict[str, tuple[Answer, Answer]], single_process: Callable[[str], list[Result]]
) -> None:
    first, second = answers["scheduled"]
    assert (
        first.tokens
        == second.tokens
        == {r.request_id: r.token_ids for r in single_process("dense")}
    )
    counts = [
        [(r.request_id, r.rounds, r.drafted, r.accept_counts) for r in a.results]
        for a in (first, second)
    ]
    assert counts[0] == counts[1]
    assert 0 < sum(r.drafted for r in first.results) < 5 * sum(r.rounds for r in first.results)


def test_strict_tokens_equal_the_dense_loops_in_bfloat16(
    answers: dict[str, tuple[Answer, Answer]],
) -> None:
    assert answers["strict"][0].tokens == answers["strict_std"][0].tokens


def test_a_model_that_cannot_be_sharded_is_refused_before_loading(tiny_model: Path) -> None:
    with pytest.raises(
        ValueError, match=r"is 4: the model's 2 KV heads and 6 query heads cannot be divided by 4"
    ):
        Engine.load(str(tiny_model), tensor_parallel_size=4)
    with pytest.raises(ValueError, match="one device"):
        Engine.load(str(tiny_model), tensor_parallel_size=2, pipeline_parallel_size=2)
    with pytest.raises(ValueError, match="strict is for one or two ranks, not 3"):
        Engine(SimpleNamespace(tp_group=TensorParallelGroup(3)), SimpleNamespace(), strict=9)  # type: ignore[arg-type]


def test_a_request_that_only_rank_0_was_given_is_an_error(clips: list[Request]) -> None:
    early: list[Request] = []
    assert _find_request(clips[2].request_id, iter([None, *clips]), early) is clips[2]
    assert early == clips[:2]
    with pytest.raises(ValueError, match="'nobody' was given to rank 0"):
        _find_request("nobody", iter(clips), early)
