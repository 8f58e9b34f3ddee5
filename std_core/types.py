"""The records that callers of the engine exchange with it.

Filled by: the caller (`Request`, `Sampling`, `Draft`), the plan (`GammaSchedule`), the checkpoint
(`Geometry`), the engine (`Result`, `Counters`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    # for annotations only: decoding processes load these records and have to start fast
    import torch

Mode = Literal["std", "dense", "sparse"]
Policy = Literal["std", "window", "random", "specvlm", "snapkv", "full", "ngram"]
Weights = Literal["full", "int8", "int4"]
Dtype = Literal["float32", "bfloat16", "float16"]
FinishReason = Literal["stop", "length", "error"]
# bits of a low-bit draft's weights, scales not counted
WEIGHT_BITS = {"int8": 8, "int4": 4}
# rounds that have drafted, below which their acceptance is not used
MIN_DRAFTED_ROUNDS = 3
# seeds are held in signed 64-bit tensors
MIN_SEED = -(2**63)
MAX_SEED = 2**63 - 1
# SnapKV: the prompt's last tokens, by whose attention entries are selected (Crossover §4.1)
OBSERVATION_WINDOW = 64


class RequestError(Exception):
    """A failure of one request that does not affect the others.

    `code` is one of the output contract's error codes.
    """

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str]]:
        return RequestError, (self.code, self.message)


@dataclass(frozen=True)
class Geometry:
    """How a checkpoint's vision tower cuts frames into tokens.

    Sizes are in pixels of a side; pixel budgets are areas, per frame unless stated otherwise.

    Args:
        video_pixels: budget of all frames together; None if the model has none.
        total_pixels: default of Qwen's option `total_pixels`, which limits each frame to an even
            share of it (the cap in qwen-vl-utils).
        frame: fixed (height, width) of every frame, for models that accept one size only.
        frame_tokens: tokens of a frame of that fixed size.
        closing_tokens: tokens behind the last frame of that fixed size.
    """

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28
    video_pixels: int | None = None
    frame: tuple[int, int] | None = None
    frame_tokens: int = 0
    closing_tokens: int = 0
    total_pixels: int | None = None

    @property
    def factor(self) -> int:
        """Sides of a resized frame are multiples of this."""
        return self.patch_size * self.merge_size

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Visual tokens of a video.

        Args:
            height, width: of the resized frames, multiples of `factor`.
        """
        if self.frame is not None:
            return frames * self.frame_tokens + self.closing_tokens
        pairs = -(-frames // self.temporal_patch_size)
        return pairs * (height // self.factor) * (width // self.factor)


@dataclass(frozen=True)
class Sampling:
    """How the full model's next token is chosen; None: the checkpoint's generation configuration.

    Args:
        max_tokens: most generated tokens.
        min_tokens: generated tokens before which the output does not stop.
        temperature: 0 is greedy.
        top_p, top_k, repetition_penalty: as in transformers' processors of these names.
        seed: makes the text a function of model, request and seed alone; None: every run samples
            another text, and `torch.manual_seed` before the run repeats it.
        stop: texts at whose first occurrence the output ends; they are not part of it.
        stop_token_ids: ids that end the output, in addition to the checkpoint's own.

    Raises:
        ValueError: a value is out of range.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, minimum in (("max_tokens", 1), ("min_tokens", 0), ("top_k", 0)):
            value = getattr(self, name)
            if value is not None and value < minimum:
                expected = "at least 1" if minimum else "0 or more"
                raise ValueError(f"{name} is {value}: {expected} is needed")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature is {self.temperature}: a number of 0 (greedy) or above is needed"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: above 0 and at most 1 is needed")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}: a number above 0 is needed"
            )
        if self.seed is not None and not MIN_SEED <= self.seed <= MAX_SEED:
            raise ValueError(f"seed is {self.seed}: a signed 64-bit integer is needed")
        if "" in self.stop:
            raise ValueError("stop has an empty text, which every output contains")


@dataclass(frozen=True)
class Draft:
    """How tokens are drafted: with which part of the context and of the weights, how many a round.

    Args:
        policy: which visual entries the draft reads.
            `std`: per layer and KV head the top K by the question's attention (Sparse-to-Dense
            §3.2).
            `snapkv`: the same by the attention of the last 64 prompt tokens, and attention sinks
            (Crossover §4.1).
            `specvlm`: one set for all layers, the smallest that holds `nucleus` of the attention,
            filled up evenly (SpecVLM, stages I and II).
            `window`: attention sinks and the newest entries.
            `random`: the control.
            `full`: all entries.
            `ngram`: prompt lookup, which uses no model: drafts what followed the newest tokens at
            their last occurrence.
        keep: share of the visual entries kept per layer and KV head, in (0, 1]; unused if `k` is
            given.
        k: visual entries kept per layer and KV head.
        gamma: γ, tokens drafted per round.
        nucleus: λ of `specvlm`, in (0, 1].
        sinks: entries at the start that `window` and `snapkv` keep.
        seed: of `random`.
        refresh: rounds after which `std` and `snapkv` select again, by the attention of the newest
            tokens; 0: never.
        depth: share of the layers, in (0, 1], that the draft computes (LayerSkip).
        channels: r_P, share of the input channels of each projection that the draft computes, those
            of largest magnitude (TEAL).
        weights: `int8` or `int4`: packed copies of the projections; `full`: the model's own.
        model: folder or hub id of a second, smaller model with the same tokenizer, which drafts
            from the selected visual tokens (SpecVLM's pair).

    Raises:
        ValueError: a value is out of range, or options that exclude each other are combined.
    """

    policy: Policy = "std"
    keep: float = 0.2
    k: int | None = None
    gamma: int = 5
    nucleus: float = 0.5
    sinks: int = 4
    seed: int = 0
    refresh: int = 0
    depth: float = 1.0
    channels: float = 1.0
    weights: Weights = "full"
    model: str = ""

    def __post_init__(self) -> None:
        for name in ("keep", "nucleus", "depth", "channels"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ValueError(f"{name} is {value}: a share above 0 and at most 1 is needed")
        if self.k is not None and self.k < 1:
            raise ValueError(f"k is {self.k}: at least one visual entry has to be kept")
        if self.gamma < 1:
            raise ValueError(f"gamma is {self.gamma}: a round drafts at least one token")
        for name in ("sinks", "refresh"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"{name} is {value}: 0 or more is needed")
        if self.refresh and (self.policy not in ("std", "snapkv") or self.model):
            raise ValueError(
                "refresh selects again by attention: it needs policy std or snapkv, and no second"
                " model"
            )
        if self.channels < 1 and self.model:
            raise ValueError(
                "channels are calibrated on the full model: they cannot be combined with a second"
                " model"
            )
        if self.policy == "ngram" and (self.reads_fewer_weights or self.model):
            raise ValueError(
                "ngram drafts without a model: it cannot be combined with depth, channels, weights"
                " or model"
            )

    @property
    def supports_unverified(self) -> bool:
        """Whether its tokens can be output without verification (`mode=sparse`)."""
        return not (self.policy == "ngram" or self.model or self.depth < 1)

    def check_unverified(self) -> None:
        """Raise ValueError if its tokens cannot be output without verification."""
        if not self.supports_unverified:
            raise ValueError(
                "mode sparse takes drafts that only select entries or channels, or have low-bit"
                " weights: no ngram, depth or second model"
            )

    @property
    def reads_fewer_weights(self) -> bool:
        """Whether a step reads fewer bytes of weights than a dense step of its model."""
        return self.depth < 1 or self.channels < 1 or self.weights != "full"

    def budget(self, visual: int) -> int:
        """Visual entries kept of `visual`; at most all of them."""
        if self.k is not None:
            return min(visual, self.k)
        return min(visual, max(1, round(self.keep * visual)))


class FirstTokens(NamedTuple):
    """Rows of a round whose first drafted token was accepted, and rows where it was rejected."""

    accepted: int
    rejected: int


@dataclass(frozen=True)
class GammaSchedule:
    """γ per number of running rows and recent acceptance, in place of a draft's fixed γ.

    Acceptance is that of the first drafted token, which does not depend on γ.

    Args:
        gammas: γ by [rows - 1][acceptance class]. The classes divide [0, 1] evenly; 0 is a dense
            step. More rows than the table has use its last entry.
        expected_acceptance: acceptance that is assumed until enough rounds have drafted.

    Raises:
        ValueError: the table is empty, has an empty entry, or a negative γ; or the acceptance is
            no share.
    """

    gammas: tuple[tuple[int, ...], ...]
    expected_acceptance: float

    def __post_init__(self) -> None:
        if not self.gammas or not all(self.gammas) or self.min_gamma < 0:
            raise ValueError(
                "a gamma schedule needs γ of 0 or more for each number of rows and acceptance class"
            )
        if not 0 <= self.expected_acceptance <= 1:
            raise ValueError(
                f"expected_acceptance is {self.expected_acceptance}: a share from 0 to 1 is needed"
            )

    @property
    def min_gamma(self) -> int:
        return min(map(min, self.gammas))

    @property
    def max_gamma(self) -> int:
        return max(map(max, self.gammas))

    def gamma(self, rows: int, acceptance: float) -> int:
        """γ of a round of `rows` rows (at least 1)."""
        classes = self.gammas[min(rows, len(self.gammas)) - 1]
        return classes[min(int(acceptance * len(classes)), len(classes) - 1)]

    def acceptance(self, rounds: Sequence[FirstTokens]) -> float:
        """Estimate the acceptance of first tokens from recent rounds.

        The expected acceptance counts as one token. It is returned alone as long as fewer than
        `MIN_DRAFTED_ROUNDS` of the rounds have drafted.
        """
        if sum(r.accepted + r.rejected > 0 for r in rounds) < MIN_DRAFTED_ROUNDS:
            return self.expected_acceptance
        accepted = sum(r.accepted for r in rounds)
        rejected = sum(r.rejected for r in rounds)
        return (accepted + self.expected_acceptance) / (accepted + rejected + 1)


@dataclass(frozen=True)
class Request:
    """One prompt about a video, several videos, images, or about nothing but text.

    The prompt shows them in the order frames, videos, images.

    Args:
        frames: (T, height, width, 3) uint8, one video; sides are multiples of `Geometry.factor`, or
            any with a fixed `Geometry.frame`.
        video_id: names the content that several requests share, so that it is encoded and prefilled
            once; empty shares nothing.
        fps: sampled frames per second, for models whose positions or prompts use it.
        videos: further videos of the same form.
        images: (height, width, 3) uint8 each.
        times: seconds at which each of `frames` is shown, for models whose prompts state it; evenly
            from 0 if not given.
    """

    request_id: str
    prompt: str
    frames: torch.Tensor | None = None
    video_id: str = ""
    fps: float = 2.0
    sampling: Sampling = field(default_factory=Sampling)
    videos: tuple[torch.Tensor, ...] = ()
    images: tuple[torch.Tensor, ...] = ()
    times: tuple[float, ...] = ()


@dataclass(frozen=True)
class Result:
    """The outcome of a request.

    Times are in seconds; of work that a batch shares, the row's share.

    Args:
        kv_keep: entries that the draft reads over entries of the context, after prefill.
        weight_keep: bytes of weights that a draft step reads over those of the model.
        drafted: tokens, the sum of the rounds' γ.
        proposed: drafted tokens up to the text's end.
        accepted: bonus tokens excluded.
        accept_counts: [i]: rounds in which i drafted tokens were accepted.
        reject_counts: [i]: rounds among these in which at least one more token was proposed.
        scores, logits: (vocabulary,) float32 per token, behind and before the logits processors;
            empty unless the row's sampling keeps them.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int = 0
    num_visual_tokens: int = 0
    kv_keep: float = 1.0
    weight_keep: float = 1.0
    rounds: int = 0
    drafted: int = 0
    proposed: int = 0
    accepted: int = 0
    accept_counts: tuple[int, ...] = ()
    reject_counts: tuple[int, ...] = ()
    vision_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    error: RequestError | None = None
    scores: tuple[torch.Tensor, ...] = ()
    logits: tuple[torch.Tensor, ...] = ()


@dataclass
class Counters:
    """What an engine has done since it was made."""

    vision_passes: int = 0
    prefix_prefills: int = 0
    chunks: int = 0
    rounds: int = 0
    row_rounds: int = 0  # running rows, summed over rounds
