"""One round of decoding: draft, verify, accept, commit (Sparse-to-Dense §3.1).

A dense step is a round with γ = 0; an unverified round only drafts. All tensors are per row: no row
waits for another's length. B: slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from std_core.decoding.accept import accept_equal, accept_sampled
from std_core.decoding.slots import Slots
from std_core.decoding.token_sampling import sample_tokens
from std_core.model.cache import AttentionProbe, DecodeStep, MirrorCache
from std_core.model.model import Model


@dataclass(frozen=True)
class Drafted:
    """γ drafted tokens per row.

    Args:
        tokens: (B, γ).
        q: (B, γ, vocabulary) the distributions they were drawn from; None if every row is greedy
            or seeded.
        broken: (B,) bool, rows with a draft step that gave no finite logits; None if no model
            drafted.
    """

    tokens: torch.Tensor
    q: torch.Tensor | None = None
    broken: torch.Tensor | None = None


class RowRound(NamedTuple):
    """A round's outcome for one row, on the host."""

    tokens: list[int]  # new ones
    accepted: int
    proposed: int
    stopped: bool
    broken: bool

    @property
    def rejected(self) -> bool:
        """Whether a drafted token was rejected; a row's end is no rejection."""
        return self.accepted < self.proposed


class Verified(NamedTuple):
    """What the full model gave behind a row's last token and behind each drafted one.

    scores: (B, γ + 1, vocabulary) processed. broken: (B,) bool, rows whose logits are not finite.
    logits: as `scores`, not processed; None unless the slots keep scores.
    """

    scores: torch.Tensor
    broken: torch.Tensor
    logits: torch.Tensor | None = None


@dataclass(frozen=True)
class Round:
    """A round's outcome.

    Args:
        tokens: (B, γ + 1); the first `kept` of a row are its new tokens.
        kept: (B,).
        accepted: (B,) drafted tokens among the kept ones.
        proposed: (B,) drafted tokens up to the row's end; those behind it could not be accepted.
        stopped: (B,) bool, the last kept token is a stop id.
        broken: (B,) bool, the full model gave no finite logits.
        verified: scores and logits, if the slots keep them.
    """

    tokens: torch.Tensor
    kept: torch.Tensor
    accepted: torch.Tensor
    proposed: torch.Tensor
    stopped: torch.Tensor
    broken: torch.Tensor
    verified: Verified | None = None

    def of_row(self, row: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of scores and logits (count, vocabulary) of a row's new tokens, if kept."""
        assert self.verified is not None and self.verified.logits is not None
        return self.verified.scores[row, :count].clone(), self.verified.logits[row, :count].clone()

    def on_host(self) -> list[RowRound]:
        """Copy the outcome to the host, row by row.

        One transfer: it is the only point where a round waits for the device.
        """
        numbers = (self.kept, self.accepted, self.proposed, self.stopped, self.broken)
        columns = torch.stack([x.long() for x in numbers], dim=1)
        width = self.tokens.shape[1]
        rows = []
        for values in torch.cat([self.tokens, columns], dim=1).tolist():
            kept, accepted, proposed, stopped, broken = values[width:]
            tokens = values[:kept]
            rows.append(RowRound(tokens, accepted, proposed, bool(stopped), bool(broken)))
        return rows


# Drafts γ tokens: `prompt_lookup`, or `draft` with its model bound.
Proposer = Callable[[Slots, int], Drafted]


@torch.inference_mode()
def decode_round(
    model: Model, slots: Slots, propose: Proposer, gamma: int, probe: AttentionProbe | None = None
) -> Round:
    """Advance all active rows by 1 to γ + 1 tokens.

    Args:
        gamma: γ; 0 is a dense step.
        probe: collects the attention that the verified tokens pay to the selectable entries.
    """
    slots.reserve(max(gamma + 1, slots.strict))
    drafted = propose(slots, gamma)
    verified = verify(model, slots, drafted.tokens, probe)
    tokens, accepted = accept(slots, drafted, verified.scores)
    done = commit(slots, tokens, accepted, verified.broken)
    return replace(done, verified=verified) if slots.keeps_scores else done


@torch.inference_mode()
def unverified_round(slots: Slots, propose: Proposer, gamma: int) -> Round:
    """Advance all active rows by γ drafted tokens without verification.

    Lossy, for `mode=sparse` only. Nothing counts as proposed or accepted.
    """
    slots.reserve(gamma + 1)
    drafted = propose(slots, gamma)
    all_but_last = torch.full_like(slots.total, gamma - 1)
    done = commit(slots, drafted.tokens, all_but_last, drafted.broken)
    nothing = torch.zeros_like(done.kept)
    return replace(done, accepted=nothing, proposed=nothing)


def draft(drafter: Model, slots: Slots, gamma: int) -> Drafted:
    """Draft γ tokens per row with a sparse view of the model, or with a second model."""
    tokens = [slots.last[:, :0]]
    q = []
    broken = torch.zeros_like(slots.active)
    # after a round whose drafted tokens were all accepted, a second model's cache lacks the last
    # token but one: the first step feeds it again
    back = int(slots.view == "draft_model")
    for i in range(gamma):
        fed = slots.newest(1 + back, i)
        positions = slots.position[:, None] + torch.arange(i - back, i + 1, device=fed.device)
        logits = drafter.step(fed, positions, slots.draft_step_kv(i - back))[:, -1:]
        back = 0
        scores = slots.process_logits(logits, slots.total + i)
        token = sample_tokens(scores, slots.sampling_state, slots.generated[:, None] + i)
        # the chosen score is the maximum, which is NaN if any score is
        broken |= ~scores.gather(2, token[..., None])[:, 0, 0].isfinite()
        slots.history.scatter_(1, (slots.total + i)[:, None], token)
        tokens.append(token)
        if slots.sampling_state.fresh:
            q.append(scores.softmax(-1))
    return Drafted(torch.cat(tokens, dim=1), torch.cat(q, dim=1) if q else None, broken)


def prompt_lookup(slots: Slots, gamma: int, longest: int = 3) -> Drafted:
    """Draft what followed the newest earlier match of the row's last tokens (prompt lookup).

    Longer matches are preferred; a row without a match drafts its last token again.

    Args:
        longest: tokens of the longest n-gram that is matched.
    """
    end = slots.total[:, None]
    places = torch.arange(slots.history.shape[1], device=slots.history.device)
    steps = torch.arange(gamma, device=places.device)
    match = torch.full_like(slots.total, -1)  # place of the match's last token
    for n in range(1, longest + 1):
        matches = (places >= n - 1) & (places < end - 1) & (end > n)
        for back in range(n):
            token = slots.history.gather(1, (end - 1 - back).clamp(min=0))
            matches = matches & (slots.history.roll(back, dims=1) == token)
        newest = torch.where(matches, places, -1).amax(1)
        match = torch.where(newest >= 0, newest, match)
    first = match[:, None] + 1
    source = first + steps
    # a match near the end continues into the draft itself: repeat from the match on
    period = (end - first).clamp(min=1)
    source = torch.where(source < end, source, first + steps % period)
    found = slots.history.gather(1, source.clamp(min=0))
    tokens = torch.where(match[:, None] >= 0, found, slots.last)
    slots.history.scatter_(1, end + steps, tokens)
    if not slots.sampling_state.fresh:
        return Drafted(tokens)
    return Drafted(tokens, F.one_hot(tokens, slots.vocab_size).float())


def verify(
    model: Model, slots: Slots, drafted: torch.Tensor, probe: AttentionProbe | None = None
) -> Verified:
    """Compute the full model's scores behind the last token and each drafted one, in one step.

    Args:
        drafted: (B, γ).
    """
    tokens = torch.cat([slots.last, drafted], dim=1)
    width = tokens.shape[1]
    tokens = F.pad(tokens, (0, max(0, slots.strict - width)))
    positions = slots.position[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    mirror = MirrorCache(slots.draft, slots.draft_length) if slots.view == "selected" else None
    kv = DecodeStep(
        slots.suffix,
        lengths=slots.length,
        prefix=slots.prefix,
        groups=slots.groups,
        mirror=mirror,
        fixed=slots.strict > 0,
        attention_probe=probe,
    )
    logits = model.step(tokens, positions, kv)[:, :width]
    broken = ~is_finite(logits).all(-1)
    kept = logits.to(torch.float32, copy=True) if slots.keeps_scores else None
    return Verified(slots.process_logits(logits, slots.total), broken, kept)


def is_finite(logits: torch.Tensor) -> torch.Tensor:
    """Whether all logits of a position are finite; logits (…, vocabulary).

    By their extremes, which are NaN if a logit is. It costs a seventh of testing each logit. A sum
    would cost less, but in float16 it overflows at large vocabularies.
    """
    return logits.amax(-1).isfinite() & logits.amin(-1).isfinite()


def accept(
    slots: Slots, drafted: Drafted, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the leading drafted tokens that the full model confirms.

    Returns:
        (B, γ + 1) tokens of which the first n + 1 are the round's, and n (B,).
    """
    places = slots.generated[:, None] + torch.arange(scores.shape[1], device=scores.device)
    tokens = sample_tokens(scores, slots.sampling_state, places)
    accepted = accept_equal(drafted.tokens, tokens)
    state = slots.sampling_state
    if state.fresh and drafted.q is not None:
        # a broken row may draw anything: the engine ends it
        p = scores.softmax(-1).nan_to_num_(nan=1.0)
        q = drafted.q.nan_to_num_(nan=1.0)
        n, drawn = accept_sampled(drafted.tokens, q, p, slots.generator)
        tokens = torch.where(state.unseeded[:, None], drawn, tokens)
        accepted = torch.where(state.unseeded, n, accepted)
    return tokens, accepted


def commit(
    slots: Slots, tokens: torch.Tensor, accepted: torch.Tensor, broken: torch.Tensor | None
) -> Round:
    """Advance the rows by their kept tokens.

    Kept are the accepted tokens and the bonus, cut at a stop id and at the row's limit. Entries of
    rejected tokens lie behind the length and are overwritten by the next round.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    stops = (tokens[..., None] == slots.stop_ids[:, None]).any(-1) & (places <= accepted[:, None])
    first_stop = torch.where(stops.any(1), stops.long().argmax(1), tokens.shape[1])
    kept = torch.minimum(torch.minimum(accepted, first_stop) + 1, slots.remaining) * slots.active
    slots.history.scatter_(1, slots.total[:, None] + places, tokens)
    for count in (slots.length, slots.draft_length, slots.position, slots.total, slots.generated):
        count += kept
    slots.remaining -= kept
    proposed = torch.where(kept <= accepted, kept, tokens.shape[1] - 1)
    stopped = (first_stop < kept) & slots.active
    broken = torch.zeros_like(stopped) if broken is None else broken & slots.active
    return Round(
        tokens,
        kept=kept,
        accepted=torch.minimum(accepted, kept),
        proposed=proposed,
        stopped=stopped,
        broken=broken,
    )
