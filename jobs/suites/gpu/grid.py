"""Times of decode rounds on models of real sizes, over contexts: dense steps, verifications, and
drafted rounds with 16-bit and int4 weights, each beside the bytes that it reads.

Slots are filled with random entries: what caches and weights contain does not change the time of a
step. A draft's acceptance is assumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from triton.errors import TritonError

from jobs.suites.gpu.shapes import Shape
from jobs.suites.shared.timing import mean_seconds
from std_core.decoding.logits import LogitsProcessors
from std_core.decoding.round import Round, decode_round, draft, prompt_lookup
from std_core.decoding.slots import Slots
from std_core.engine.cuda_graphs import CapturedRounds, graph_recorder
from std_core.kernels.shared.constants import SPLIT_SIZE
from std_core.kernels.shared.segments import PrefixGroups
from std_core.model.cache import KVCache, PrefillStep
from std_core.model.drafters import build_drafter, step_weight_bytes
from std_core.model.families import FAMILIES, VIDEO
from std_core.model.model import Model
from std_core.types import Draft

KEPT = 1024  # visual entries that the draft reads
TEXT = 64  # tokens of a question
CAPTION = 256  # tokens written
ACCEPTANCES = (0.9, 0.95)  # assumed probabilities that a drafted token is accepted
PREFILL_CHUNK = 2048  # tokens
MEMORY_SHARE = 0.9  # of the free memory that a context's caches may take
UNLIMITED = 1 << 30  # tokens that a row may still write


@dataclass(frozen=True)
class GridSize:
    """How much is measured.

    Args:
        repeats: of each timed round.
        warmup: untimed rounds before; on a GPU the first compiles and the second is captured.
        bandwidth_bytes: read in each repetition of the bandwidth's measurement.
        frame_pairs, patches_per_side: of the vision tower's input.
    """

    slots: int
    contexts: tuple[int, ...]
    gammas: tuple[int, ...]
    repeats: int
    warmup: int
    bandwidth_bytes: int
    frame_pairs: int
    patches_per_side: int


FULL = GridSize(
    slots=8,
    contexts=(8192, 16384, 32768, 65536),
    gammas=(2, 4, 8),
    repeats=8,
    warmup=3,
    bandwidth_bytes=4 << 30,
    frame_pairs=8,
    patches_per_side=30,
)
TINY = GridSize(
    slots=2,
    contexts=(96,),
    gammas=(1,),
    repeats=1,
    warmup=1,
    bandwidth_bytes=1 << 20,
    frame_pairs=1,
    patches_per_side=4,
)


def measure_contexts(
    model: Model, shape: Shape, size: GridSize, *, bandwidth: float, device: str, deadline: float
) -> dict[int, dict[str, Any] | str]:
    """Figures by context, or a sentence why there are none.

    Args:
        bandwidth: bytes/s.
        deadline: of `time.monotonic`; no context is begun after it.
    """
    drafters = {"16-bit": model, "int4": build_drafter(model, Draft(weights="int4"), {})}
    contexts: dict[int, dict[str, Any] | str] = {}
    for context in size.contexts:
        if time.monotonic() > deadline:
            contexts[context] = "no time left"
            continue
        if not fits_memory(model, size, context, device):
            contexts[context] = "does not fit the memory"
            continue
        try:
            figures = RoundTimer(model, size, context, device).measure(drafters, bandwidth)
            figures["shares"] = request_shares(model, shape, size, figures, device=device)
            contexts[context] = figures
        except (RuntimeError, TritonError) as error:
            # out of memory, for instance: the other contexts are still measured
            contexts[context] = str(error).splitlines()[0]
    return contexts


def entry_bytes(model: Model) -> int:
    """Bytes of one token's keys and values in all layers."""
    return model.layers * model.kv_heads * model.head_dim * 2 * model.dtype.itemsize


def cache_bytes(
    entry_bytes: int,
    slots: int,
    prompt: int,
    shared: int,
    visual: int,
    limit: int,
    draft: Draft,
) -> int:
    """Bytes of the KV caches of `slots` rows, each with the longest request.

    Args:
        prompt: tokens, of which the first `shared` are in the prefix store and the draft can leave
            out `visual`.
        limit: tokens that a row may generate.
        draft: one with selected entries.
    """
    generated = limit + draft.gamma + 1
    drafted = prompt - visual + draft.budget(visual) + generated
    entries = (shared, prompt - shared + generated, drafted)
    return slots * entry_bytes * sum(-(-n // SPLIT_SIZE) * SPLIT_SIZE for n in entries)


def fits_memory(model: Model, size: GridSize, context: int, device: str) -> bool:
    if device != "cuda":
        return True
    visual = context - TEXT
    needed = cache_bytes(
        entry_bytes(model),
        size.slots,
        prompt=context,
        shared=visual,
        visual=visual,
        limit=CAPTION,
        draft=Draft(k=KEPT),
    )
    free_bytes, _ = torch.cuda.mem_get_info()
    return needed < MEMORY_SHARE * free_bytes


# ------------------------------------------------------------------------------------------- rounds


class RoundTimer:
    """Times rounds of full slots at one context."""

    @torch.inference_mode()
    def __init__(self, model: Model, size: GridSize, context: int, device: str):
        self.model = model
        self.size = size
        self.context = context
        self.device = device
        self.slots = filled_slots(model, size.slots, context)
        recorder = graph_recorder(model)
        self.captured = CapturedRounds(self.slots, recorder) if recorder else None
        self.slots.headroom = max(size.gammas) + 1 if self.captured else 0
        self.slots.logits_processors = LogitsProcessors.of(
            self.slots.samplings, self.slots.vocab_size, model.device
        )

    @torch.inference_mode()
    def measure(self, drafters: Mapping[str, Model], bandwidth: float) -> dict[str, Any]:
        """Times in ms, bytes, and the speed-ups that follow."""
        read = step_weight_bytes(self.model) + self.size.slots * self._cache_bytes(
            self.context + CAPTION // 2
        )
        dense = self._seconds(0, prompt_lookup, graph=0)
        verify = {gamma: self._seconds(gamma, prompt_lookup, graph=0) for gamma in self.size.gammas}
        figures: dict[str, Any] = {
            "context": self.context,
            "slots": self.size.slots,
            "dense_ms": dense * 1e3,
            "dense_bytes": read,
            "dense_bytes_per_s": read / dense,
            "fraction_of_bound": read / dense / bandwidth,
            "verify_ms": {f"T={gamma + 1}": s * 1e3 for gamma, s in verify.items()},
            "drafts": {},
        }
        kept = self.size.slots * self._cache_bytes(min(KEPT, self.context) + TEXT)
        for graph, (name, drafter) in enumerate(drafters.items(), 1):
            drafting = partial(draft, drafter)
            rounds = {
                gamma: self._seconds(gamma, drafting, graph=graph) for gamma in self.size.gammas
            }
            costs = DraftCosts(rounds, verify, dense, read, step_weight_bytes(drafter) + kept)
            figures["drafts"][name] = costs.figures()
        return figures

    def _cache_bytes(self, entries: int) -> int:
        return entries * entry_bytes(self.model)

    def _seconds(self, gamma: int, drafting: Callable[..., Any], graph: int) -> float:
        """Mean seconds of a round.

        Args:
            graph: names the captured graph together with γ; another for each drafter.
        """
        # at most eleven rounds of nine tokens: they fit behind the question
        _rewind(self.slots, self.context)
        body = partial(decode_round, self.model, self.slots, drafting, gamma)

        def one_round() -> Round:
            return self.captured.round((gamma, graph), body) if self.captured else body()

        return mean_seconds(
            one_round, repeats=self.size.repeats, warmup=self.size.warmup, device=self.device
        )


@dataclass(frozen=True)
class DraftCosts:
    """One draft's rounds. Times in seconds.

    Args:
        rounds, verify: by γ, of drafted rounds and of rounds with γ free tokens.
        dense: of a dense step.
        dense_bytes, draft_bytes: read by a dense step and by a draft step.
    """

    rounds: Mapping[int, float]
    verify: Mapping[int, float]
    dense: float
    dense_bytes: int
    draft_bytes: int

    def figures(self) -> dict[str, Any]:
        """The draft step, and the best γ at each assumed acceptance."""
        step = {gamma: (s - self.verify[gamma]) / gamma for gamma, s in self.rounds.items()}
        return {
            "step_ms": {str(gamma): s * 1e3 for gamma, s in step.items()},
            "step_bytes": self.draft_bytes,
            "round_ms": {str(gamma): s * 1e3 for gamma, s in self.rounds.items()},
            "best": {str(acceptance): self._best(acceptance) for acceptance in ACCEPTANCES},
        }

    def _best(self, acceptance: float) -> dict[str, float]:
        """The measured best γ and its speed-up; `bound` is the best that bytes allow."""
        speed_up = {
            gamma: expected_tokens(acceptance, gamma) * self.dense / s
            for gamma, s in self.rounds.items()
        }
        bound = {
            gamma: expected_tokens(acceptance, gamma)
            * self.dense_bytes
            / (gamma * self.draft_bytes + self.dense_bytes)
            for gamma in self.rounds
        }
        gamma = max(speed_up, key=lambda g: speed_up[g])
        return {"gamma": gamma, "speed_up": speed_up[gamma], "bound": max(bound.values())}


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Expected tokens of a round whose drafted tokens are each accepted with this probability."""
    return (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


# -------------------------------------------------------------------------------------------- slots


def filled_slots(model: Model, count: int, context: int) -> Slots:
    """Rows at the end of their context: each with a prefix of its own, a question and room for a
    caption."""
    slots = Slots.empty(model, count, torch.Generator(model.device))
    prefix = context - TEXT
    kept = min(KEPT, prefix)
    _fill(slots.prefix, prefix)
    _fill(slots.suffix, TEXT + CAPTION)
    _fill(slots.draft, kept + TEXT + CAPTION)
    slots.view = "selected"
    slots.reserve_history(context + CAPTION)
    slots.history.random_(1, model.vocab_size)
    slots.active.fill_(True)
    slots.groups = PrefixGroups.from_lists(
        list(range(count)), [prefix] * count, model.device, fixed=True
    )
    _rewind(slots, context)
    return slots


def _rewind(slots: Slots, context: int) -> None:
    """Set all rows to the first token of their caption."""
    kept = min(KEPT, context - TEXT)
    slots.length.fill_(TEXT - 1)
    slots.draft_length.fill_(kept + TEXT - 1)
    slots.position.fill_(context - 1)
    slots.total.fill_(context)
    slots.generated.fill_(1)
    slots.remaining.fill_(UNLIMITED)


def _fill(cache: KVCache, entries: int) -> None:
    cache.reserve(entries)
    for store in (*cache.key, *cache.value):
        store.normal_()


# -------------------------------------------------------------------------------- a whole request


@torch.inference_mode()
def request_shares(
    model: Model, shape: Shape, size: GridSize, figures: Mapping[str, Any], *, device: str
) -> dict[str, Any]:
    """Seconds of one request with a caption of `CAPTION` tokens, the share of decoding in them, and
    the speed-up of the whole.

    Vision and prefill are timed on a piece of the context and scaled to the whole of it.
    """
    context = figures["context"]
    vision = _vision_seconds(model, shape, size, context - TEXT, device=device)
    prefill = _prefill_seconds(model, size, context, device)
    decode = CAPTION * figures["dense_ms"] / 1e3 / size.slots
    dense_total = vision + prefill + decode
    shares: dict[str, Any] = {
        "context": context,
        "vision_s": vision,
        "prefill_s": prefill,
        "decode_dense_s": decode,
        "decode_share": decode / dense_total,
    }
    for name, draft_figures in figures["drafts"].items():
        drafted = decode / draft_figures["best"]["0.9"]["speed_up"]
        shares[f"speed_up_end_to_end_{name}"] = dense_total / (vision + prefill + drafted)
    return shares


def _prefill_seconds(model: Model, size: GridSize, context: int, device: str) -> float:
    """All chunks, from one in the middle of the context, which takes their mean time."""
    chunk = min(PREFILL_CHUNK, context // 2)
    start = (context - chunk) // 2
    cache = model.new_cache(1)
    cache.reserve(context)
    embeds = torch.randn(
        1, chunk, model.hidden_size * model.feature_levels, device=device, dtype=model.dtype
    )
    positions = torch.arange(start, start + chunk, device=device)[None, None]
    seconds = mean_seconds(
        lambda: model.prefill_chunk(embeds, positions, PrefillStep(cache, 0, start)),
        repeats=1,
        warmup=size.warmup,
        device=device,
    )
    return seconds * context / chunk


def _vision_seconds(
    model: Model, shape: Shape, size: GridSize, visual: int, *, device: str
) -> float:
    """The tower over `visual` tokens, from a few frame pairs; it attends within a pair."""
    pairs = size.frame_pairs
    side = size.patches_per_side
    patches = torch.randn(pairs * side**2, shape.patch_values, device=device, dtype=model.dtype)
    grid = torch.tensor([[pairs, side, side]], device=device)
    encode = FAMILIES[model.hf.config.model_type].encode_vision
    seconds = mean_seconds(
        lambda: list(encode(model.hf, VIDEO, patches, grid)),
        repeats=1,
        warmup=size.warmup,
        device=device,
    )
    patches_per_token = 4
    return seconds * visual / (pairs * side**2 / patches_per_token)
