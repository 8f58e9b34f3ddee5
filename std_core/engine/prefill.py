"""How a request comes into a slot: vision, chunked prefill, selection of what the draft sees, the
first token.

What several questions on one video share is seen and prefilled once and kept in the prefix store.
All of it is one generator per request that yields after each piece of bounded work, so that its
caller decides what runs in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from std_core.decoding.round import Slots
from std_core.decoding.select import select
from std_core.decoding.token_sampling import (
    SamplingState,
    process_logits,
    resolve_sampling,
    sample_tokens,
)
from std_core.engine.row import DraftKV, Row
from std_core.model.cache import PrefillStep, gather_draft_kv
from std_core.model.checkpoint import ModelInputs
from std_core.model.drafters import draft_layers
from std_core.model.sparsity import record_projection_inputs
from std_core.types import OBSERVATION_WINDOW, Draft, Request, RequestError, Result

if TYPE_CHECKING:
    from std_core.engine.engine import Engine

Pieces = Generator[None, None, Row | Result]


@dataclass(frozen=True)
class Prefix:
    """A row of the prefix store: whose it is (None while it is being filled), how long, and when it
    was filled."""

    key: tuple[str, float, list[int]] | None = None
    length: int = 0
    used: int = 0


@dataclass(frozen=True)
class _Prompt:
    """A request as the model takes it."""

    request: Request
    inputs: ModelInputs
    ids: torch.Tensor  # (n,)
    positions: torch.Tensor  # (1 or 3, 1, n)
    next_position: int

    @property
    def length(self) -> int:
        return len(self.ids)


class Prefill:
    """Brings requests into slots; keeps the prefix store."""

    def __init__(
        self,
        engine: Engine,
        slots: Slots,
        draft: Draft | None,
        prepare: Callable[[Request], ModelInputs],
        rows: Sequence[Row | None],
    ):
        self.engine = engine
        self.model = engine.model
        self.slots = slots
        self.draft = draft
        self.prepare = prepare
        self.rows = rows  # in the slots, by now
        self.prefixes = self._prefix_store()
        layers = self.model.layers  # entries of layers behind an early exit are not read
        self._layers_read = (
            draft_layers(draft, layers) / layers if draft and slots.view != "draft_model" else 1.0
        )

    def _prefix_store(self) -> list[Prefix]:
        """Of this run, or the engine's own that outlives it; the slots get its entries."""
        if not self.engine.keep_prefixes:
            return [Prefix() for _ in range(self.engine.max_num_seqs)]
        if self.engine.prefixes is None:
            self.engine.prefixes = (
                self.slots.prefix,
                [Prefix() for _ in range(self.engine.max_num_seqs)],
            )
        self.slots.prefix, known = self.engine.prefixes
        return known

    def admit(self, request: Request, slot: int) -> Pieces:
        """A Row for the slot, or a Result if the request ends already."""
        decode = self.engine.checkpoint.decode
        try:
            row = yield from self._row(request, slot)
        except RequestError as error:
            return Result(
                request.request_id, token_ids=[], text="", finish_reason="error", error=error
            )
        reason = row.ends(row.written[0] in row.rule.stop_ids, decode)
        return row.result(reason, decode) if reason else row

    def _row(self, request: Request, slot: int) -> Generator[None, None, Row]:
        began = time.perf_counter()
        prompt = self._prompt(request)
        length = prompt.length
        inputs = prompt.inputs
        limit = min(request.sampling.max_tokens, self.engine.checkpoint.max_model_len - length)
        self._make_room(prompt, limit)
        rule = resolve_sampling(self.model.hf, request.sampling, prompt.ids)
        prefix = -1
        vision_s = 0.0
        if inputs.prefix_length:
            prefix, vision_s = yield from self._prefix(prompt)
        logits, mass = yield from self._suffix(prompt, slot, prefix)
        if not logits.isfinite().all():
            raise RequestError("nan_logits", "the model gave no finite logits behind the prompt")
        held, view = yield from self._view(prompt, slot, prefix, mass)
        rounds = self.draft.gamma + 1 if self.draft else 1  # kinds of them
        row = Row(
            request=request,
            rule=rule,
            prefix=prefix,
            prompt=length,
            visual=len(inputs.visual_positions),
            limit=limit,
            kv_keep=held / length * self._layers_read,
            weight_keep=self.engine.weight_keep(self.draft),
            vision_s=vision_s,
            prefill_s=0.0,
            accept_counts=[0] * rounds,
            reject_counts=[0] * rounds,
            view=view,
        )
        row.written.append(self._first(slot, row, prompt, logits))
        row.prefill_s = time.perf_counter() - began - vision_s
        return row

    def _prompt(self, request: Request) -> _Prompt:
        inputs = self.prepare(request)
        ids = inputs.ids[0].to(self.model.device)
        window = self.engine.checkpoint.max_model_len
        if len(ids) >= window:
            raise RequestError(
                "context_too_long", f"{len(ids)} tokens of context, the model's window is {window}"
            )
        if inputs.prefix_length == len(ids):
            raise RequestError(
                "invalid_request",
                "the prompt ends with a visual token: there is no question behind it",
            )
        return _Prompt(request, inputs, ids, *self.model.position_ids(inputs))

    def _make_room(self, prompt: _Prompt, limit: int) -> None:
        """For all that a row may ever write, where rounds make no room of their own."""
        slots = self.slots
        spare = limit + self.slots.headroom
        if slots.headroom:
            slots.suffix.reserve(prompt.length - prompt.inputs.prefix_length + spare)
            slots.reserve_history(prompt.length + spare)
            if slots.view != "target":
                slots.draft.reserve(self._held(prompt) + spare)

    def _held(self, prompt: _Prompt) -> int:
        """Entries per layer and KV head that a draft's view of a prompt holds."""
        assert self.draft is not None
        visual = len(prompt.inputs.selectable_positions)
        kept = self.draft.budget(visual) if visual and self.draft.policy != "full" else visual
        return prompt.length - visual + kept

    # ------------------------------------------------------------------------------------- prefixes

    def _prefix(self, prompt: _Prompt) -> Generator[None, None, tuple[int, float]]:
        """The row of the prefix store that holds the request's prefix, filled if no earlier
        question has filled it; and the seconds that the vision tower took."""
        inputs = prompt.inputs
        engine = self.engine
        cut = prompt.inputs.prefix_length
        key = (prompt.request.video_id, prompt.request.fps, inputs.ids[0, :cut].tolist())
        for row, known in enumerate(self.prefixes):
            if prompt.request.video_id and known.key == key:
                return self._own_prefix(row), 0.0
        row = self._free_prefix()
        self.prefixes[row] = Prefix(None, cut)
        self.slots.prefix.reserve(
            cut
        )  # before the tower works: a cache that grows is there twice, layer by layer
        began = time.perf_counter()
        features = None
        if len(inputs.visual_positions):
            features = self.model.encode_vision(inputs)
            engine.counters.vision_passes += 1
            yield
        seen = time.perf_counter()
        for at in range(0, cut, engine.prefill_chunk):
            end = min(cut, at + engine.prefill_chunk)
            embeds = self.model.embed_part(inputs, features, at, end)
            self.model.prefill_chunk(
                embeds, prompt.positions[..., at:end], PrefillStep(self.slots.prefix, row, at)
            )
            engine.counters.chunks += 1
            yield
        engine.counters.prefix_prefills += 1
        self.prefixes[row] = Prefix(key, cut, used=engine.counters.prefix_prefills)
        return row, seen - began

    def _own_prefix(self, row: int) -> int:
        """A known prefix as one more row may use it: under `strict` a copy if it is in use, since
        rows that share one are attended in another shape than rows that don't."""
        if not self.engine.strict or row not in self._needed():
            return row
        copy = self._free_prefix()
        known = self.prefixes[row]
        for layer in range(self.model.layers):
            self.slots.prefix.fill(
                layer, copy, 0, *(x[0] for x in self.slots.prefix.row(layer, row, known.length))
            )
        self.prefixes[copy] = replace(known, key=None)
        return copy

    def _needed(self) -> set[int]:
        return {row.prefix for row in self.rows if row is not None}

    def _free_prefix(self) -> int:
        """A row of the prefix store that no slot needs; the one filled longest ago. There is one: a
        slot is free."""
        needed = self._needed()
        return min(
            (i for i in range(len(self.prefixes)) if i not in needed),
            key=lambda i: self.prefixes[i].used,
        )

    # --------------------------------------------------------------------------------------- suffix

    def _suffix(
        self, prompt: _Prompt, slot: int, prefix: int
    ) -> Generator[None, None, tuple[torch.Tensor, list[torch.Tensor]]]:
        """Logits behind the prompt, and per layer the attention that its last chunk gives what can
        be selected."""
        slots = self.slots
        cut = prompt.inputs.prefix_length
        length = prompt.length
        kv = PrefillStep(slots.suffix, slot, 0)
        logits = torch.empty(0)
        seen: dict[str, torch.Tensor] = {}
        for at in range(cut, length, self.engine.prefill_chunk):
            if at > cut:
                yield
            end = min(length, at + self.engine.prefill_chunk)
            slots.suffix.reserve(end - cut)
            kv = PrefillStep(slots.suffix, slot, at - cut)
            if cut:
                kv.prefix = (slots.prefix, prefix, cut)
                if self.draft is not None and slots.view != "target" and end == length:
                    kv.visual = prompt.inputs.selectable_positions.to(self.model.device)
                    kv.observers = OBSERVATION_WINDOW if self.draft.policy == "snapkv" else None
            # a sample of activations, if the draft's thresholds are not known yet
            uncalibrated = end == length and self.engine.uncalibrated(self.draft)
            with (
                record_projection_inputs(self.model.decoder)
                if uncalibrated
                else nullcontext(seen) as seen
            ):
                embeds = self.model.embed(prompt.ids[None, at:end])
                logits = self.model.prefill_chunk(embeds, prompt.positions[..., at:end], kv)
            self.engine.counters.chunks += 1
            slots.length[slot] = (
                end - cut
            )  # a round between two chunks writes behind it, not over it
        if self.draft is not None and seen:
            self.engine.calibrate(self.draft, seen)
        return logits, kv.mass

    # ----------------------------------------------------------------------------- the draft's view

    def _view(
        self, prompt: _Prompt, slot: int, prefix: int, mass: list[torch.Tensor]
    ) -> Generator[None, None, tuple[int, DraftKV | None]]:
        """Fills what the draft reads of the row; returns the entries it holds per layer and KV
        head, and where the chosen ones are."""
        if self.draft is None or self.slots.view == "target":
            return 0 if self.draft and self.draft.policy == "ngram" else prompt.length, None
        cut = prompt.inputs.prefix_length
        places = prompt.inputs.selectable_positions.to(self.model.device)
        text = torch.ones(cut, dtype=torch.bool, device=self.model.device)
        text[places] = False
        always = text.nonzero()[:, 0]
        total = self.model.tensor_parallel.all_reduce
        chosen = (
            select(self.draft, mass, prompt.length, total)
            if cut and self.draft.policy != "full"
            else []
        )
        if self.slots.view == "draft_model":
            kept = (
                places[self.model.tensor_parallel.broadcast(chosen[0][0].to(places.device))]
                if chosen
                else places
            )
            held = yield from self._second(prompt, slot, torch.cat([always, kept]).sort().values)
            return held, None
        held = 0
        self.slots.draft.reserve(self._held(prompt))
        for layer in range(self.model.layers):
            kept = always.expand(self.model.kv_heads, -1)
            if chosen:
                kept = torch.cat([kept, places[chosen[layer].to(places.device)]], dim=1)
            shared = self.slots.prefix.row(layer, max(prefix, 0), cut)
            own = self.slots.suffix.row(layer, slot, prompt.length - cut)
            held = gather_draft_kv(self.slots.draft, slot, layer, shared, kept=kept, own=own)
        self.slots.draft_length[slot] = held
        return held, DraftKV(places, len(always), chosen[0].shape[1] if chosen else 0)

    def _second(self, prompt: _Prompt, slot: int, kept: torch.Tensor) -> Generator[None, None, int]:
        """Prefill of the second model, which sees the kept part of the prefix and the suffix, at
        their true places."""
        assert self.draft is not None
        second = self.engine.drafter(self.draft)
        inputs = prompt.inputs
        slots = self.slots
        positions, _ = second.position_ids(inputs)
        features = second.encode_vision(inputs) if len(inputs.visual_positions) else None
        yield
        ids = prompt.ids[None].to(second.device)
        embeds = second.embed(ids, inputs.token_types, features)
        whole = torch.cat(
            [kept, torch.arange(inputs.prefix_length, prompt.length, device=kept.device)]
        )
        slots.draft.reserve(len(whole))
        for at in range(0, len(whole), self.engine.prefill_chunk):
            part = whole[at : at + self.engine.prefill_chunk]
            second.prefill_chunk(
                embeds[:, part], positions[..., part], PrefillStep(slots.draft, slot, at)
            )
            # rounds that run meanwhile feed the token before a row's last again: one place ahead it
            # hits nothing
            slots.draft_length[slot] = at + len(part) + 1
            yield
        slots.draft_length[slot] = len(whole)
        return len(whole)

    # ---------------------------------------------------------------------------------- first token

    def _first(self, slot: int, row: Row, prompt: _Prompt, logits: torch.Tensor) -> int:
        """Settles the slot behind its prompt and draws the first token."""
        slots = self.slots
        n = prompt.length
        slots.position[slot] = prompt.next_position
        slots.total[slot] = n + 1
        slots.reserve_history(n + 1)
        slots.history[slot, :n] = prompt.ids
        sampling_state = SamplingState.of([row.rule], slots.generator)
        scores = process_logits(
            logits[None, None], [row.rule], slots.history[slot : slot + 1], torch.tensor([n])
        )
        token = sample_tokens(
            scores, sampling_state, torch.zeros(1, 1, dtype=torch.long, device=logits.device)
        )
        slots.history[slot, n] = token[0, 0]
        slots.generated[slot] = 1
        slots.remaining[slot] = row.limit - 1
        return int(token)
