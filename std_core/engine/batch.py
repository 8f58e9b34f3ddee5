"""The rows in the slots: requests enter, rounds advance them, results leave as rows finish.

A round costs nearly the same for few rows as for many. Free slots are therefore filled before the
next round whenever a request is available: this delays single rows and raises the throughput.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from std_core.decoding.logits import LogitsProcessors
from std_core.decoding.round import (
    Proposer,
    Round,
    RowRound,
    decode_round,
    draft,
    prompt_lookup,
    unverified_round,
)
from std_core.decoding.slots import Slots
from std_core.decoding.token_sampling import ResolvedSampling, SamplingState
from std_core.engine.context import EngineContext
from std_core.engine.cuda_graphs import CapturedRounds, graph_recorder
from std_core.engine.draft_view import view_of
from std_core.engine.prefill import Admission, Prefill, advance
from std_core.engine.refresh import attention_probe_of, reselect
from std_core.engine.row import Row
from std_core.kernels.shared.segments import PrefixGroups
from std_core.model.cache import rows_after_growth
from std_core.model.checkpoint import ModelInputs
from std_core.types import (
    Draft,
    FirstTokens,
    GammaSchedule,
    Mode,
    Request,
    RequestError,
    Result,
)

POLL_S = 0.005  # between two polls for a request while no row is running
# Rounds from which a gamma schedule estimates acceptance. Dense rounds push old statistics out of
# this window, so drafting is tried again: for `MIN_DRAFTED_ROUNDS` rounds if acceptance stays low.
RECENT_ROUNDS = 32
_END = object()


class Batch:
    """One run over a stream of requests: the slots, and the host's record of each row.

    Args:
        draft: None decodes densely.
        prepare: makes a request's token ids and pixels.
        mode: `sparse` does not verify.

    Raises:
        ValueError: γ is too large for `strict`, or the draft cannot be used without verification.
    """

    def __init__(
        self,
        context: EngineContext,
        draft: Draft | None,
        prepare: Callable[[Request], ModelInputs],
        mode: Mode = "std",
    ):
        _check(draft, mode, context.strict)
        self.context = context
        self.model = context.model
        self.draft = draft
        self.mode = mode
        self.gamma = draft.gamma if draft else 0  # of each round; the maximum under a schedule
        self.gamma_schedule: GammaSchedule | None = None
        self.recent_rounds: deque[FirstTokens] = deque(maxlen=RECENT_ROUNDS)
        self.rounds_since_refresh = 0
        self.slots = self._empty_slots()
        self.rows: list[Row | None] = [None] * len(self.slots.total)  # grows as slots are used
        # pass the list, not self: a reference cycle would keep the caches alive until the garbage
        # collector runs
        self.prefill = Prefill(
            context, slots=self.slots, draft=draft, prepare=prepare, rows=self.rows
        )
        recorder = graph_recorder(self.model)
        self.captured = CapturedRounds(self.slots, recorder) if recorder else None
        self.slots.headroom = max(self.gamma + 1, context.strict) if self.captured else 0

    def _empty_slots(self) -> Slots:
        context = self.context
        # batches of one shape under `strict`: all slots from the start
        count = context.max_num_seqs if context.strict else 1
        generator = torch.Generator(self.model.device)  # `Prefill` seeds it
        slots = Slots.empty(self.model, count, generator, context.strict)
        slots.prefix = context.prefixes.cache
        slots.view = view_of(self.draft)
        if self.draft is not None and self.draft.model:
            slots.draft = context.draft_models.get(self.draft).new_cache(count)
        return slots

    # ------------------------------------------------------------------------------------ admission

    def run(self, requests: Iterator[Request | GammaSchedule | None]) -> Iterator[Result]:
        """Answer a stream of requests; see `Engine.run`."""
        admission: Admission | None = None
        slot = 0
        more = True
        while more or admission or self.running:
            no_request_yet = False
            if admission is None and more and self.has_free_slot:
                request = self._next_request(requests)
                more = request is not _END
                no_request_yet = request is None
                if isinstance(request, Request):
                    slot = self._free_slot()
                    admission = self.prefill.admit(request, slot)
            if admission is not None:
                admitted = advance(admission)
                if admitted is not None:
                    admission = None
                if isinstance(admitted, Result):
                    yield admitted
                elif admitted is not None:
                    self.rows[slot] = admitted
                    self.update_slots()
            can_admit = more and not no_request_yet and self.has_free_slot
            if self.running and admission is None and not can_admit:
                yield from self._round()
            elif no_request_yet:
                time.sleep(POLL_S)

    def _next_request(self, requests: Iterator[Request | GammaSchedule | None]) -> object:
        """The stream's next request, None if there is none yet, `_END` behind the last one.

        A gamma schedule on the way is put in force.
        """
        while True:
            item = next(requests, _END)
            if item is None or item is _END or isinstance(item, Request):
                return item
            if not isinstance(item, GammaSchedule):
                raise TypeError(f"the stream of requests has a {type(item).__name__}")
            if item.max_gamma > self.gamma:
                raise ValueError(
                    f"a gamma schedule of up to {item.max_gamma} tokens a round needs a draft of"
                    f" at least that γ; the draft's is {self.gamma}"
                )
            self.gamma_schedule = item

    def prefill_slots(self, requests: Sequence[Request]) -> float:
        """Fill the first slots and run no round, for callers that run rounds themselves.

        Returns:
            Seconds of prefill, without the vision tower.

        Raises:
            ValueError: a request ended at its first token.
        """
        for request in requests:
            slot = self._free_slot()
            row = self.admit(request, slot)
            if isinstance(row, Result):
                raise ValueError(
                    f"request {request.request_id!r} ended at once: {row.error or row.text!r}"
                )
            self.rows[slot] = row
        self.update_slots()
        return sum(row.prefill_s for row in self.rows if row is not None)

    def admit(self, request: Request, slot: int) -> Row | Result:
        """Prefill a request into a slot, without interruption."""
        admission = self.prefill.admit(request, slot)
        while True:
            admitted = advance(admission)
            if admitted is not None:
                return admitted

    @property
    def has_free_slot(self) -> bool:
        return None in self.rows or len(self.rows) < self.context.max_num_seqs

    def _free_slot(self) -> int:
        """A free slot. Slots are added if all are occupied: few rows take the memory of few."""
        if None not in self.rows:
            count = rows_after_growth(len(self.rows), self.context.max_num_seqs)
            self.slots.add_rows(count)
            self.rows += [None] * (count - len(self.rows))
            self.update_slots()
        return self.rows.index(None)

    @property
    def running(self) -> int:
        """Running rows."""
        return sum(row is not None for row in self.rows)

    def update_slots(self) -> None:
        """Rebuild the slots' tensors from the rows, after a row has entered or left."""
        slots = self.slots
        device = self.model.device
        samplings = [row.sampling if row is not None else None for row in self.rows]
        slots.samplings = samplings
        slots.sampling_state = SamplingState.of(samplings, slots.generator)
        slots.keeps_scores = any(s is not None and s.keeps_scores for s in samplings)
        slots.logits_processors = LogitsProcessors.of(samplings, slots.vocab_size, device)
        slots.active = torch.tensor([row is not None for row in self.rows], device=device)
        slots.stop_ids = torch.tensor(_padded_stop_ids(samplings), device=device)
        slots.groups = PrefixGroups.from_lists(
            [row.prefix if row is not None else -1 for row in self.rows],
            self.context.prefixes.lengths,
            device,
            bool(self.context.strict or slots.headroom),
        )

    # --------------------------------------------------------------------------------------- rounds

    def _round(self) -> Iterator[Result]:
        """Run a round and yield the results of the rows that it finishes."""
        began = time.perf_counter()
        gamma = self._next_gamma()
        done = self._decode(gamma)
        outcomes = done.on_host()
        running = self.running
        seconds = (time.perf_counter() - began) / running
        self.context.counters.rounds += 1
        self.context.counters.row_rounds += running
        accepted = 0
        rejected = 0
        results = []
        for slot, (row, outcome) in enumerate(zip(self.rows, outcomes, strict=True)):
            if row is None:
                continue
            row.record_round(outcome, gamma, seconds)
            if row.sampling.keeps_scores:
                row.record_scores(*done.of_row(slot, len(outcome.tokens)))
            accepted += outcome.accepted > 0
            rejected += outcome.rejected and outcome.accepted == 0
            result = self._finished(row, outcome, self.slots.row_errors.get(slot))
            if result is not None:
                results.append(result)
                self.rows[slot] = None
                self.slots.reset(slot)
        self.recent_rounds.append(FirstTokens(accepted, rejected))
        if results:
            self.update_slots()
        yield from results

    def _finished(self, row: Row, outcome: RowRound, error: RequestError | None) -> Result | None:
        """The row's result, if the round ended it.

        Args:
            error: of the row's logits processors.
        """
        if error is None and outcome.broken:
            message = f"the model gave no finite logits after {len(row.token_ids)} tokens"
            error = RequestError("nan_logits", message)
        return row.finished(
            outcome.stopped, self.context.checkpoint.decode, self.context.end_check, error
        )

    def _next_gamma(self) -> int:
        """γ of the next round.

        It depends on counts only, not on times: the same requests in the same order give the same
        rounds, on every rank.
        """
        if self.gamma_schedule is None or self.mode == "sparse":
            return self.gamma
        acceptance = self.gamma_schedule.acceptance(self.recent_rounds)
        gamma = self.gamma_schedule.gamma(self.running, acceptance)
        # a dense step does not feed a second model, whose cache would fall behind
        return max(1, gamma) if self.slots.view == "draft_model" else gamma

    def _decode(self, gamma: int) -> Round:
        self.rounds_since_refresh += 1
        propose = self._proposer(gamma)
        if self._refresh_is_due(gamma):
            return self._refreshing_round(propose, gamma)
        if self.mode == "sparse":
            body = partial(unverified_round, self.slots, propose, gamma)
        else:
            body = partial(decode_round, self.model, self.slots, propose, gamma)
        return self.captured.round(gamma, body) if self.captured else body()

    def _refresh_is_due(self, gamma: int) -> bool:
        if self.draft is None or not self.draft.refresh or not gamma or self.mode == "sparse":
            return False
        return self.rounds_since_refresh >= self.draft.refresh

    def _refreshing_round(self, propose: Proposer, gamma: int) -> Round:
        """A round whose verification also selects the draft's entries anew."""
        assert self.draft is not None
        self.rounds_since_refresh = 0
        probe = attention_probe_of(self.rows, self.slots, gamma + 1)
        done = decode_round(self.model, self.slots, propose, gamma, probe=probe)
        if probe is not None:
            reselect(self.draft, self.slots, self.rows, probe)
        return done

    def _proposer(self, gamma: int) -> Proposer:
        if self.draft is None or not gamma:
            return partial(draft, self.model)
        if self.draft.policy == "ngram":
            return prompt_lookup
        return partial(draft, self.context.draft_models.get(self.draft))


def _check(draft: Draft | None, mode: Mode, strict: int) -> None:
    """Raise ValueError if this draft cannot be used."""
    if draft is not None and strict and strict <= draft.gamma:
        raise ValueError(
            f"strict pads to {strict} tokens a row, but γ = {draft.gamma} verifies more"
        )
    if mode == "sparse":
        if draft is None:
            raise ValueError("mode sparse needs a draft")
        draft.check_unverified()


def _padded_stop_ids(samplings: Sequence[ResolvedSampling | None]) -> list[list[int]]:
    """(B, n) stop ids of each row, at least one column, padded with -1."""
    stop_ids = [sampling.stop_ids if sampling is not None else () for sampling in samplings]
    width = max(1, *map(len, stop_ids))
    return [[*ids, *[-1] * (width - len(ids))] for ids in stop_ids]
