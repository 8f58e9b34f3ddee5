"""How a request enters a slot: vision tower, chunked prefill, the draft's view, the first token.

The work is one generator per request that yields after each bounded piece, so that the caller can
run other work in between. What requests on one video share is computed once (see `prefixes.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from std_core.decoding.logits import LogitsProcessors
from std_core.decoding.row_errors import isolated
from std_core.decoding.slots import Slots
from std_core.decoding.token_sampling import (
    ResolvedSampling,
    SamplingState,
    process_logits,
    sample_tokens,
)
from std_core.engine.context import EngineContext
from std_core.engine.draft_view import DraftViewBuilder
from std_core.engine.prompt import Prompt
from std_core.engine.row import Row
from std_core.model.cache import PrefillStep, PrefixEntries
from std_core.model.checkpoint import ModelInputs
from std_core.model.drafters import draft_layers
from std_core.model.sparsity import record_projection_inputs
from std_core.types import OBSERVATION_WINDOW, Draft, Request, RequestError, Result

# An admission in progress: a Row for the slot, or a Result if the request has ended already.
Admission = Generator[None, None, Row | Result]


def advance(admission: Admission) -> Row | Result | None:
    """Run one piece of an admission's work; returns None unless it was the last."""
    try:
        next(admission)
    except StopIteration as done:
        return done.value
    return None


class PrefixPrefill(NamedTuple):
    """Row of the prefix store (-1 for none), and the seconds that the vision tower took."""

    row: int = -1
    vision_s: float = 0.0


class SuffixPrefill(NamedTuple):
    """Result of prefilling the question.

    logits: (vocabulary,) behind the prompt. mass: per layer (KV heads, m_v), the attention from
    the last chunk to the selectable entries, if the draft needs it.
    """

    logits: torch.Tensor
    mass: list[torch.Tensor]


class Prefill:
    """Admits requests into slots.

    Args:
        prepare: makes a request's token ids and pixels.
        rows: the running rows by slot; the caller updates this list.
    """

    def __init__(
        self,
        context: EngineContext,
        slots: Slots,
        draft: Draft | None,
        prepare: Callable[[Request], ModelInputs],
        rows: Sequence[Row | None],
    ):
        self.context = context
        self.model = context.model
        self.slots = slots
        self.draft = draft
        self.prepare = prepare
        self.rows = rows
        self.draft_view = DraftViewBuilder(context, slots, draft)
        # entries of layers behind an early exit are not read
        self.layer_share = 1.0
        self.generator_is_seeded = False
        if draft is not None and slots.view != "draft_model":
            self.layer_share = draft_layers(draft, self.model.layers) / self.model.layers

    def admit(self, request: Request, slot: int) -> Admission:
        """Prefill a request into a free slot; a failed request becomes an error result."""
        decode = self.context.checkpoint.decode
        try:
            row = yield from self._prefill(request, slot)
            stopped = row.token_ids[0] in row.sampling.stop_ids
            return row.finished(stopped, decode, self.context.end_check) or row
        except RequestError as error:
            self.slots.reset(slot)
            return Result(
                request.request_id, token_ids=[], text="", finish_reason="error", error=error
            )

    def _prefill(self, request: Request, slot: int) -> Generator[None, None, Row]:
        began = time.perf_counter()
        max_model_len = self.context.checkpoint.max_model_len
        with isolated("preprocessing"):
            inputs = self.prepare(request)
        with isolated("placing the prompt"):
            prompt = Prompt.of(request, inputs, self.model, max_model_len)
        with isolated("resolving the sampling parameters"):
            sampling = self.context.resolve(request, prompt.ids)
            sampler = _Sampler.of(sampling, self.slots)
        max_tokens = min(request.sampling.max_tokens, max_model_len - prompt.length)
        self._reserve(prompt, max_tokens)
        if sampling.unseeded:
            self._seed_generator()
        prefix = PrefixPrefill()
        if prompt.prefix_length:
            prefix = yield from self._prefix(prompt)
        logits, mass = yield from self._suffix(prompt, slot, prefix.row)
        if not logits.isfinite().all():
            raise RequestError("nan_logits", "the model gave no finite logits behind the prompt")
        view = yield from self.draft_view.build(prompt, slot, prefix.row, mass)
        raw_logits = logits.to(torch.float32, copy=True) if sampling.keeps_scores else None
        first_token, scores = self._first_token(prompt, slot, sampler, logits)
        self.slots.remaining[slot] = max_tokens - 1
        max_accepted = self.draft.gamma if self.draft else 0
        row = Row(
            request=request,
            sampling=sampling,
            prefix=prefix.row,
            prompt_tokens=prompt.length,
            visual_tokens=prompt.visual_tokens,
            max_tokens=max_tokens,
            kv_keep=view.entries / prompt.length * self.layer_share,
            weight_keep=self.context.draft_models.weight_keep(self.draft),
            vision_s=prefix.vision_s,
            prefill_s=time.perf_counter() - began - prefix.vision_s,
            accept_counts=[0] * (max_accepted + 1),
            reject_counts=[0] * (max_accepted + 1),
            draft_kv=view.draft_kv,
            token_ids=[first_token],
        )
        if raw_logits is not None:
            row.record_scores(scores[None], raw_logits[None])
        return row

    def _seed_generator(self) -> None:
        """Seed the run's generator, once, by a draw from the default one of the model's device.

        Greedy and seeded rows do not call it: they leave torch's generators as they are.
        """
        if self.generator_is_seeded:
            return
        seed = torch.randint(2**63 - 1, (1,), device=self.model.device)
        # the ranks' default generators differ, but all ranks have to draw the same tokens
        self.slots.generator.manual_seed(int(self.model.tp_group.broadcast(seed)))
        self.generator_is_seeded = True

    def _reserve(self, prompt: Prompt, max_tokens: int) -> None:
        """Make room for all entries that a row may ever write, if rounds make none themselves."""
        slots = self.slots
        if not slots.headroom:
            return
        generated = max_tokens + slots.headroom
        slots.suffix.reserve(prompt.length - prompt.prefix_length + generated)
        slots.reserve_history(prompt.length + generated)
        if slots.view != "target":
            slots.draft.reserve(self.draft_view.entries(prompt) + generated)

    def _prefix(self, prompt: Prompt) -> Generator[None, None, PrefixPrefill]:
        """Find the prefix in the store, or compute it."""
        store = self.context.prefixes
        counters = self.context.counters
        length = prompt.prefix_length
        in_use = {row.prefix for row in self.rows if row is not None}
        found = store.find(prompt.prefix_key, in_use, exclusive=self.context.strict > 0)
        if found is not None:
            return PrefixPrefill(found)
        # before the vision tower runs: growing a layer's cache holds it twice for a moment
        row = store.allocate(length, in_use)
        began = time.perf_counter()
        features = None
        if prompt.visual_tokens:
            with isolated("the vision tower"):
                features = self.model.encode_vision(prompt.inputs)
            counters.vision_passes += 1
            yield
        vision_s = time.perf_counter() - began
        for start in range(0, length, self.context.prefill_chunk):
            end = min(length, start + self.context.prefill_chunk)
            embeds = self.model.embed_span(prompt.inputs, features, start, end)
            kv = PrefillStep(store.cache, row, start)
            self.model.prefill_chunk(embeds, prompt.positions[..., start:end], kv)
            counters.chunks += 1
            yield
        counters.prefix_prefills += 1
        store.mark_filled(row, prompt.prefix_key)
        return PrefixPrefill(row, vision_s)

    def _suffix(
        self, prompt: Prompt, slot: int, prefix: int
    ) -> Generator[None, None, SuffixPrefill]:
        """Prefill the question behind the prefix."""
        slots = self.slots
        cut = prompt.prefix_length
        kv = PrefillStep(slots.suffix, slot, 0)
        logits = torch.empty(0)
        activations: dict[str, torch.Tensor] = {}
        for start in range(cut, prompt.length, self.context.prefill_chunk):
            if start > cut:
                yield
            end = min(prompt.length, start + self.context.prefill_chunk)
            is_last = end == prompt.length
            slots.suffix.reserve(end - cut)
            kv = self._suffix_chunk(prompt, slot, prefix, start, is_last=is_last)
            calibrates = is_last and self.context.draft_models.needs_calibration(self.draft)
            recording = (
                record_projection_inputs(self.model.decoder)
                if calibrates
                else nullcontext(activations)
            )
            with recording as activations:
                embeds = self.model.embed(prompt.ids[None, start:end])
                logits = self.model.prefill_chunk(embeds, prompt.positions[..., start:end], kv)
            self.context.counters.chunks += 1
            # a round between two chunks then writes behind the chunk, not over it
            slots.length[slot] = end - cut
        if self.draft is not None and activations:
            self.context.draft_models.calibrate(self.draft, activations)
        return SuffixPrefill(logits, kv.mass)

    def _suffix_chunk(
        self, prompt: Prompt, slot: int, prefix: int, start: int, *, is_last: bool
    ) -> PrefillStep:
        """Caches for a chunk of the question; the last one collects the attention mass."""
        cut = prompt.prefix_length
        kv = PrefillStep(self.slots.suffix, slot, start - cut)
        if not cut:
            return kv
        kv.prefix = PrefixEntries(self.slots.prefix, prefix, cut)
        if is_last and self.draft is not None and self.draft_view.needs_attention_mass:
            kv.scored_positions = prompt.inputs.selectable_positions.to(self.model.device)
            kv.observation_window = OBSERVATION_WINDOW if self.draft.policy == "snapkv" else None
        return kv

    def _first_token(
        self, prompt: Prompt, slot: int, sampler: _Sampler, logits: torch.Tensor
    ) -> tuple[int, torch.Tensor]:
        """Set the slot's counts to the end of the prompt and sample the first token.

        Returns:
            The token, and its processed scores (vocabulary,).
        """
        slots = self.slots
        n = prompt.length
        slots.position[slot] = prompt.next_position
        slots.total[slot] = n + 1
        slots.reserve_history(n + 1)
        slots.history[slot, :n] = prompt.ids
        token, scores = sampler.first_token(logits, slots.history[slot : slot + 1], n)
        slots.history[slot, n] = token
        slots.generated[slot] = 1
        return token, scores


class _Sampler(NamedTuple):
    """What the slots build of a row's sampling parameters, of this row alone.

    It is built at admission: parameters that cannot be used then fail there, and not where they
    meet those of other rows.
    """

    sampling: ResolvedSampling
    state: SamplingState
    processors: LogitsProcessors | None

    @classmethod
    def of(cls, sampling: ResolvedSampling, slots: Slots) -> _Sampler:
        processors = LogitsProcessors.of([sampling], slots.vocab_size, slots.total.device)
        return cls(sampling, SamplingState.of([sampling], slots.generator), processors)

    def first_token(
        self, logits: torch.Tensor, history: torch.Tensor, length: int
    ) -> tuple[int, torch.Tensor]:
        """Sample the token behind a prompt.

        Args:
            logits: (vocabulary,).
            history: (1, capacity), of which the first `length` ids are the prompt.

        Returns:
            The token, and its processed scores (vocabulary,).
        """
        lengths = torch.tensor([length], device=history.device)
        if self.processors is not None:
            scores = self.processors.apply(logits[None, None], history, lengths)
        else:
            scores = process_logits(logits[None, None], [self.sampling], history, lengths)
        place = torch.zeros(1, 1, dtype=torch.long, device=logits.device)
        return int(sample_tokens(scores, self.state, place)), scores[0, 0]
