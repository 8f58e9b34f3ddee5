"""Rounds as they are recorded into CUDA graphs. Nothing can be recorded here; that a round asks the
host for nothing, and that what it reads stays where it was, is held by a stand-in for the recorder,
with the Triton kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jobs.suites.gpu import grid
from jobs.suites.shared import tiny_models, triton_interpreter
from std_core.decoding.logits import LogitsProcessors
from std_core.decoding.round import Round, Slots, decode_round, draft
from std_core.engine import batch
from std_core.engine.cuda_graphs import Body, Replay
from std_core.engine.engine import Engine
from std_core.kernels.shared.constants import SPLIT_SIZE
from std_core.types import Draft, GammaSchedule, Request, Sampling

WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "unique",
    "lift_fresh",
)


class NoHost(TorchDispatchMode):
    """Fails on what would wait for a GPU, or would bring it numbers from the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert not name.startswith(WAITS), f"a round calls {name}"
        if name.startswith("index"):
            masks = (
                [i for i in args[1] if i is not None and i.dtype == torch.bool]
                if isinstance(args[1], list)
                else []
            )
            assert not masks, f"a round calls {name} with a mask"
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> NoHost:
        self.patch = pytest.MonkeyPatch()
        for name in ("tolist", "numpy", "cpu"):
            self.patch.setattr(torch.Tensor, name, _refuse(name))
        return super().__enter__()

    def __exit__(self, *why: Any) -> None:
        super().__exit__(*why)
        self.patch.undo()


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"a round calls {name}")

    return refuse


class StandIn:
    """In place of CUDA graphs: runs a round again, which may not wait and must find everything
    where it was."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.slots: list[Slots] = []

    def __call__(self, body: Body) -> tuple[Replay, Round]:
        slots = self.slots[-1]
        done = {}
        before = addresses(slots)
        result = Round(*(torch.empty(0) for _ in range(6)))
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            assert addresses(slots) == before, "what was recorded lies elsewhere now"
            with NoHost():
                done.update(vars(body()))
            vars(result).update(done)

        return replay, result


def addresses(slots: Slots) -> list[int]:
    caches = [
        x for cache in (slots.prefix, slots.suffix, slots.draft) for x in (*cache.key, *cache.value)
    ]
    records = (slots, slots.groups, slots.sampling_state, slots.logits_processors)
    small = [x for record in records for x in vars(record).values() if isinstance(x, torch.Tensor)]
    return [x.data_ptr() for x in (*caches, *small)]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    recorder = StandIn()
    monkeypatch.setattr(batch, "graph_recorder", lambda model: recorder)
    empty = Slots.empty

    def noted(*args: Any) -> Slots:
        recorder.slots.append(empty(*args))
        return recorder.slots[-1]

    monkeypatch.setattr(Slots, "empty", noted)
    with triton_interpreter.triton_on_cpu():
        yield recorder  # type: ignore[misc]


@pytest.fixture(scope="module")
def llama(families: Callable[[str], Path]) -> Engine:
    return Engine.load(str(families("llama")), max_num_seqs=2)


LIVELY = Sampling(7, temperature=0.8, top_k=20, top_p=0.9, seed=3)
ASKED = [
    Request(
        f"{n}",
        " ".join(["red square", "blue circle moves", "the scene up", "left"][: 1 + n] * 14),
        sampling=s,
    )
    for n, s in enumerate((Sampling(9, 2, repetition_penalty=1.2), Sampling(3), LIVELY))
]


@pytest.mark.parametrize(
    ("draft", "mode"),
    [(None, "dense"), (Draft("std", keep=0.3, gamma=2), "std"), (Draft("ngram", gamma=2), "std")],
    ids=["dense", "std", "ngram"],
)
def test_a_recorded_round_asks_the_host_for_nothing(
    llama: Engine, request: pytest.FixtureRequest, draft: Draft | None, mode: Any
) -> None:
    """And writes what the CPU's path writes: rows come and go, some have processors or draw with a
    seed."""
    want = {r.request_id: r.token_ids for r in llama.run(ASKED, draft, mode=mode)}
    stand_in: StandIn = request.getfixturevalue("stand_in")
    got = {r.request_id: r.token_ids for r in llama.run(ASKED, draft, mode=mode)}
    assert got == want
    assert 0 < stand_in.recorded <= stand_in.replayed


def test_rounds_of_each_gamma_are_recorded_for_themselves(
    llama: Engine, request: pytest.FixtureRequest
) -> None:
    """Dense ones too, in between, and all in the room that was made for the widest."""
    asked = [replace(r, sampling=Sampling(n)) for r, n in zip(ASKED, (4, 24, 4), strict=True)]
    want = {r.request_id: r.token_ids for r in llama.run(asked, None)}
    stand_in: StandIn = request.getfixturevalue("stand_in")
    one_dense_two_drafted = GammaSchedule(((0,), (1,)), 0.9)
    results = list(llama.run([one_dense_two_drafted, *asked], Draft("random", k=1, gamma=3)))
    assert {r.request_id: r.token_ids for r in results} == want
    assert stand_in.slots[-1].headroom == 4
    assert stand_in.recorded == 2 < stand_in.replayed
    assert 0 < sum(r.drafted for r in results) < sum(r.rounds for r in results)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_no_family_asks_the_host(
    family: str, families: Callable[[str], Path], stand_in: StandIn
) -> None:
    """One drafted round of each, under the guard."""
    model = Engine.load(str(families(family))).model
    slots = grid.filled_slots(model, 1, 80)
    slots.headroom = 2
    slots.logits_processors = LogitsProcessors.of(slots.samplings, slots.vocab_size, model.device)
    with torch.inference_mode():
        body = partial(decode_round, model, slots, partial(draft, model), 1)
        with NoHost():
            done = body()
    assert done.kept.tolist() in ([1], [2])


def test_the_guard_sees_what_waits() -> None:
    x = torch.arange(4)
    for waits in (
        lambda: int(x.max()),
        lambda: x[x > 1],
        lambda: x.tolist(),
        lambda: bool(x[0] > 0),
        lambda: (x > 1).nonzero(),
        lambda: torch.tensor([1, 2]),
    ):
        with NoHost(), pytest.raises(AssertionError, match="a round calls"):
            waits()


def test_draws_without_a_seed_are_not_recorded(llama: Engine, stand_in: StandIn) -> None:
    """A generator's state is the host's."""
    asked = [replace(ASKED[1], sampling=Sampling(3, temperature=1.0))]
    assert all(r.error is None for r in llama.run(asked, None))
    assert stand_in.recorded == 0


def test_the_pools_take_what_was_foretold(llama: Engine, stand_in: StandIn) -> None:
    draft = Draft("std", keep=0.3, gamma=2)
    (result,) = llama.run([ASKED[2]], draft)
    slots = stand_in.slots[-1]
    model = llama.model
    taken = sum(
        x.nbytes
        for cache in (slots.prefix, slots.suffix, slots.draft)
        for x in (*cache.key, *cache.value)
    )
    entry = model.layers * model.kv_heads * model.head_dim * 2 * model.dtype.itemsize
    prompt = result.num_prompt_tokens + result.num_visual_tokens
    shared = prompt - 64  # of a prompt without a video all but its tail
    assert taken == grid.cache_bytes(
        entry,
        2,
        prompt=prompt,
        shared=shared,
        visual=shared,
        limit=ASKED[2].sampling.max_tokens,
        draft=draft,
    )
    assert taken % (entry * SPLIT_SIZE) == 0
