"""The prefix store: what requests on one video share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from std_core.engine.engine import Engine
from std_core.engine.prefixes import PrefixKey, PrefixStore
from std_core.model.cache import KVCache
from std_core.types import Draft, Request, Result, Sampling

KEYS = [PrefixKey(f"video {n}", 2.0, (1, 2, n)) for n in range(4)]


def tokens_by_id(results: Iterable[Result]) -> dict[str, list[int]]:
    return {result.request_id: result.token_ids for result in results}


def store(rows: int) -> PrefixStore:
    cache = KVCache(["cpu"], rows=rows, kv_heads=1, head_dim=2, dtype=torch.float32)
    return PrefixStore(cache, rows)


def fill(prefixes: PrefixStore, number: int, in_use: set[int]) -> int:
    row = prefixes.allocate(3, in_use)
    for entries in (prefixes.cache.key[0], prefixes.cache.value[0]):
        entries[row] = float(number)
    prefixes.mark_filled(row, KEYS[number])
    return row


def test_a_prefix_is_found_until_it_is_the_oldest_that_is_not_in_use() -> None:
    prefixes = store(3)
    rows = [fill(prefixes, number, in_use=set()) for number in range(3)]
    assert sorted(rows) == [0, 1, 2]
    assert fill(prefixes, 3, in_use={rows[0]}) == rows[1]
    found = [prefixes.find(key, set(), exclusive=False) for key in KEYS]
    assert found == [rows[0], None, rows[2], rows[1]]
    assert prefixes.find(None, set(), exclusive=False) is None


def test_a_prefix_that_is_being_filled_is_not_found() -> None:
    prefixes = store(2)
    row = prefixes.allocate(5, set())
    assert prefixes.find(KEYS[0], set(), exclusive=False) is None
    assert prefixes.lengths[row] == 5
    assert prefixes.cache.capacity >= 5


def test_exclusive_use_copies_a_prefix_that_is_in_use() -> None:
    prefixes = store(3)
    row = fill(prefixes, 1, in_use=set())
    assert prefixes.find(KEYS[1], set(), exclusive=True) == row
    copy = prefixes.find(KEYS[1], {row}, exclusive=True)
    assert copy is not None
    assert copy != row
    assert prefixes.lengths[copy] == prefixes.lengths[row] == 3
    for entries in (prefixes.cache.key[0], prefixes.cache.value[0]):
        assert torch.equal(entries[copy, :, :3], entries[row, :, :3])
    assert prefixes.find(KEYS[1], set(), exclusive=False) == row


def test_questions_on_one_video_share_its_vision_pass_and_its_prefill(
    tiny_model: Path, requests: list[Request]
) -> None:
    questions = [
        Request(
            f"q{i}",
            prompt=f"What is in scene {i}?",
            frames=requests[4].frames,
            video_id="clip",
            sampling=Sampling(12),
        )
        for i in range(8)
    ]
    engine = Engine.load(str(tiny_model), max_num_seqs=8)
    shared = tokens_by_id(engine.run(questions, Draft()))
    assert (engine.counters.vision_passes, engine.counters.prefix_prefills) == (1, 1)
    alone = tokens_by_id(engine.run([replace(q, video_id="") for q in questions], Draft()))
    assert engine.counters.vision_passes == 9
    assert shared == alone


def test_kept_prefixes_outlive_a_run(tiny_model: Path, requests: list[Request]) -> None:
    named = [replace(r, video_id=r.request_id) for r in requests[:3]]
    engine = Engine.load(str(tiny_model), max_num_seqs=4, keep_prefixes=True)
    runs = [
        tokens_by_id(engine.run(named, draft)) for draft in (None, Draft(), Draft("random", k=1))
    ]
    assert runs[0] == runs[1] == runs[2]
    assert (engine.counters.vision_passes, engine.counters.prefix_prefills) == (3, 3)
