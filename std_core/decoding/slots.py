"""The rows that decode together: their caches, lengths, tokens and sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F

from std_core.decoding.logits import LogitsProcessors
from std_core.decoding.token_sampling import ResolvedSampling, SamplingState, process_logits
from std_core.kernels.shared.segments import PrefixGroups
from std_core.model.cache import DecodeStep, KVCache
from std_core.model.model import Model
from std_core.types import RequestError

# The caches that a draft reads: those of the full model (the target), the draft cache with selected
# entries of the target, or the draft cache with a second model's entries.
DraftView = Literal["target", "selected", "draft_model"]

HISTORY_STEP = 256  # tokens by which the history grows beyond what is needed now

# tensors (B,) of `Slots` that hold numbers of each row
_COUNTS = ("length", "draft_length", "position", "total", "generated", "remaining")


@dataclass
class Slots:
    """The rows that decode together. Their number grows as rows are admitted.

    Filled by the engine at admission, updated by `decode_round`. A row's context is its prefix,
    which several rows can share, and its suffix.

    Args:
        prefix: the prefix store's cache.
        suffix: each row's entries behind its prefix.
        draft: entries that drafts read, unless they read the target's caches.
        length: (B,) entries in `suffix`.
        draft_length: (B,) entries in `draft`.
        position: (B,) M-RoPE position of the row's last token.
        total: (B,) tokens of prompt and output.
        generated: (B,) tokens of the output.
        remaining: (B,) tokens that the row may still generate.
        active: (B,) bool.
        history: (B, capacity) ids of prompt and output, followed by the current draft.
        stop_ids: (B, n), padded with -1.
        strict: tokens per row to which every verification is padded; 0 does not pad.
        logits_processors: the rows' processors as tensors; None if a row has an unsupported one.
        row_errors: by row, what its logits processors have raised since it was admitted.
        headroom: entries behind a row's maximal length that were reserved at its admission. 0: each
            round reserves the room it needs, which waits for the device.
        keeps_scores: rounds return their scores and logits.
    """

    prefix: KVCache
    suffix: KVCache
    draft: KVCache
    length: torch.Tensor
    draft_length: torch.Tensor
    position: torch.Tensor
    total: torch.Tensor
    generated: torch.Tensor
    remaining: torch.Tensor
    active: torch.Tensor
    history: torch.Tensor
    stop_ids: torch.Tensor
    samplings: list[ResolvedSampling | None]
    sampling_state: SamplingState
    groups: PrefixGroups
    generator: torch.Generator
    vocab_size: int
    view: DraftView = "target"
    strict: int = 0
    logits_processors: LogitsProcessors | None = None
    headroom: int = 0
    row_errors: dict[int, RequestError] = field(default_factory=dict)
    keeps_scores: bool = False

    @classmethod
    def empty(cls, model: Model, count: int, generator: torch.Generator, strict: int = 0) -> Slots:
        """`count` slots without a row."""
        samplings: list[ResolvedSampling | None] = [None] * count

        def zeros() -> torch.Tensor:
            return torch.zeros(count, dtype=torch.long, device=model.device)

        return cls(
            prefix=model.new_cache(count),
            suffix=model.new_cache(count),
            draft=model.new_cache(count),
            length=zeros(),
            draft_length=zeros(),
            position=zeros(),
            total=zeros(),
            generated=zeros(),
            remaining=zeros(),
            active=torch.zeros(count, dtype=torch.bool, device=model.device),
            history=torch.zeros(count, 0, dtype=torch.long, device=model.device),
            stop_ids=torch.full((count, 1), -1, device=model.device),
            samplings=samplings,
            sampling_state=SamplingState.of(samplings, generator),
            groups=PrefixGroups.from_lists([-1] * count, [], model.device),
            generator=generator,
            vocab_size=model.vocab_size,
            strict=strict,
        )

    @property
    def last(self) -> torch.Tensor:
        """(B, 1) newest token of each row, whose entry is in no cache yet."""
        return self.history.gather(1, (self.total - 1).clamp(min=0)[:, None])

    def newest(self, count: int, offset: int) -> torch.Tensor:
        """(B, count) tokens of each row, up to the one `offset` places behind its last token."""
        places = self.total[:, None] + torch.arange(
            offset - count, offset, device=self.total.device
        )
        return self.history.gather(1, places.clamp(min=0))

    def process_logits(self, logits: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Apply each row's logits processors.

        Args:
            logits: (B, T, vocabulary).
            lengths: (B,) tokens of the history before the first position.
        """
        if self.logits_processors is not None:
            return self.logits_processors.apply(logits, self.history, lengths)
        return process_logits(
            logits, self.samplings, self.history, lengths=lengths, errors=self.row_errors
        )

    def draft_step_kv(self, offset: int) -> DecodeStep:
        """Caches for a draft step whose first token is `offset` places behind a row's last one."""
        if self.view == "target":  # verification overwrites what the draft writes here
            return DecodeStep(self.suffix, self.length + offset, self.prefix, self.groups)
        return DecodeStep(self.draft, (self.draft_length + offset).clamp(min=0))

    def reset(self, row: int) -> None:
        """Empty a slot; its entries are overwritten by the next row's."""
        for count in (self.length, self.draft_length, self.total, self.generated):
            count[row] = 0
        self.row_errors.pop(row, None)

    def add_rows(self, rows: int) -> None:
        """Grow to `rows` slots. What is made from all rows, such as `groups`, is the caller's."""
        added = rows - len(self.total)
        self.suffix.reserve_rows(rows)
        self.draft.reserve_rows(rows)
        for name in _COUNTS:
            setattr(self, name, F.pad(getattr(self, name), (0, added)))
        self.history = F.pad(self.history, (0, 0, 0, added))

    def reserve(self, width: int) -> None:
        """Make room for a round of `width` tokens, rejected tokens and finished rows included."""
        if self.headroom:
            return
        self.suffix.reserve(int(self.length.max()) + width)
        if self.view != "target":
            self.draft.reserve(int(self.draft_length.max()) + width)
        self.reserve_history(int(self.total.max()) + width)

    def reserve_history(self, tokens: int) -> None:
        """Make room for `tokens` of prompt, output and draft per row."""
        missing = tokens - self.history.shape[1]
        if missing > 0:
            self.history = F.pad(self.history, (0, missing + HISTORY_STEP))
