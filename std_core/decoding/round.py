"""One round of decoding: draft, verify, accept, commit (Sparse-to-Dense §3.1). A dense step is a
round that drafts nothing, an unverified one a round that only drafts. All tensors are per row; no
row waits for another's length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from std_core.decoding.accept import accept_equal, accept_sampled
from std_core.decoding.logits import LogitsProcessors
from std_core.decoding.token_sampling import (
    ResolvedSampling,
    SamplingState,
    process_logits,
    sample_tokens,
)
from std_core.kernels.shared.segments import PrefixGroups
from std_core.model.cache import AttentionProbe, DecodeStep, KVCache
from std_core.model.model import Model

# What a draft reads: the rows' own caches; a view with the kept entries; a second model's cache.
DraftView = Literal["target", "selected", "draft_model"]


@dataclass
class Slots:
    """The rows that decode together. Filled by the engine at admission, moved on by
    `decode_round`."""

    prefix: KVCache  # what questions on one video share
    suffix: KVCache  # each row's entries behind it
    draft: KVCache  # the draft's view of each row, unless it reads the two above
    length: torch.Tensor  # (B,) entries in `suffix`
    draft_length: torch.Tensor  # (B,) entries in `draft`
    position: torch.Tensor  # (B,) M-RoPE position of the row's last token
    total: torch.Tensor  # (B,) tokens of prompt and output
    generated: torch.Tensor  # (B,) tokens of the output
    remaining: torch.Tensor  # (B,) tokens it may still write
    active: torch.Tensor  # (B,) bool
    history: (
        torch.Tensor
    )  # (B, capacity) ids of prompt, output and, behind them, the draft under way
    stop_ids: torch.Tensor  # (B, n) padded with -1
    samplings: list[ResolvedSampling | None]
    sampling_state: SamplingState
    groups: PrefixGroups
    generator: torch.Generator
    vocabulary: int
    view: DraftView = "target"
    strict: int = (
        0  # tokens per row to which every verification is padded, if its shape is to be fixed
    )
    logits_processors: LogitsProcessors | None = (
        None  # the rows' processors in tensors, unless there is one that is not known there
    )
    # entries that a round may write behind a row's: room made at admission. 0: rounds make their
    # own
    headroom: int = 0

    @classmethod
    def empty(cls, model: Model, count: int, generator: torch.Generator, strict: int = 0) -> Slots:
        """Without a row. Views are made by who knows the draft."""
        length, draft_length, position, total, generated, remaining = torch.zeros(
            6, count, dtype=torch.long, device=model.device
        )
        samplings: list[ResolvedSampling | None] = [None] * count
        return cls(
            model.new_cache(count),
            model.new_cache(count),
            model.new_cache(count),
            length,
            draft_length,
            position,
            total,
            generated,
            remaining,
            active=torch.zeros(count, dtype=torch.bool, device=model.device),
            history=torch.zeros(count, 0, dtype=torch.long, device=model.device),
            stop_ids=torch.full((count, 1), -1, device=model.device),
            samplings=samplings,
            sampling_state=SamplingState.of(samplings, generator),
            groups=PrefixGroups.from_lists([-1] * count, [], model.device),
            generator=generator,
            vocabulary=model.vocab_size,
            strict=strict,
        )

    @property
    def last(self) -> torch.Tensor:
        """(B, 1) the newest token of each row, whose entry is in no cache yet."""
        return self.history.gather(1, (self.total - 1).clamp(min=0)[:, None])

    def newest(self, count: int, ahead: int) -> torch.Tensor:
        """(B, count) tokens of each row, up to the one `ahead` places behind its last."""
        places = self.total[:, None] + torch.arange(ahead - count, ahead, device=self.total.device)
        return self.history.gather(1, places.clamp(min=0))

    def process_logits(self, logits: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Scores as each row's sampling has them; logits (B, T, vocabulary) behind `lengths` (B,)
        tokens."""
        if self.logits_processors is not None:
            return self.logits_processors.apply(logits, self.history, lengths)
        return process_logits(logits, self.samplings, self.history, lengths)

    def draft_step_kv(self, ahead: int) -> DecodeStep:
        """Caches for a draft step whose first token stands `ahead` places behind a row's last."""
        if self.view == "target":  # what is written here, the verification writes over
            return DecodeStep(self.suffix, self.length + ahead, self.prefix, self.groups)
        return DecodeStep(self.draft, (self.draft_length + ahead).clamp(min=0))

    def reserve(self, width: int) -> None:
        """Room for a round of `width` tokens; rejected ones and those of finished rows are written
        too."""
        if self.headroom:  # it is there, and asking for lengths would wait for the device
            return
        self.suffix.reserve(int(self.length.max()) + width)
        if self.view != "target":
            self.draft.reserve(int(self.draft_length.max()) + width)
        self.reserve_history(int(self.total.max()) + width)

    def reserve_history(self, tokens: int) -> None:
        if (short := tokens - self.history.shape[1]) > 0:
            self.history = F.pad(self.history, (0, short + 256))


@dataclass(frozen=True)
class Drafted:
    """γ tokens per row, and the distribution they were drawn from where some row needs it."""

    tokens: torch.Tensor  # (B, γ)
    q: torch.Tensor | None = None  # (B, γ, vocabulary)
    broken: torch.Tensor | None = (
        None  # (B,) bool: some step gave no finite logits, where a model drafted
    )


@dataclass(frozen=True)
class Round:
    """What a round gave each row."""

    tokens: torch.Tensor  # (B, γ + 1); the first `kept` of a row are its new tokens
    kept: torch.Tensor  # (B,)
    accepted: torch.Tensor  # (B,) drafted tokens among them
    proposed: (
        torch.Tensor
    )  # (B,) drafted tokens that had a chance: what lies behind a row's end does not count
    stopped: torch.Tensor  # (B,) bool: the last of them is a stop id
    broken: torch.Tensor  # (B,) bool: the full model gave no finite logits

    def on_host(self) -> list[tuple[list[int], int, int, int, bool, bool]]:
        """Row by row, its kept tokens first; in one transfer, the only thing of a round that waits
        for the device."""
        numbers = torch.stack([x.long() for x in list(vars(self).values())[1:]], dim=1)
        rows = torch.cat([self.tokens, numbers], dim=1).tolist()
        return [(row[: row[-5]], *row[-5:-2], bool(row[-2]), bool(row[-1])) for row in rows]


Proposer = Callable[[Slots, int], Drafted]


@torch.inference_mode()
def decode_round(
    model: Model, slots: Slots, propose: Proposer, gamma: int, look: AttentionProbe | None = None
) -> Round:
    """Moves all active rows on by 1 to γ + 1 tokens.

    Args:
        drafting: `prompt_lookup`, or `draft` with the model that drafts.
        gamma: γ; 0 is the dense step.
        look: gathers where the verified tokens look.
    """
    slots.reserve(max(gamma + 1, slots.strict))
    drafted = propose(slots, gamma)
    scores, broken = verify(model, slots, drafted.tokens, look)
    tokens, accepted = accept(slots, drafted, scores)
    return commit(slots, tokens, accepted, broken)


@torch.inference_mode()
def unverified_round(slots: Slots, propose: Proposer, gamma: int) -> Round:
    """Moves all active rows on by γ tokens that nobody verifies: lossy, for `mode=sparse` alone."""
    slots.reserve(gamma + 1)
    drafted = propose(slots, gamma)
    everything = torch.full_like(slots.total, gamma - 1)
    return commit(slots, drafted.tokens, everything, drafted.broken)


def draft(drafter: Model, slots: Slots, gamma: int) -> Drafted:
    """γ tokens per row that a sparse view of the model, or a second model, would write."""
    tokens = [slots.last[:, :0]]
    q = []
    broken = torch.zeros_like(slots.active)
    # after a round that was accepted whole, a second model's cache lacks the last token but one: it
    # is fed again
    back = int(slots.view == "draft_model")
    for i in range(gamma):
        fed = slots.newest(1 + back, i)
        positions = slots.position[:, None] + torch.arange(i - back, i + 1, device=fed.device)
        logits = drafter.step(fed, positions, slots.draft_step_kv(i - back))[:, -1:]
        back = 0
        scores = slots.process_logits(logits, slots.total + i)
        token = sample_tokens(scores, slots.sampling_state, slots.generated[:, None] + i)
        broken |= ~scores.gather(2, token[..., None])[
            :, 0, 0
        ].isfinite()  # the maximum is NaN if anything is
        slots.history.scatter_(1, (slots.total + i)[:, None], token)
        tokens.append(token)
        if slots.sampling_state.fresh:
            q.append(scores.softmax(-1))
    return Drafted(torch.cat(tokens, dim=1), torch.cat(q, dim=1) if q else None, broken)


def prompt_lookup(slots: Slots, gamma: int, longest: int = 3) -> Drafted:
    """Prompt lookup: what followed the newest earlier appearance of the row's last words. Longer
    matches go first; a row without any drafts its last token again."""
    places = torch.arange(slots.history.shape[1], device=slots.history.device)
    best = torch.full_like(slots.total, -1)
    for n in range(1, longest + 1):
        matches = (
            (places >= n - 1) & (places < slots.total[:, None] - 1) & (slots.total[:, None] > n)
        )
        for back in range(n):
            word = slots.history.gather(1, (slots.total - 1 - back).clamp(min=0)[:, None])
            matches = matches & (slots.history.roll(back, dims=1) == word)
        newest = torch.where(matches, places, -1).amax(1)
        best = torch.where(newest >= 0, newest, best)
    at = best[:, None] + 1 + torch.arange(gamma, device=places.device)
    # a match near the end continues into what it has itself just proposed: repeat from the match on
    period = (slots.total - 1 - best)[:, None].clamp(min=1)
    at = torch.where(
        at < slots.total[:, None], at, best[:, None] + 1 + (at - best[:, None] - 1) % period
    )
    tokens = torch.where(best[:, None] >= 0, slots.history.gather(1, at.clamp(min=0)), slots.last)
    slots.history.scatter_(
        1, slots.total[:, None] + torch.arange(gamma, device=places.device), tokens
    )
    if not slots.sampling_state.fresh:
        return Drafted(tokens)
    return Drafted(tokens, F.one_hot(tokens, slots.vocabulary).float())


def verify(
    model: Model, slots: Slots, drafted: torch.Tensor, look: AttentionProbe | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The full model's scores after the last token and after each drafted one, (B, γ + 1,
    vocabulary), in one step; and which rows got no finite ones."""
    tokens = torch.cat([slots.last, drafted], dim=1)
    width = tokens.shape[1]
    tokens = F.pad(tokens, (0, max(0, slots.strict - width)))
    positions = slots.position[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    mirror = (slots.draft, slots.draft_length) if slots.view == "selected" else None
    kv = DecodeStep(
        slots.suffix,
        lengths=slots.length,
        prefix=slots.prefix,
        groups=slots.groups,
        mirror=mirror,
        fixed=slots.strict > 0,
        look=look,
    )
    logits = model.step(tokens, positions, kv)[:, :width]
    broken = ~logits.sum(-1).isfinite().all(
        -1
    )  # a sum shows what is not finite at a fiftieth of the cost
    return slots.process_logits(logits, slots.total), broken


def accept(
    slots: Slots, drafted: Drafted, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B, γ + 1) of which the first n + 1 are the round's, and n (B,)."""
    places = slots.generated[:, None] + torch.arange(scores.shape[1], device=scores.device)
    tokens = sample_tokens(scores, slots.sampling_state, places)
    accepted = accept_equal(drafted.tokens, tokens)
    if slots.sampling_state.fresh and drafted.q is not None:
        p = scores.softmax(-1).nan_to_num_(
            nan=1.0
        )  # a broken row draws anything and is ended by the engine
        n, drawn = accept_sampled(
            drafted.tokens, drafted.q.nan_to_num_(nan=1.0), p, slots.generator
        )
        tokens = torch.where(slots.sampling_state.unseeded[:, None], drawn, tokens)
        accepted = torch.where(slots.sampling_state.unseeded, n, accepted)
    return tokens, accepted


def commit(
    slots: Slots, tokens: torch.Tensor, accepted: torch.Tensor, broken: torch.Tensor | None
) -> Round:
    """Lengths move up by what is kept: the confirmed tokens and the bonus, cut at a stop id and at
    the row's limit. What a rejected token had written lies behind the length and is overwritten."""
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
