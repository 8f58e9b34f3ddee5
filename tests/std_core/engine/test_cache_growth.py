"""Caches grow by the rows in use: what a run holds follows from its requests, not its slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from std_core.decoding.slots import Slots
from std_core.engine.batch import Batch
from std_core.engine.engine import Engine
from std_core.model.cache import rows_after_growth
from std_core.types import Draft, Request, Result, Sampling

GREEDY = Sampling(5, temperature=0.0)


@pytest.fixture(scope="module")
def llama(families: Callable[[str], Path]) -> Engine:
    """With default settings: 8 slots."""
    return Engine.load(str(families("llama")))


def text_request(name: str, words: int) -> Request:
    return Request(name, "red " * words, sampling=GREEDY)


def run(
    engine: Engine, requests: list[Request | None], draft: Draft | None
) -> tuple[Batch, list[Result]]:
    with torch.inference_mode():
        batch = engine.new_batch(draft)
        return batch, list(batch.run(iter(requests)))


def cache_bytes(slots: Slots) -> int:
    return sum(cache.nbytes for cache in (slots.prefix, slots.suffix, slots.draft))


def entry_bytes(engine: Engine) -> int:
    cache = engine.model.new_cache(1)
    cache.reserve(1)
    return cache.nbytes // cache.capacity


@pytest.mark.parametrize("draft", [None, Draft(), Draft("full"), Draft(keep=0.5, gamma=2)])
def test_one_long_prompt_takes_less_than_twice_its_entries(
    llama: Engine, draft: Draft | None
) -> None:
    batch, (result,) = run(llama, [text_request("0", 6000)], draft)
    tokens = result.num_prompt_tokens + len(result.token_ids)
    assert tokens >= 6000
    assert cache_bytes(batch.slots) < 2 * tokens * entry_bytes(llama)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.integers(1, 7),
    st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=1, max_size=9),
    st.sampled_from([None, Draft("std", keep=0.5, gamma=2), Draft("ngram", gamma=2)]),
)
def test_slots_are_added_while_others_run_and_change_no_text(
    llama: Engine, max_num_seqs: int, sizes: list[tuple[int, bool]], draft: Draft | None
) -> None:
    """Some requests come later than others, so that rounds run in between."""
    engine = replace(llama, max_num_seqs=max_num_seqs)
    requests = [text_request(str(i), size) for i, (size, _) in enumerate(sizes)]
    stream: list[Request | None] = []
    for request, (_, late) in zip(requests, sizes, strict=True):
        stream += [*[None] * (2 * late), request]
    batch, results = run(engine, stream, draft)
    alone = replace(llama, max_num_seqs=1)
    expected = {r.request_id: r.token_ids for r in alone.run(requests, None)}
    assert {r.request_id: r.token_ids for r in results} == expected
    rows = [cache.rows for cache in (batch.slots.suffix, batch.slots.draft)]
    assert rows == [len(batch.rows)] * 2
    in_use = min(len(requests), max_num_seqs)  # at most
    assert len(batch.rows) <= rows_after_growth(max(1, in_use - 1), max_num_seqs)
    assert batch.slots.prefix.rows <= rows_after_growth(max(1, in_use - 1), max_num_seqs)


def test_requests_on_one_video_share_one_row(engine: Engine, requests: list[Request]) -> None:
    shared = [
        replace(requests[1], request_id=str(n), video_id="clip", sampling=GREEDY) for n in range(3)
    ]
    batch, results = run(engine, list(shared), Draft())
    assert len(results) == 3
    assert (batch.slots.prefix.rows, batch.slots.suffix.rows) == (1, 3)


def test_requests_one_after_another_share_one_slot(llama: Engine) -> None:
    """A prefix that no request can share is the first to be overwritten."""
    done: list[str] = []
    requests = [text_request(str(n), 150) for n in range(3)]

    def one_by_one() -> Iterator[Request | None]:
        for request in requests:
            yield request
            while request.request_id not in done:
                yield None

    with torch.inference_mode():
        batch = llama.new_batch(Draft())
        for result in batch.run(one_by_one()):
            done.append(result.request_id)
    assert done == ["0", "1", "2"]
    assert (batch.slots.prefix.rows, batch.slots.suffix.rows) == (1, 1)


def test_prefixes_that_can_be_shared_are_kept_while_rows_are_left(
    engine: Engine, requests: list[Request]
) -> None:
    named = [replace(r, video_id=r.request_id, sampling=Sampling(1)) for r in requests[:3]]
    vision_passes = engine.counters.vision_passes
    batch, results = run(engine, [*named, *reversed(named)], None)
    assert len(results) == 6
    assert engine.counters.vision_passes == vision_passes + 3
    assert batch.slots.prefix.rows == 3
    assert batch.slots.suffix.rows == 1


def test_strict_has_all_slots_from_the_start(llama: Engine) -> None:
    """Its bits are those of batches of one shape."""
    batch, _ = run(replace(llama, strict=6), [text_request("0", 100)], Draft(gamma=3))
    caches = (batch.slots.prefix, batch.slots.suffix, batch.slots.draft)
    assert [cache.rows for cache in caches] == [8, 8, 8]


def test_the_number_of_rows_doubles_up_to_the_limit() -> None:
    rows = [1]
    while rows[-1] < 6:
        rows.append(rows_after_growth(rows[-1], 6))
    assert rows == [1, 2, 4, 6]
