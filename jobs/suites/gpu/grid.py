"""Times of decode rounds on models of real shapes: dense steps, verifications, drafted rounds with
16-bit and with int4 drafts, over contexts; each beside the bytes it has to read. Slots are filled
by hand: what caches and weights hold does not change what a step costs, and what a draft would be
accepted for is put in as a number."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from triton.errors import TritonError

from jobs.suites.gpu.shapes import Shape
from std_core.decoding.logits import LogitsProcessors
from std_core.decoding.round import Round, Slots, decode_round, draft, prompt_lookup
from std_core.engine.cuda_graphs import CapturedRounds, graph_recorder, pool_bytes
from std_core.kernels.shared.segments import PrefixGroups
from std_core.model.cache import KVCache, PrefillStep
from std_core.model.drafters import build_drafter, step_weight_bytes
from std_core.model.families import FAMILIES
from std_core.model.model import Model
from std_core.types import Draft

K, TEXT, WRITTEN = 1024, 64, 256  # visual entries kept; tokens of a question; tokens of a caption
ALPHA = (0.9, 0.95)  # chances that a drafted token is accepted
CHUNK = 2048  # tokens of a prompt that are prefilled together


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    slots: int
    contexts: tuple[int, ...]
    gammas: tuple[int, ...]
    repeats: int
    read: int  # bytes that the bandwidth is measured with


FULL = Size(8, contexts=(8192, 16384, 32768, 65536), gammas=(2, 4, 8), repeats=8, read=4 << 30)
TINY = Size(2, contexts=(96,), gammas=(1,), repeats=1, read=1 << 20)


def seconds(device: str, work: Callable[[], Any], repeats: int) -> float:
    """The mean of `repeats` runs behind three that warm up: the first compiles, the second records,
    the third runs."""
    for _ in range(3 if device == "cuda" else 1):
        work()
    _wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    _wait(device)
    return (time.perf_counter() - began) / repeats


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def bandwidth(device: str, size: Size) -> float:
    """Bytes a second of a sum that only reads."""
    numbers = torch.zeros(size.read // 4, device=device)
    return size.read / seconds(device, numbers.sum, size.repeats)


def entry_bytes(model: Model) -> int:
    """Of one token's keys and values in all layers."""
    return model.layers * model.kv_heads * model.head_dim * 2 * model.dtype.itemsize


def drafts(model: Model) -> dict[str, Model]:
    """The models that draft, by name."""
    return {"16-bit": model, "int4": build_drafter(model, Draft(weights="int4"), {})}


def fits(model: Model, size: Size, context: int, device: str) -> bool:
    need = pool_bytes(
        entry_bytes(model),
        size.slots,
        context,
        context - TEXT,
        visual=context - TEXT,
        limit=WRITTEN,
        draft=Draft(k=K),
    )
    return device != "cuda" or need < 0.9 * torch.cuda.mem_get_info()[0]


@torch.inference_mode()
def measure(
    model: Model, drafters: dict[str, Model], size: Size, context: int, peak: float, device: str
) -> dict[str, Any]:
    """One context's times (ms), bytes, and what they come to."""
    slots = filled_slots(model, size.slots, context)
    captured = CapturedRounds(slots, recorder) if (recorder := graph_recorder(model)) else None
    slots.headroom = max(size.gammas) + 1 if captured else 0
    slots.logits_processors = LogitsProcessors.of(slots.samplings, slots.vocabulary, model.device)

    def timed(gamma: int, drafter: Model | None) -> float:
        _begin(slots, context)  # eleven rounds of nine tokens at most: within the room of a caption
        propose = partial(draft, drafter) if drafter else prompt_lookup
        body = partial(decode_round, model, slots, propose, gamma)
        kind = list(drafters.values()).index(drafter) + 1 if drafter else 0
        return seconds(device, lambda: _round(captured, (gamma, kind), body), size.repeats)

    read = step_weight_bytes(model) + size.slots * (context + WRITTEN // 2) * entry_bytes(model)
    dense = timed(0, None)
    verify = {gamma: timed(gamma, None) for gamma in size.gammas}
    point: dict[str, Any] = {
        "context": context,
        "slots": size.slots,
        "dense_ms": dense * 1e3,
        "dense_bytes": read,
        "dense_bytes_per_s": read / dense,
        "fraction_of_bound": read / dense / peak,
        "verify_ms": {f"T={gamma + 1}": t * 1e3 for gamma, t in verify.items()},
        "drafts": {},
    }
    for name, drafter in drafters.items():
        rounds = {gamma: timed(gamma, drafter) for gamma in size.gammas}
        kept = size.slots * (min(K, context) + TEXT) * entry_bytes(model)
        point["drafts"][name] = _figures(
            rounds, verify, dense, read, draft_read=step_weight_bytes(drafter) + kept
        )
    return point


def _round(
    captured: CapturedRounds | None, key: tuple[int, int], body: Callable[[], Round]
) -> Round:
    return captured.round(key, body) if captured else body()


def _figures(
    rounds: dict[int, float], verify: dict[int, float], dense: float, read: int, draft_read: int
) -> dict[str, Any]:
    """Of one draft: its step, and the best γ at each chance of acceptance, measured and as bytes
    allow."""
    step = {gamma: (t - verify[gamma]) / gamma for gamma, t in rounds.items()}
    best = {}
    for a in ALPHA:
        speed = {gamma: tokens(a, gamma) * dense / t for gamma, t in rounds.items()}
        bound = {gamma: tokens(a, gamma) * read / (gamma * draft_read + read) for gamma in rounds}
        gamma = max(speed, key=lambda g: speed[g])
        best[str(a)] = {"gamma": gamma, "speed_up": speed[gamma], "bound": max(bound.values())}
    return {
        "step_ms": {str(gamma): t * 1e3 for gamma, t in step.items()},
        "step_bytes": draft_read,
        "round_ms": {str(gamma): t * 1e3 for gamma, t in rounds.items()},
        "best": best,
    }


def tokens(a: float, gamma: int) -> float:
    """Expected tokens of a round whose drafted tokens are accepted with chance a, each."""
    return (1 - a ** (gamma + 1)) / (1 - a)


# -------------------------------------------------------------------------------------------- slots


def filled_slots(model: Model, count: int, context: int) -> Slots:
    """Rows at a context's end, each with a prefix of its own, a question and room for a caption."""
    slots = Slots.empty(model, count, torch.Generator(model.device))
    shared = context - TEXT
    kept = min(K, context - TEXT)
    for cache, entries in (
        (slots.prefix, shared),
        (slots.suffix, TEXT + WRITTEN),
        (slots.draft, kept + TEXT + WRITTEN),
    ):
        _fill(cache, entries)
    slots.view = "selected"
    slots.reserve_history(context + WRITTEN)
    slots.history.random_(1, model.vocab_size)
    slots.active.fill_(True)
    slots.groups = PrefixGroups.from_lists(
        list(range(count)), [shared] * count, model.device, fixed=True
    )
    _begin(slots, context)
    return slots


def _begin(slots: Slots, context: int) -> None:
    """Back to a caption's first token."""
    kept = min(K, context - TEXT)
    starts = {
        "length": TEXT - 1,
        "draft_length": kept + TEXT - 1,
        "position": context - 1,
        "total": context,
        "generated": 1,
        "remaining": 1 << 30,
    }
    for name, value in starts.items():
        getattr(slots, name).fill_(value)


def _fill(cache: KVCache, entries: int) -> None:
    cache.reserve(entries)
    for store in (*cache.key, *cache.value):
        store.normal_()


# ------------------------------------------------------------------------------------------- shares


@torch.inference_mode()
def shares(
    model: Model, shape: Shape, size: Size, point: dict[str, Any], device: str
) -> dict[str, Any]:
    """Seconds of one request of a context, a caption of `WRITTEN` tokens, and what part decoding
    has in them; prefill and vision tower are measured on a piece and stand for as many pieces as
    there are."""
    context = point["context"]
    prefill = _prefill(model, context, device)
    vision = _vision(model, shape, context - TEXT, device)
    dense = WRITTEN * point["dense_ms"] / 1e3 / size.slots
    found = {"context": context, "vision_s": vision, "prefill_s": prefill, "decode_dense_s": dense}
    found["decode_share"] = dense / (vision + prefill + dense)
    for name, figures in point["drafts"].items():
        faster = dense / figures["best"]["0.9"]["speed_up"]
        found[f"speed_up_end_to_end_{name}"] = (vision + prefill + dense) / (
            vision + prefill + faster
        )
    return found


def _prefill(model: Model, context: int, device: str) -> float:
    """A chunk in the middle costs what chunks cost on average."""
    chunk = min(CHUNK, context // 2)
    cache = model.new_cache(1)
    cache.reserve(context)
    embeds = torch.randn(
        1, chunk, model.hidden_size * model.feature_levels, device=device, dtype=model.dtype
    )
    at = (context - chunk) // 2
    places = torch.arange(at, at + chunk, device=device)[None, None]
    return (
        seconds(device, lambda: model.prefill_chunk(embeds, places, PrefillStep(cache, 0, at)), 1)
        * context
        / chunk
    )


def _vision(model: Model, shape: Shape, visual: int, device: str) -> float:
    """A few frame pairs of 225 tokens each; the tower attends within a pair."""
    pairs, side = (8, 30) if device == "cuda" else (1, 4)
    patches = torch.randn(pairs * side**2, shape.patch_numbers, device=device, dtype=model.dtype)
    grid = torch.tensor([[pairs, side, side]], device=device)
    look = FAMILIES[model.hf.config.model_type].look
    return (
        seconds(device, lambda: list(look(model.hf, 2, patches, grid)), 1)
        * visual
        / (pairs * side**2 / 4)
    )


def grid(
    model: Model, shape: Shape, size: Size, peak: float, device: str, deadline: float
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Each context's figures, or why there are none."""
    drafters = drafts(model)
    for context in size.contexts:
        if time.monotonic() > deadline:
            yield context, "no time left"
        elif not fits(model, size, context, device):
            yield context, "does not fit the memory"
        else:
            try:
                point = measure(model, drafters, size, context, peak=peak, device=device)
                yield context, point | {"shares": shares(model, shape, size, point, device=device)}
            except (
                RuntimeError,
                TritonError,
            ) as failure:  # out of memory, say: other contexts are still told
                yield context, str(failure).splitlines()[0]
