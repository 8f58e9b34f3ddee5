"""Decoding as `generate` runs it, step by step, for what watches its steps.

The engine's rows advance by rounds, each at its own pace. A streamer and a stopping criterion are
made for `generate`, where all rows gain one token per step. The replay calls them once per step, in
order, with the whole batch, as soon as every row that has not ended has that step's token. Rows
that are ahead are cut back if a criterion ends them earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import MaxTimeCriteria, StoppingCriteriaList

from std_core.engine.row import Row
from std_core.types import Result


class StepReplay:
    """The steps of one batch. B: rows.

    Args:
        prompts: (B, n), padding included.
        criteria: all stopping criteria of the call.
        streamer: gets the prompts, then the tokens of each step; None for none.
        pad: token of a row that has ended.
        returns_scores: criteria get the processed scores.
    """

    def __init__(
        self,
        prompts: torch.Tensor,
        criteria: StoppingCriteriaList,
        streamer: Any = None,
        pad: int = 0,
        *,
        returns_scores: bool = False,
    ):
        self.sequences = prompts
        self.prompt_length = prompts.shape[1]
        # the time is not a matter of steps: it ends each row where it is
        self.time_limits = [c for c in criteria if type(c) is MaxTimeCriteria]
        self.criteria = StoppingCriteriaList(c for c in criteria if type(c) is not MaxTimeCriteria)
        self.streamer = streamer
        self.pad = pad
        # without an id that ends rows, `generate` goes on with all rows until the last one ends
        self.pads_ended_rows = any(hasattr(c, "eos_token_id") for c in criteria)
        self.rows: list[Row | None] = [None] * len(prompts)
        self.unfinished = torch.ones(len(prompts), dtype=torch.bool, device=prompts.device)
        self.ends: list[int | None] = [None] * len(prompts)  # new tokens of rows that have ended
        self.scores: tuple[torch.Tensor, ...] | None = () if returns_scores else None
        if streamer is not None:
            streamer.put(prompts.cpu())

    def advance(self, index: int, row: Row) -> int | None:
        """Replay the steps that a row's new tokens complete.

        Returns:
            The number of the row's tokens at which it ends; None if it goes on.
        """
        self.rows[index] = row
        self._replay()
        if self.ends[index] is None and self._time_is_up():
            self.ends[index] = len(row.token_ids)
            self._replay()
        return self.ends[index]

    def finish(self) -> None:
        """Close the stream."""
        if self.streamer is not None:
            self.streamer.end()

    def cut(self, results: Sequence[Result]) -> list[Result]:
        """The rows' results up to their ends: a row that was ahead may have been ended earlier."""
        cut = []
        for end, result in zip(self.ends, results, strict=True):
            assert end is not None  # the criteria include the length
            cut.append(
                replace(
                    result,
                    token_ids=result.token_ids[:end],
                    scores=result.scores[:end],
                    logits=result.logits[:end],
                )
            )
        return cut

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self.sequences.shape[1] - self.prompt_length

    def _replay(self) -> None:
        """Run all steps that are known."""
        while not all(map(self._has_ended, range(len(self.rows)))) and self._next_step_is_known():
            self._step()

    def _next_step_is_known(self) -> bool:
        return all(
            self._has_ended(index) or (row is not None and len(row.token_ids) > self.steps)
            for index, row in enumerate(self.rows)
        )

    def _has_ended(self, index: int) -> bool:
        end = self.ends[index]
        return end is not None and end <= self.steps

    def _step(self) -> None:
        step = self.steps
        tokens = [
            self.pad if self._has_ended(index) or row is None else row.token_ids[step]
            for index, row in enumerate(self.rows)
        ]
        next_tokens = torch.tensor(tokens, device=self.sequences.device)
        if self.scores is not None:
            scores = [row.scores if row is not None else [] for row in self.rows]
            self.scores = (*self.scores, step_scores(scores, step))
        self.sequences = torch.cat([self.sequences, next_tokens[:, None]], dim=1)
        ended = self.criteria(self.sequences, self.scores)
        self.unfinished = self.unfinished & ~ended
        self._note_ends(step + 1)
        if self.streamer is not None:
            self.streamer.put(next_tokens.cpu())

    def _note_ends(self, steps: int) -> None:
        over = not bool(self.unfinished.any())
        for index, unfinished in enumerate(self.unfinished.tolist()):
            end = self.ends[index]
            ends_now = over or (self.pads_ended_rows and not unfinished)
            if ends_now and (end is None or end > steps):
                self.ends[index] = steps

    def _time_is_up(self) -> bool:
        return any(bool(limit(self.sequences, None).any()) for limit in self.time_limits)


def step_scores(rows: Sequence[Sequence[torch.Tensor]], step: int) -> torch.Tensor:
    """(B, vocabulary) scores of one step; zeros in rows that have ended before it.

    Args:
        rows: of each row the scores (vocabulary,) of its tokens; one at least has the step.
    """
    zeros = next(torch.zeros_like(scores[step]) for scores in rows if len(scores) > step)
    return torch.stack([scores[step] if len(scores) > step else zeros for scores in rows])
