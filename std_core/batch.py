"""The rows in the slots: requests enter, rounds move them on, results leave as rows finish.

Between two rounds at most one chunk of one prompt is prefilled, so that no row waits long for another's arrival. What
several questions on one video share is seen and prefilled once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from std_core.cache import ChunkStep, gather_view
from std_core.checkpoint import Inputs
from std_core.decode import Slots, decode_round
from std_core.kernels.attention import Groups
from std_core.sampling import Draws, Rule, bend, choose, settle
from std_core.select import select
from std_core.types import Draft, FinishReason, Request, RequestError, Result

if TYPE_CHECKING:
    from std_core.engine import Engine


@dataclass
class _Row:
    """The host's side of a slot."""

    request: Request
    rule: Rule
    prefix: int  # row of the prefix store, -1 for none
    prompt: int
    visual: int
    limit: int
    kv_keep: float
    vision_s: float
    prefill_s: float
    written: list[int]
    accept_counts: list[int]  # [i]: rounds in which i drafted tokens were accepted
    proposed: int = 0
    decode_s: float = 0.0


@dataclass(frozen=True)
class _Prefix:
    """A row of the prefix store: whose it is (None while it is being filled), how long, and when it was filled."""

    key: tuple[str, float, list[int]] | None = None
    length: int = 0
    used: int = 0


IDLE = 0.005  # s between two looks for a request while there is nothing else to do
_END = object()

Admission = Generator[None, None, _Row | Result]


class Batch:
    """One pass over a stream of requests: the slots and what the host knows of them."""

    def __init__(self, engine: Engine, draft: Draft | None, prepare: Callable[[Request], Inputs]):
        self.engine, self.model, self.draft, self.prepare = engine, engine.model, draft, prepare
        count = engine.max_num_seqs
        generator = torch.Generator(self.model.device).manual_seed(engine.seed)
        self.slots = Slots.empty(self.model, count, generator, engine.strict)
        self.rows: list[_Row | None] = [None] * count
        self.prefixes = [_Prefix() for _ in range(count)]
        self.gamma = draft.gamma if draft else 0
        if engine.strict and engine.strict <= self.gamma:
            raise ValueError(f"strict pads to {engine.strict} tokens a row, but γ = {self.gamma} verifies more")

    def through(self, waiting: Iterator[Request | None]) -> Iterator[Result]:
        admission: Admission | None = None
        slot, more, filling = 0, True, True
        while more or admission or any(self.rows):
            late = False
            if admission is None and more and None in self.rows:
                slot, offered = self.rows.index(None), next(waiting, _END)
                more, late = offered is not _END, offered is None
                admission = self._admit(offered, slot) if isinstance(offered, Request) else None
            if admission is not None and (arrived := self._chunk(admission)) is not None:
                admission = None
                if isinstance(arrived, Result):
                    yield arrived
                else:
                    self._seat(slot, arrived)
            # no row has been kept waiting yet: the first rounds begin with full slots
            filling = filling and not late and (admission is not None or (more and None in self.rows))
            if any(self.rows) and not filling:
                yield from self._round()
            elif late:
                time.sleep(IDLE)

    # ------------------------------------------------------------------------------------------------ admission

    def _chunk(self, admission: Admission) -> _Row | Result | None:
        """One chunk's work of an admission; None if there is more to do."""
        try:
            next(admission)
        except StopIteration as done:
            return done.value
        return None

    def _admit(self, request: Request, slot: int) -> Admission:
        """Vision, prefill and selection of one request; a Result if that already ends it."""
        try:
            row, first = yield from self._prefill(request, slot)
        except RequestError as error:
            return Result(request.request_id, [], "", "error", error=error)
        row.written.append(first)
        reason = self._ends(row, stopped=first in row.rule.stop_ids)
        return self._result(row, reason) if reason else row

    def _prefill(self, request: Request, slot: int) -> Generator[None, None, tuple[_Row, int]]:
        began = time.perf_counter()
        inputs = self.prepare(request)
        ids = inputs.ids[0].to(self.model.device)
        length, cut, window = len(ids), inputs.cut, self.engine.checkpoint.max_model_len
        if length >= window:
            raise RequestError("context_too_long", f"{length} tokens of context, the model's window is {window}")
        if cut == length:
            raise RequestError("invalid_request", "the prompt ends with a visual token: there is no question behind it")
        rule = settle(self.model.hf, request.sampling, ids)
        positions, next_position = self.model.place(inputs)
        prefix, vision_s = -1, 0.0
        if cut:
            prefix, vision_s = yield from self._prefix(request, inputs, positions)
        kv = ChunkStep(self.slots.own, slot, 0)
        logits, at = None, cut
        while at < length:
            if logits is not None:
                yield
            end = min(length, at + self.engine.prefill_chunk)
            self.slots.own.reserve(end - cut)
            kv = ChunkStep(self.slots.own, slot, at - cut)
            if cut:
                kv.prefix = (self.slots.prefix, prefix, cut)
                kv.visual = inputs.selectable.to(self.model.device) if self.draft and end == length else None
            logits = self.model.extend(self.model.embed(ids[None, at:end]), positions[..., at:end], kv)
            self.engine.counters.chunks += 1
            at = end
            self.slots.length[slot] = at - cut  # a round between two chunks writes behind it, not over it
        assert logits is not None
        if not logits.isfinite().all():
            raise RequestError("nan_logits", "the model gave no finite logits behind the prompt")
        kept = self._select(kv, slot, prefix, inputs) if self.draft else length
        row = _Row(
            request=request,
            rule=rule,
            prefix=prefix,
            prompt=length,
            visual=len(inputs.visual),
            limit=min(request.sampling.max_tokens, window - length),
            kv_keep=kept / length,
            vision_s=vision_s,
            prefill_s=time.perf_counter() - began - vision_s,
            written=[],
            accept_counts=[0] * (self.gamma + 1),
        )
        return row, self._first(slot, row, ids, next_position, logits)

    def _prefix(
        self, request: Request, inputs: Inputs, positions: torch.Tensor
    ) -> Generator[None, None, tuple[int, float]]:
        """The row of the prefix store that holds the request's prefix, filled if no earlier question has filled it; and
        the seconds that the vision tower took."""
        cut, engine = inputs.cut, self.engine
        key = (request.video, request.fps, inputs.ids[0, :cut].tolist())
        for row, known in enumerate(self.prefixes):
            if request.video and known.key == key:
                return self._own_prefix(row), 0.0
        row = self._free_prefix()
        self.prefixes[row] = _Prefix(None, cut)
        began = time.perf_counter()
        features = None
        if len(inputs.visual):
            features = self.model.see(inputs)
            engine.counters.vision_passes += 1
            yield
        seen = time.perf_counter()
        embeds = self.model.embed(inputs.ids[:, :cut].to(self.model.device), inputs.types[:, :cut], features)
        self.slots.prefix.reserve(cut)
        for at in range(0, cut, engine.prefill_chunk):
            end = min(cut, at + engine.prefill_chunk)
            self.model.extend(embeds[:, at:end], positions[..., at:end], ChunkStep(self.slots.prefix, row, at))
            engine.counters.chunks += 1
            yield
        engine.counters.prefix_prefills += 1
        self.prefixes[row] = _Prefix(key, cut, used=engine.counters.prefix_prefills)
        return row, seen - began

    def _own_prefix(self, row: int) -> int:
        """A known prefix as one more row may use it: under `strict` a copy if it is in use, since rows that share one
        are attended in another shape than rows that don't."""
        if not self.engine.strict or row not in self._needed():
            return row
        copy, known = self._free_prefix(), self.prefixes[row]
        for layer in range(self.model.layers):
            self.slots.prefix.fill(layer, copy, 0, *(x[0] for x in self.slots.prefix.row(layer, row, known.length)))
        self.prefixes[copy] = replace(known, key=None)
        return copy

    def _needed(self) -> set[int]:
        return {row.prefix for row in self.rows if row is not None}

    def _free_prefix(self) -> int:
        """A row of the prefix store that no slot needs; the one filled longest ago. There is one: a slot is free."""
        needed = self._needed()
        return min((i for i in range(len(self.prefixes)) if i not in needed), key=lambda i: self.prefixes[i].used)

    def _select(self, kv: ChunkStep, slot: int, prefix: int, inputs: Inputs) -> int:
        """Fills the slot's draft view; returns the entries it holds per layer and KV head."""
        assert self.draft is not None
        length, cut = inputs.ids.shape[1], inputs.cut
        if self.draft.policy == "ngram":
            return 0
        slots = self.slots
        slots.draft.reserve(length)
        places = inputs.selectable.to(self.model.device)
        is_text = torch.ones(cut, dtype=torch.bool, device=self.model.device)
        is_text[places] = False
        text = is_text.nonzero()[:, 0].expand(self.model.kv_heads, -1)
        held = 0
        for layer in range(self.model.layers):
            kept = text
            if cut:
                chosen = select(self.draft, kv.mass[layer], layer, row_seed=length)
                kept = torch.cat([text, places[chosen]], dim=1)
            shared = slots.prefix.row(layer, max(prefix, 0), cut)
            held = gather_view(slots.draft, slot, layer, shared, kept, slots.own.row(layer, slot, length - cut))
        slots.draft_length[slot] = held
        return held

    def _first(self, slot: int, row: _Row, ids: torch.Tensor, position: int, logits: torch.Tensor) -> int:
        """Settles the slot behind its prompt and draws the first token."""
        slots, n = self.slots, len(ids)
        slots.position[slot], slots.total[slot] = position, n + 1
        slots.reserve_history(n + 1)
        slots.history[slot, :n] = ids
        draws = Draws.of([row.rule], slots.generator)
        scores = bend(logits[None, None], [row.rule], slots.history[slot : slot + 1], torch.tensor([n]))
        token = choose(scores, draws, torch.zeros(1, 1, dtype=torch.long, device=ids.device))
        slots.history[slot, n] = token[0, 0]
        slots.written[slot], slots.left[slot] = 1, row.limit - 1
        return int(token)

    def _seat(self, slot: int, row: _Row) -> None:
        self.rows[slot] = row
        self._regroup()

    def _regroup(self) -> None:
        """What the slots' tensors say of who sits where, after a row has come or gone."""
        slots, device = self.slots, self.model.device
        rules = [row.rule if row is not None else None for row in self.rows]
        slots.rules, slots.draws = rules, Draws.of(rules, slots.generator)
        slots.active = torch.tensor([row is not None for row in self.rows], device=device)
        most = max(len(rule.stop_ids) for rule in rules if rule is not None) if any(rules) else 0
        stops = [[*(rule.stop_ids if rule else ()), *[-1] * most][: max(most, 1)] or [-1] for rule in rules]
        slots.stop_ids = torch.tensor(stops, device=device)
        prefix_of_row = [row.prefix if row is not None else -1 for row in self.rows]
        slots.groups = Groups.of(prefix_of_row, [p.length for p in self.prefixes], device, bool(self.engine.strict))

    # --------------------------------------------------------------------------------------------------- rounds

    def _round(self) -> Iterator[Result]:
        began = time.perf_counter()
        policy = self.draft.policy if self.draft else "dense"
        done = decode_round(self.model, self.slots, policy, self.gamma)
        tokens, kept, accepted, proposed, stopped, broken = (x.tolist() for x in vars(done).values())
        seated = sum(row is not None for row in self.rows)
        spent = (time.perf_counter() - began) / seated
        self.engine.counters.rounds += 1
        self.engine.counters.row_rounds += seated
        finished = []
        for slot, row in enumerate(self.rows):
            if row is None:
                continue
            row.decode_s += spent
            row.written += tokens[slot][: kept[slot]]
            row.accept_counts[accepted[slot]] += 1
            row.proposed += proposed[slot]
            if broken[slot]:
                why = f"the model gave no finite logits after {len(row.written)} tokens"
                finished.append((slot, self._result(row, "error", RequestError("nan_logits", why))))
            elif reason := self._ends(row, stopped[slot]):
                finished.append((slot, self._result(row, reason)))
        for slot, _ in finished:
            self.rows[slot] = None
            for count in (self.slots.length, self.slots.draft_length, self.slots.total, self.slots.written):
                count[slot] = 0
        if finished:
            self._regroup()
        yield from (result for _, result in finished)

    def _ends(self, row: _Row, stopped: bool) -> FinishReason | None:
        """Why a row ends here, if it does; cuts what was written at a stop text."""
        if row.request.sampling.stop and (count := self._stop_text(row)) is not None:
            del row.written[count:]
            return "stop"
        if stopped:
            return "stop"
        return "length" if len(row.written) >= row.limit else None

    def _stop_text(self, row: _Row) -> int | None:
        """How many tokens it took until a stop text stood in the output."""
        decode, stop = self.engine.checkpoint.decode, row.request.sampling.stop
        if not any(text in decode(row.written) for text in stop):
            return None
        low = row.request.sampling.min_tokens
        counts = range(max(1, low), len(row.written) + 1)
        return next((n for n in counts if any(text in decode(row.written[:n]) for text in stop)), None)

    def _result(self, row: _Row, reason: FinishReason, error: RequestError | None = None) -> Result:
        text = self.engine.checkpoint.decode(row.written)
        ends = [at for stop in row.request.sampling.stop if (at := text.find(stop)) >= 0]
        return Result(
            request_id=row.request.request_id,
            token_ids=row.written,
            text=text[: min(ends)] if ends and reason == "stop" else text,
            finish_reason=reason,
            num_prompt_tokens=row.prompt - row.visual,
            num_visual_tokens=row.visual,
            kv_keep=row.kv_keep,
            rounds=sum(row.accept_counts),
            proposed=row.proposed,
            accepted=sum(i * n for i, n in enumerate(row.accept_counts)),
            accept_counts=tuple(row.accept_counts),
            vision_s=row.vision_s,
            prefill_s=row.prefill_s,
            decode_s=row.decode_s,
            error=error,
        )
