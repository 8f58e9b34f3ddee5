"""Rounds as CUDA graphs, on a machine without a GPU.

Nothing can be captured here. A stand-in for the recorder checks what capture requires: that a round
never waits for the host, and that what it reads stays at its address. The Triton kernels run in
Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
from std_core.decoding.round import Round, decode_round, draft
from std_core.decoding.slots import Slots
from std_core.engine import batch
from std_core.engine.cuda_graphs import Body, Replay
from std_core.engine.engine import Engine
from std_core.kernels.shared.constants import SPLIT_SIZE
from std_core.types import Draft, GammaSchedule, Request, Result, Sampling

# operations that wait for the device, or copy from the host
SYNCHRONIZING = (
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "unique",
    "lift_fresh",
)
Tokens = dict[str, list[int]]  # by request id


class NoHost(TorchDispatchMode):
    """Fails on operations that would wait for a GPU or copy numbers to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert not name.startswith(SYNCHRONIZING), f"a round calls {name}"
        if name.startswith("index") and isinstance(args[1], list):
            masks = [i for i in args[1] if i is not None and i.dtype == torch.bool]
            assert not masks, f"a round calls {name} with a mask"
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> NoHost:
        self.patch = pytest.MonkeyPatch()
        for name in ("tolist", "numpy", "cpu"):
            self.patch.setattr(torch.Tensor, name, _refuse(name))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.patch.undo()


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"a round calls {name}")

    return refuse


class StandInRecorder:
    """In place of CUDA graphs: replays a round by running it again, under `NoHost`, and checks that
    all addresses are still the same.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0
        self.slots: list[Slots] = []  # of each run

    def __call__(self, body: Body) -> tuple[Replay, Round]:
        slots = self.slots[-1]
        recorded_addresses = addresses(slots)
        result = Round(*(torch.empty(0) for _ in range(6)))
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            assert addresses(slots) == recorded_addresses, "what a graph reads has moved"
            with NoHost():
                done = body()
            vars(result).update(vars(done))

        return replay, result


def addresses(slots: Slots) -> list[int]:
    """Of the caches and of all small tensors that a round reads."""
    records = (slots, slots.groups, slots.sampling_state, slots.logits_processors)
    small = [x for record in records for x in vars(record).values() if isinstance(x, torch.Tensor)]
    return [x.data_ptr() for x in (*cache_tensors(slots), *small)]


def cache_tensors(slots: Slots) -> list[torch.Tensor]:
    caches = (slots.prefix, slots.suffix, slots.draft)
    return [x for cache in caches for x in (*cache.key, *cache.value)]


def tokens_by_id(results: Iterable[Result]) -> Tokens:
    return {result.request_id: result.token_ids for result in results}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInRecorder]:
    recorder = StandInRecorder()
    monkeypatch.setattr(batch, "graph_recorder", lambda model: recorder)
    empty = Slots.empty

    def recorded_empty(*args: Any) -> Slots:
        recorder.slots.append(empty(*args))
        return recorder.slots[-1]

    monkeypatch.setattr(Slots, "empty", recorded_empty)
    with triton_interpreter.triton_on_cpu():
        yield recorder


@pytest.fixture(scope="module")
def llama(families: Callable[[str], Path]) -> Engine:
    return Engine.load(str(families("llama")), max_num_seqs=2)


WORDS = ["red square", "blue circle moves", "the scene up", "left"]
GREEDY = Request("1", " ".join(WORDS[:2] * 14), sampling=Sampling(3))
SEEDED = Request(
    "2",
    " ".join(WORDS[:3] * 14),
    sampling=Sampling(7, temperature=0.8, top_k=20, top_p=0.9, seed=3),
)
REQUESTS = [
    Request("0", " ".join(WORDS[:1] * 14), sampling=Sampling(9, 2, repetition_penalty=1.2)),
    GREEDY,
    SEEDED,
]


@pytest.mark.parametrize(
    ("draft", "mode"),
    [(None, "dense"), (Draft("std", keep=0.3, gamma=2), "std"), (Draft("ngram", gamma=2), "std")],
    ids=["dense", "std", "ngram"],
)
def test_a_replayed_round_does_not_wait_for_the_host(
    llama: Engine, request: pytest.FixtureRequest, draft: Draft | None, mode: Any
) -> None:
    """It gives the CPU path's tokens, with rows that come and go, logits processors and seeds."""
    expected = tokens_by_id(llama.run(REQUESTS, draft, mode=mode))
    recorder: StandInRecorder = request.getfixturevalue("recorder")
    assert tokens_by_id(llama.run(REQUESTS, draft, mode=mode)) == expected
    assert 0 < recorder.recorded <= recorder.replayed


def test_each_gamma_has_its_own_graph(llama: Engine, request: pytest.FixtureRequest) -> None:
    """Dense rounds included; all in the room that was reserved for the largest γ."""
    limits = (4, 12, 4)
    limited = [replace(r, sampling=Sampling(n)) for r, n in zip(REQUESTS, limits, strict=True)]
    expected = tokens_by_id(llama.run(limited, None))
    recorder: StandInRecorder = request.getfixturevalue("recorder")
    dense_if_alone = GammaSchedule(((0,), (1,)), 0.9)
    results = list(llama.run([dense_if_alone, *limited], Draft("random", k=1, gamma=3)))
    assert tokens_by_id(results) == expected
    assert recorder.slots[-1].headroom == 4
    # γ = 1 twice, since the prefix store grows when the third request is admitted; then γ = 0
    assert recorder.recorded == 3 < recorder.replayed
    assert 0 < sum(r.drafted for r in results) < sum(r.rounds for r in results)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_a_drafted_round_of_each_family_does_not_wait_for_the_host(
    family: str, families: Callable[[str], Path], recorder: StandInRecorder
) -> None:
    model = Engine.load(str(families(family))).model
    slots = grid.filled_slots(model, 1, 80)
    slots.headroom = 2
    slots.logits_processors = LogitsProcessors.of(slots.samplings, slots.vocab_size, model.device)
    with torch.inference_mode():
        body = partial(decode_round, model, slots, partial(draft, model), 1)
        with NoHost():
            done = body()
    assert done.kept.tolist() in ([1], [2])


def test_the_guard_detects_synchronization() -> None:
    x = torch.arange(4)
    for synchronizing in (
        lambda: int(x.max()),
        lambda: x[x > 1],
        lambda: x.tolist(),
        lambda: bool(x[0] > 0),
        lambda: (x > 1).nonzero(),
        lambda: torch.tensor([1, 2]),
    ):
        with NoHost(), pytest.raises(AssertionError, match="a round calls"):
            synchronizing()


def test_rounds_with_unseeded_rows_are_not_captured(
    llama: Engine, recorder: StandInRecorder
) -> None:
    """The state of their generator is on the host."""
    unseeded = replace(GREEDY, sampling=Sampling(3, temperature=1.0))
    assert all(r.error is None for r in llama.run([unseeded], None))
    assert recorder.recorded == 0


def test_rows_that_are_added_while_others_run_are_captured_anew(
    llama: Engine, request: pytest.FixtureRequest
) -> None:
    """Adding a slot moves the caches."""
    limited = [replace(r, sampling=Sampling(8)) for r in REQUESTS[:2]]
    expected = tokens_by_id(llama.run(limited, None))
    recorder: StandInRecorder = request.getfixturevalue("recorder")
    pauses = [None] * 4
    assert tokens_by_id(llama.run([limited[0], *pauses, limited[1]], None)) == expected
    assert len(recorder.slots[-1].total) == 2
    assert recorder.recorded == 2 < recorder.replayed


def test_cache_bytes_are_predicted(llama: Engine, recorder: StandInRecorder) -> None:
    draft = Draft("std", keep=0.3, gamma=2)
    (result,) = llama.run([SEEDED], draft)
    model = llama.model
    allocated = sum(x.nbytes for x in cache_tensors(recorder.slots[-1]))
    entry_bytes = grid.entry_bytes(model)
    prompt = result.num_prompt_tokens + result.num_visual_tokens
    shared = prompt - 64  # all but the last 64 tokens, since there are no visual ones
    assert allocated == grid.cache_bytes(
        entry_bytes,
        1,
        prompt=prompt,
        shared=shared,
        visual=shared,
        limit=SEEDED.sampling.max_tokens,
        draft=draft,
    )
    assert allocated % (entry_bytes * SPLIT_SIZE) == 0
