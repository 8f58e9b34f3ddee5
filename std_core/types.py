"""The records that cross the decoding core's border. Filled by: the caller (`Request`, `Sampling`,
`Draft`), the plan (`GammaSchedule`), the checkpoint (`Geometry`), the engine (`Result`, `Counters`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if (
    TYPE_CHECKING
):  # for the annotation only: decoding processes load these records and should start fast
    import torch

Mode = Literal["std", "dense", "sparse"]
Policy = Literal["std", "window", "random", "specvlm", "snapkv", "full", "ngram"]
Weights = Literal["full", "int8", "int4"]
FinishReason = Literal["stop", "length", "error"]
# Bits of a low-bit draft's weights, scales not counted.
WEIGHT_BITS = {"int8": 8, "int4": 4}
# Last tokens of a prompt by whose attention the policy `snapkv` selects (Crossover §4.1).
OBSERVATION_WINDOW = 64
MIN_DRAFTED_ROUNDS = 3  # that have drafted, below which they say nothing about a draft


class RequestError(Exception):
    """What makes one request fail and leaves the others alone. `code` is one of the output
    contract's error codes."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str]]:
        return RequestError, (self.code, self.message)


@dataclass(frozen=True)
class Geometry:
    """How a checkpoint's vision tower cuts frames into tokens; sizes in pixels, budgets in pixels
    per frame.

    Args: video_pixels: budget of all frames together, for models that have one. total_pixels: as
        `total_pixels` of Qwen's options, where those don't say: what bounds each frame to an even
            share of it (qwen-vl-utils' cap).
        frame: height and width that each frame is brought to, whatever its shape, for models that
            know one size only.
        frame_tokens: tokens of such a frame.
        closing_tokens: what follows the last of them.
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
        """Frame sides are multiples of this."""
        return self.patch_size * self.merge_size

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Visual tokens of `frames` frames of a resized height and width (multiples of
        `factor`)."""
        if self.frame is not None:
            return frames * self.frame_tokens + self.closing_tokens
        pairs = -(-frames // self.temporal_patch_size)
        return pairs * (height // self.factor) * (width // self.factor)


@dataclass(frozen=True)
class Sampling:
    """How the full model's next token is chosen. What is None is as the checkpoint's generation
    configuration has it.

    Args: max_tokens, min_tokens: bounds of what is written; no stop before `min_tokens`.
        temperature: 0 is greedy. top_p, top_k, repetition_penalty: as transformers' processors of
        those names do it. seed: a text that depends on nothing but the model, the request and this
        number; without one a draw is fresh. stop: texts at whose first appearance the output ends;
        they are not part of it. stop_token_ids: ids that end the output besides the checkpoint's
        own.
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
        for name, low, what in (
            ("max_tokens", 1, "at least 1"),
            ("min_tokens", 0, "0 or more"),
            ("top_k", 0, "0 or more"),
        ):
            if (value := getattr(self, name)) is not None and value < low:
                raise ValueError(f"{name} is {value}: {what} is needed")
        if self.temperature is not None and not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}: 0 (greedy) or above is needed")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: above 0 and at most 1 is needed")
        if self.repetition_penalty is not None and not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}: above 0 is needed")


@dataclass(frozen=True)
class Draft:
    """How tokens are drafted: from which part of the context, with which part of the weights, and
    how many at a time before the full model verifies.

    Args: policy: what it sees of the visual entries. `std`: per layer and KV head the top K by the
        question's attention
            (Sparse-to-Dense §3.2). `snapkv`: the same by the last 64 prompt tokens' attention, and
            sinks (Crossover §4.1). `specvlm`: one set for all layers, the smallest that holds
            `nucleus` of the attention, filled up evenly (SpecVLM, stages I and II). `window`: sinks
            and the newest. `random`: the control. `full`: everything. `ngram`: prompt lookup, no
            model: what followed the newest words when they stood before.
        keep: kept share of the visual entries per layer and KV head, in (0, 1]; used where `k` is
            None.
        k: kept visual entries per layer and KV head.
        gamma: γ, tokens drafted per round.
        nucleus: λ of `specvlm`, in (0, 1].
        sinks: of `window` and `snapkv`, entries kept from the start.
        seed: of `random`.
        refresh: rounds after which `std` and `snapkv` choose again, by what the newest tokens look
            at; 0: never.
        depth: share of the layers, in (0, 1], behind which it exits (LayerSkip).
        channels: r_P, share of the input channels of each projection that is computed with, the
            largest (TEAL).
        weights: `int8` or `int4` copies of the projections, packed; `full`: the model's own.
        model: folder or hub id of a second, smaller model with the same tokenizer that drafts from
            the chosen visual tokens (SpecVLM's pair).
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
            if not 0 < (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name} is {value}: a share above 0 and at most 1 is needed")
        if self.k is not None and self.k < 1:
            raise ValueError(f"k is {self.k}: at least one visual entry has to be kept")
        if self.gamma < 1:
            raise ValueError(f"gamma is {self.gamma}: a round drafts at least one token")
        for name in ("sinks", "refresh"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} is {value}: 0 or more is needed")
        if self.refresh and (self.policy not in ("std", "snapkv") or self.model):
            raise ValueError(
                "refresh chooses again by attention: it goes with the policies std and snapkv of one model"
            )
        if self.channels < 1 and self.model:
            raise ValueError(
                "channels are calibrated on the model itself: they do not go with a second model"
            )
        if self.policy == "ngram" and (self.reads_fewer_weights or self.model):
            raise ValueError(
                "ngram drafts without a model: depth, channels, weights and model do not go with it"
            )

    @property
    def supports_unverified(self) -> bool:
        """Whether what it drafts can be taken for a text without verification (`mode=sparse`)."""
        return not (self.policy == "ngram" or self.model or self.depth < 1)

    def check_unverified(self) -> None:
        """Raises ValueError where the draft's text cannot stand for itself (`mode=sparse`)."""
        if not self.supports_unverified:
            raise ValueError("mode sparse takes a selection or activation sparsity, no other draft")

    @property
    def reads_fewer_weights(self) -> bool:
        """Whether it computes with less than the weights of its model."""
        return self.depth < 1 or self.channels < 1 or self.weights != "full"

    def budget(self, visual: int) -> int:
        """Visual entries kept of `visual`; never more than there are."""
        return min(visual, self.k if self.k is not None else max(1, round(self.keep * visual)))


@dataclass(frozen=True)
class GammaSchedule:
    """γ per number of running rows and recent acceptance, in place of a draft's fixed γ.

    Acceptance is that of the first drafted token, which does not depend on γ.

    Args:
        gammas: γ by [rows - 1][acceptance class]. The classes divide [0, 1] evenly; 0 is a dense
            step. More rows than the table has use its last entry.
        expected_acceptance: acceptance that is assumed until enough rounds have drafted.

    Raises:
        ValueError: the table is empty, has an empty entry, or a negative γ.
    """

    gammas: tuple[tuple[int, ...], ...]
    expected_acceptance: float

    def __post_init__(self) -> None:
        if not self.gammas or not all(self.gammas) or self.min_gamma < 0:
            raise ValueError(
                "a gamma schedule needs γ of 0 or more for each number of rows and acceptance class"
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


class FirstTokens(NamedTuple):
    """Rows of a round whose first drafted token was accepted, and rows where it was rejected."""

    accepted: int
    rejected: int


@dataclass(frozen=True)
class Request:
    """One prompt about a video, several, images, or nothing but text.

    Args: frames: (T, height, width, 3) uint8, one video; sides multiples of `Geometry.factor`, or
        any where there is a
            `Geometry.frame`.
        videos, images: more of the kind; images are (height, width, 3). Shown in the order frames,
            videos, images.
        video_id: names what several requests share, so that it is seen and prefilled once; empty
            shares nothing.
        fps: sampled frames per second, for models whose positions or prompts use it.
        times: s, when each of `frames` is shown, for models whose prompts tell it; evenly from 0 if
            not given.
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
    """What became of a request. Times in seconds; those of a batch's shared work are the row's
    share of it."""

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int = 0
    num_visual_tokens: int = 0
    kv_keep: float = (
        1.0  # entries the draft read over entries of the context, at the end of prefill
    )
    weight_keep: float = 1.0  # bytes of weights the draft read over the model's
    rounds: int = 0
    drafted: int = 0  # tokens, γ of each round
    proposed: int = 0  # of them, without what lay behind the text's end
    accepted: int = 0  # bonus tokens excluded
    accept_counts: tuple[int, ...] = ()  # [i]: rounds in which i drafted tokens were accepted
    reject_counts: tuple[int, ...] = ()  # [i]: of those the rounds in which one more was proposed
    vision_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    error: RequestError | None = None


@dataclass
class Counters:
    """What an engine did, since it was made."""

    vision_passes: int = 0
    prefix_prefills: int = 0
    chunks: int = 0
    rounds: int = 0
    row_rounds: int = 0  # rows that a round moved on, summed over rounds

    def utilisation(self, slots: int) -> float:
        """Share of the slots that held a row, over all rounds."""
        return self.row_rounds / (self.rounds * slots) if self.rounds else 0.0
