"""The engine: requests enter slots, rounds move them on, results leave as rows finish."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from std_core.cache import PrefillStep, copy_selection
from std_core.checkpoint import Checkpoint
from std_core.decode import Slots, decode_round
from std_core.model import Model
from std_core.select import select
from std_core.types import Draft, FinishReason, Request, RequestError, Result


@dataclass
class _Row:
    """The host's side of a slot."""

    request: Request
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


@dataclass
class Engine:
    """A model and its slots, on one device.

    Args:
        path: local folder or hub id of the checkpoint.
        dtype: `float32` or `bfloat16`.
        max_num_seqs: slots, rows that decode together.
        threads: CPU threads of this process; PyTorch's own choice if not given.

    Raises:
        ValueError: the checkpoint cannot be loaded or is of an architecture that cannot be driven.
    """

    path: str
    dtype: str = "float32"
    device: str = "cpu"
    max_num_seqs: int = 8
    threads: int | None = None
    checkpoint: Checkpoint = field(init=False)
    model: Model = field(init=False)

    def __post_init__(self) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        self.checkpoint = Checkpoint.load(self.path)
        self.model = Model(self.checkpoint, self.dtype, self.device)
        self._stop_ids = torch.tensor(self.model.stop_ids, device=self.device)

    @torch.inference_mode()
    def run(self, requests: Iterable[Request], draft: Draft | None) -> Iterator[Result]:
        """Answers every request once, in the order in which they finish.

        Args:
            requests: taken one by one, as slots become free.
            draft: what drafts and for how long; None decodes densely.
        """
        waiting, more = iter(requests), True
        slots = Slots.empty(self.model, self.max_num_seqs)
        rows: list[_Row | None] = [None] * self.max_num_seqs
        while more or any(rows):
            free = rows.index(None) if None in rows else None
            if more and free is not None:
                request = next(waiting, None)
                more = request is not None
                if request is not None:
                    outcome = self._admit(request, slots, free, draft)
                    if isinstance(outcome, Result):
                        yield outcome
                    else:
                        rows[free] = outcome
                    if not all(rows):
                        continue  # fill the slots before the next round
            if any(rows):
                yield from self._round(slots, rows, draft)

    def _admit(self, request: Request, slots: Slots, slot: int, draft: Draft | None) -> _Row | Result:
        """Vision, prefill and selection of one request; a Result if that already ends it."""
        try:
            row, first = self._prefill(request, slots, slot, draft)
        except RequestError as error:
            return Result(request.request_id, [], "", "error", error=error)
        row.written.append(first)
        if first in self.model.stop_ids or row.limit == 1:
            return self._result(row, "stop" if first in self.model.stop_ids else "length")
        slots.last[slot], slots.left[slot], slots.active[slot] = first, row.limit - 1, True
        return row

    def _prefill(self, request: Request, slots: Slots, slot: int, draft: Draft | None) -> tuple[_Row, int]:
        inputs = self.checkpoint.inputs(request)
        length, visual = inputs.ids.shape[1], inputs.visual.to(self.device)
        window = self.checkpoint.max_model_len
        if length >= window:
            raise RequestError("context_too_long", f"{length} tokens of context, the model's window is {window}")
        began = time.perf_counter()
        features = self.model.see(inputs)
        seen = time.perf_counter()
        positions, next_position = self.model.place(inputs)
        slots.full.reserve(length)
        kv = PrefillStep(slots.full, slot, visual, text=length - 1 - int(visual[-1]))
        logits = self.model.prefill(inputs, features, positions, kv)
        if not logits.isfinite().all():
            raise RequestError("nan_logits", "the model gave no finite logits behind the prompt")
        slots.length[slot], slots.position[slot] = length, next_position
        kept = self._select(kv, slots, slot, length, draft) if draft else length
        row = _Row(
            request=request,
            prompt=length,
            visual=len(visual),
            limit=min(request.sampling.max_tokens, window - length),
            kv_keep=kept / length,
            vision_s=seen - began,
            prefill_s=time.perf_counter() - seen,
            written=[],
            accept_counts=[0] * (draft.gamma + 1 if draft else 1),
        )
        return row, int(logits.argmax())

    def _select(self, kv: PrefillStep, slots: Slots, slot: int, length: int, draft: Draft) -> int:
        """Fills the slot's draft cache; returns the entries it holds per layer and KV head."""
        text = length - len(kv.visual)
        slots.draft.reserve(draft.budget(len(kv.visual)) + text)
        seed = int(kv.visual[0]) + length
        for layer, mass in enumerate(kv.mass):
            chosen = select(draft, mass, layer, seed)
            kept = copy_selection(slots.full, slots.draft, slot, layer, kv.visual, chosen, length)
        slots.draft_length[slot] = kept
        return kept

    def _round(self, slots: Slots, rows: list[_Row | None], draft: Draft | None) -> Iterator[Result]:
        began = time.perf_counter()
        done = decode_round(self.model, slots, draft.gamma if draft else 0, self._stop_ids)
        tokens, kept, accepted, proposed, stopped, broken = (x.tolist() for x in vars(done).values())
        spent = (time.perf_counter() - began) / sum(row is not None for row in rows)
        for slot, row in enumerate(rows):
            if row is None:
                continue
            row.decode_s += spent
            row.written += tokens[slot][: kept[slot]]
            row.accept_counts[accepted[slot]] += 1
            row.proposed += proposed[slot]
            if broken[slot]:
                error = RequestError("nan_logits", f"the model gave no finite logits after {len(row.written)} tokens")
                result = self._result(row, "error", error)
            elif stopped[slot] or len(row.written) >= row.limit:
                result = self._result(row, "stop" if stopped[slot] else "length")
            else:
                continue
            rows[slot], slots.active[slot] = None, False
            slots.length[slot] = slots.draft_length[slot] = 0
            yield result

    def _result(self, row: _Row, reason: FinishReason, error: RequestError | None = None) -> Result:
        rounds = sum(row.accept_counts)
        return Result(
            request_id=row.request.request_id,
            token_ids=row.written,
            text=self.checkpoint.decode(row.written),
            finish_reason=reason,
            num_prompt_tokens=row.prompt - row.visual,
            num_visual_tokens=row.visual,
            kv_keep=row.kv_keep,
            rounds=rounds,
            proposed=row.proposed,
            accepted=sum(i * n for i, n in enumerate(row.accept_counts)),
            accept_counts=tuple(row.accept_counts),
            vision_s=row.vision_s,
            prefill_s=row.prefill_s,
            decode_s=row.decode_s,
            error=error,
        )
