"""The records that cross the decoding core's border. Filled by: the caller (`Request`, `Sampling`, `Draft`), the
checkpoint (`Geometry`), the engine (`Result`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # for the annotation only: decoding processes load these records and should start fast
    import torch

Mode = Literal["std", "dense"]
FinishReason = Literal["stop", "length", "error"]


class RequestError(Exception):
    """What makes one request fail and leaves the others alone. `code` is one of the output contract's error codes."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code, self.message = code, message

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str]]:
        return RequestError, (self.code, self.message)


@dataclass(frozen=True)
class Geometry:
    """How a checkpoint's vision tower cuts frames into tokens; sizes in pixels, budgets in pixels per frame."""

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28

    @property
    def factor(self) -> int:
        """Frame sides are multiples of this."""
        return self.patch_size * self.merge_size

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Visual tokens of `frames` frames of a resized height and width (multiples of `factor`)."""
        pairs = -(-frames // self.temporal_patch_size)
        return pairs * (height // self.factor) * (width // self.factor)


@dataclass(frozen=True)
class Sampling:
    """How the full model's next token is chosen. Greedy for now."""

    max_tokens: int = 256


@dataclass(frozen=True)
class Draft:
    """What the draft sees, and for how long it drafts before the full model verifies.

    Args:
        policy: `std` (top-K by text-to-visual attention), `random` (uniform, the control), `full` (everything).
        keep: kept share of the visual entries per layer and KV head, in (0, 1]; used where `k` is None.
        k: kept visual entries per layer and KV head.
        gamma: γ, tokens drafted per round.
        seed: of the `random` policy.
    """

    policy: Literal["std", "random", "full"] = "std"
    keep: float = 0.2
    k: int | None = None
    gamma: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep is {self.keep}: a share of the visual entries, above 0 and at most 1")
        if self.k is not None and self.k < 1:
            raise ValueError(f"k is {self.k}: at least one visual entry has to be kept")
        if self.gamma < 1:
            raise ValueError(f"gamma is {self.gamma}: a round drafts at least one token")

    def budget(self, visual: int) -> int:
        """Visual entries kept of `visual`; never more than there are."""
        wanted = self.k if self.k is not None else max(1, round(self.keep * visual))
        return min(visual, wanted)


@dataclass(frozen=True)
class Request:
    """One prompt about one video. `video` names what several requests share, so that it is seen and prefilled once."""

    request_id: str
    prompt: str
    frames: torch.Tensor | None  # (T, height, width, 3) uint8, sides multiples of `Geometry.factor`
    video: str = ""
    fps: float = 2.0  # sampled frames per second, for models whose positions use it
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class Result:
    """What became of a request. Times in seconds; those of a batch's shared work are the row's share of it."""

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int = 0
    num_visual_tokens: int = 0
    kv_keep: float = 1.0  # entries the draft read over entries of the context, at the end of prefill
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0  # bonus tokens excluded
    accept_counts: tuple[int, ...] = ()  # [i]: rounds in which i drafted tokens were accepted
    vision_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    error: RequestError | None = None
