"""The rows in the slots: requests enter, rounds move them on, results leave as rows finish.

A round costs nearly the same for few rows as for many, so free slots are filled before the next one
wherever a request is at hand; that a row waits meanwhile is no loss to who asks for requests an
hour."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from std_core.decoding.logits import LogitsProcessors
from std_core.decoding.round import (
    DraftView,
    Proposer,
    Round,
    Slots,
    decode_round,
    draft,
    prompt_lookup,
    unverified_round,
)
from std_core.decoding.token_sampling import SamplingState
from std_core.engine.cuda_graphs import CapturedRounds, graph_recorder
from std_core.engine.prefill import Pieces, Prefill
from std_core.engine.refresh import look_of, reselect
from std_core.engine.row import Row
from std_core.kernels.shared.segments import PrefixGroups
from std_core.model.checkpoint import ModelInputs
from std_core.types import Draft, FirstTokens, GammaSchedule, Mode, Request, RequestError, Result

if TYPE_CHECKING:
    from std_core.engine.engine import Engine

IDLE = 0.005  # s between two looks for a request while there is nothing else to do
LATELY = 32  # rounds that a pace looks back on
_END = object()


class Batch:
    """One pass over a stream of requests: the slots and what the host knows of them."""

    def __init__(
        self,
        engine: Engine,
        draft: Draft | None,
        prepare: Callable[[Request], ModelInputs],
        mode: Mode = "std",
    ):
        if draft and engine.strict and engine.strict <= draft.gamma:
            raise ValueError(
                f"strict pads to {engine.strict} tokens a row, but γ = {draft.gamma} verifies more"
            )
        if mode == "sparse":
            if draft is None:
                raise ValueError("mode sparse needs a draft")
            draft.check_unverified()
        self.engine = engine
        self.model = engine.model
        self.draft = draft
        self.mode = mode
        self.gamma = draft.gamma if draft else 0  # of each round; at most, once there is a pace
        self.gamma_schedule: GammaSchedule | None = None
        # (accepted tokens, refusals) of each. Dense rounds show nothing and push out those that
        # have closed the gate: it opens again with what is expected, for `ROUNDS` of `LATELY`
        # rounds if they are as bad
        self.lately: deque[FirstTokens] = deque(maxlen=LATELY)
        generator = torch.Generator(self.model.device).manual_seed(engine.seed)
        self.slots = Slots.empty(self.model, engine.max_num_seqs, generator, engine.strict)
        self.slots.view = _view_of(draft)
        if draft and draft.model:
            self.slots.draft = engine.drafter(draft).new_cache(engine.max_num_seqs)
        self.rows: list[Row | None] = [None] * engine.max_num_seqs
        # the list, not the batch: in a circle the caches would stay until Python looks for circles
        self.prefill = Prefill(
            engine, slots=self.slots, draft=draft, prepare=prepare, rows=self.rows
        )
        self.unseen = 0  # rounds since drafts chose again
        self.captured = (
            CapturedRounds(self.slots, recorder)
            if (recorder := graph_recorder(self.model))
            else None
        )
        self.slots.headroom = max(self.gamma + 1, engine.strict) if self.captured else 0

    def run(self, waiting: Iterator[Request | GammaSchedule | None]) -> Iterator[Result]:
        admission: Pieces | None = None
        slot = 0
        more = True
        while more or admission or any(self.rows):
            late = False
            if admission is None and more and None in self.rows:
                slot = self.rows.index(None)
                offered = self._offered(waiting)
                more = offered is not _END
                late = offered is None
                admission = (
                    self.prefill.admit(offered, slot) if isinstance(offered, Request) else None
                )
            if admission is not None and (arrived := self._chunk(admission)) is not None:
                admission = None
                if isinstance(arrived, Result):
                    yield arrived
                else:
                    self.rows[slot] = arrived
                    self.update_slots()
            comes = admission is not None or (more and not late and None in self.rows)
            if any(self.rows) and not comes:
                yield from self._round()
            elif late:
                time.sleep(IDLE)

    def _offered(self, waiting: Iterator[Request | GammaSchedule | None]) -> object:
        """The next of a stream, `_END` if there is none; a pace is taken on the way."""
        while isinstance(offered := next(waiting, _END), GammaSchedule):
            if offered.max_gamma > self.gamma:
                raise ValueError(
                    f"a pace of up to {offered.max_gamma} tokens a round needs a draft of that γ at least"
                )
            self.gamma_schedule = offered
        return offered

    def prefill_slots(self, requests: Sequence[Request]) -> float:
        """Fills the first slots and runs no round, for callers who run rounds themselves; returns
        the seconds it took behind the vision tower.

        Raises:
            ValueError: a request ended at its first token.
        """
        for slot, request in enumerate(requests):
            pieces = self.prefill.admit(request, slot)
            arrived = None
            while arrived is None:
                arrived = self._chunk(pieces)
            if isinstance(arrived, Result):
                raise ValueError(
                    f"request {request.request_id!r} ended at once: {arrived.error or arrived.text!r}"
                )
            self.rows[slot] = arrived
        self.update_slots()
        return sum(row.prefill_s for row in self.rows if row is not None)

    def _chunk(self, admission: Pieces) -> Row | Result | None:
        """One piece of an admission's work; None if there is more to do."""
        try:
            next(admission)
        except StopIteration as done:
            return done.value
        return None

    def update_slots(self) -> None:
        """What the slots' tensors say of who sits where, after a row has come or gone."""
        slots = self.slots
        device = self.model.device
        samplings = [row.rule if row is not None else None for row in self.rows]
        slots.samplings = samplings
        slots.sampling_state = SamplingState.of(samplings, slots.generator)
        slots.logits_processors = LogitsProcessors.of(samplings, slots.vocabulary, device)
        slots.active = torch.tensor([row is not None for row in self.rows], device=device)
        most = (
            max(len(rule.stop_ids) for rule in samplings if rule is not None)
            if any(samplings)
            else 0
        )
        stops = [
            [*(rule.stop_ids if rule else ()), *[-1] * most][: max(most, 1)] or [-1]
            for rule in samplings
        ]
        slots.stop_ids = torch.tensor(stops, device=device)
        prefix_of_row = [row.prefix if row is not None else -1 for row in self.rows]
        lengths = [p.length for p in self.prefill.prefixes]
        slots.groups = PrefixGroups.from_lists(
            prefix_of_row, lengths, device, bool(self.engine.strict or slots.headroom)
        )

    # --------------------------------------------------------------------------------------- rounds

    def _round(self) -> Iterator[Result]:
        began = time.perf_counter()
        gamma = self._gamma()
        done = self._decoded(gamma).on_host()
        seated = sum(row is not None for row in self.rows)
        spent = (time.perf_counter() - began) / seated
        self.engine.counters.rounds += 1
        self.engine.counters.row_rounds += seated
        decode = self.engine.checkpoint.decode
        # rows whose first drafted token was accepted, or refused
        finished = []
        taken = 0
        lost = 0
        for slot, (row, (tokens, _, accepted, proposed, stopped, broken)) in enumerate(
            zip(self.rows, done, strict=True)
        ):
            if row is None:
                continue
            row.decode_s += spent
            row.written += tokens
            row.drafted += gamma
            if self.mode == "sparse":
                accepted = proposed = 0
            refused = accepted < proposed  # where a row's end cuts a round, both are what was kept
            row.accept_counts[accepted] += 1
            row.reject_counts[accepted] += refused
            row.proposed += proposed
            taken = taken + (accepted > 0)
            lost = lost + (refused and not accepted)
            if broken:
                why = f"the model gave no finite logits after {len(row.written)} tokens"
                finished.append(
                    (slot, row.result("error", decode, RequestError("nan_logits", why)))
                )
            elif reason := row.ends(stopped, decode):
                finished.append((slot, row.result(reason, decode)))
        self.lately.append(FirstTokens(taken, lost))
        for slot, _ in finished:
            self.rows[slot] = None
            for count in (
                self.slots.length,
                self.slots.draft_length,
                self.slots.total,
                self.slots.generated,
            ):
                count[slot] = 0
        if finished:
            self.update_slots()
        yield from (result for _, result in finished)

    def _gamma(self) -> int:
        """γ of the next round: by counts alone, so that the same requests in the same order give
        the same rounds, on every rank."""
        if self.gamma_schedule is None or self.mode == "sparse":
            return self.gamma
        gamma = self.gamma_schedule.gamma(
            sum(row is not None for row in self.rows), self.gamma_schedule.acceptance(self.lately)
        )
        # a dense step feeds no second model, whose cache would fall behind
        return max(1, gamma) if self.slots.view == "draft_model" else gamma

    def _decoded(self, gamma: int) -> Round:
        self.unseen += 1
        propose = self._drafting(gamma)
        if self.mode == "sparse":
            one = partial(unverified_round, self.slots, propose, gamma)
        elif self.draft is not None and gamma and 0 < self.draft.refresh <= self.unseen:
            return self._looking(self.draft, propose, gamma)
        else:
            one = partial(decode_round, self.model, self.slots, propose, gamma)
        return self.captured.round(gamma, one) if self.captured else one()

    def _looking(self, draft: Draft, propose: Proposer, gamma: int) -> Round:
        """A round behind which drafts choose again."""
        self.unseen = 0
        look = look_of(self.rows, self.slots, gamma + 1)
        done = decode_round(self.model, self.slots, propose, gamma, look=look)
        if look is not None:
            reselect(draft, self.slots, self.rows, look)
        return done

    def _drafting(self, gamma: int) -> Proposer:
        if self.draft is None or not gamma:
            return partial(draft, self.model)
        if self.draft.policy == "ngram":
            return prompt_lookup
        return partial(draft, self.engine.drafter(self.draft))


def _view_of(draft: Draft | None) -> DraftView:
    if draft is not None and draft.model:
        return "draft_model"
    return "target" if draft is None or draft.policy in ("full", "ngram") else "selected"
