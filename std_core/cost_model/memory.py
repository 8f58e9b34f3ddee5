"""What an engine holds in its device's memory, term by term, for slots × the longest request of a
wave.

Terms say what tensors hold; `jobs/benchmark.py --suite memory` measures them. What a host holds of
requests (frames, patches) is not among them, nor what an allocator keeps in reserve. A device is of
a kind, `cpu` or `cuda`: on a CPU scores of a selection are stored, sparse channels are read from a
copy, and rounds are not kept as graphs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from std_core.cost_model.account import BITS, ModelSize
from std_core.kernels.shared.constants import SPLIT_SIZE
from std_core.types import Draft

# of a prompt without visual tokens: what lies before its last 64 takes their part in a selection
TAIL = 64
# visual tokens that the vision tower works on at once; a frame more than that if it has more
SEEN = 2048
ASKED = 64  # tokens whose attention the policy `snapkv` asks
FLOAT = 4  # bytes: scores are float32
# bytes a word: four 64-bit numbers on the way to noise, of one position at a time; an order takes
# less
DRAWING = 32
SamplingMode = Literal["greedy", "seeded", "fresh"]
HELD = (
    "weights",
    "draft_weights",
    "kv",
    "draft_kv",
    "graphs",
)  # at all times; of the others one at a time


@dataclass(frozen=True)
class LongestRequest:
    """The longest request of a wave, in tokens: its context, the visual ones of it, and what it may
    write.

    Args: strict: tokens per row that verifications are padded to. draws: how tokens are drawn: the
        likeliest, with noise that a seed gives, or with fresh noise, which takes most.
    """

    context: int
    visual: int
    written: int
    chunk: int = 2048  # of prefill
    strict: int = 0
    draws: SamplingMode = "fresh"

    @property
    def prefix(self) -> int:
        """Of its tokens those that other questions share, and a draft may leave out; at the
        least."""
        return self.visual or max(0, self.context - TAIL)

    @property
    def question(self) -> int:
        return self.context - self.prefix


def terms(
    account: ModelSize,
    load: LongestRequest,
    slots: int,
    draft: Draft | None = None,
    pair: ModelSize | None = None,
    kind: str = "cuda",
) -> dict[str, float]:
    """Bytes by what they are for. Those not in `HELD` are there one at a time, `round` and `logits`
    together.

    Args:
        pair: the second model's, of a draft that has one.
        kind: of device.
    """
    width = max(draft.gamma + 1 if draft else 1, load.strict)
    entries = _entries(load, width)
    kept = _view(load, draft, pair, width)
    working = slots * width * _live(account) + _choosing_again(
        account, load, slots, draft, kind=kind
    )
    scores = slots * _scores(account, load, width)
    stores = [(n, account) for n in entries] + [(kept, pair or account)]
    return {
        "weights": account.parameters * account.weight_bytes,
        "draft_weights": _copy(account, draft, kind)
        + (pair.parameters * pair.weight_bytes if pair else 0.0),
        "kv": slots * sum(entries) * account.entry_bytes,
        "draft_kv": slots * kept * (pair or account).entry_bytes,
        "graphs": working + scores if kind == "cuda" else 0.0,
        "prefill": max(_chunk(a, load, draft, kind) for a in (account, pair) if a),
        "vision": max(_tower(a, load, kind) for a in (account, pair) if a),
        "round": working,
        "logits": scores,
        "growth": max(slots * n * a.entry_bytes / (2 * a.layers) for n, a in stores),
    }


def total(found: Mapping[str, float]) -> float:
    """The peak of `terms`: what is held, and the most of what comes and goes."""
    passing = max(
        found["prefill"], found["vision"], found["round"] + found["logits"], found["growth"]
    )
    return sum(found[name] for name in HELD) + passing


def most_slots(
    account: ModelSize,
    load: LongestRequest,
    memory: float,
    most: int,
    draft: Draft | None = None,
    pair: ModelSize | None = None,
    kind: str = "cuda",
) -> int:
    """How many of the `most` slots fit; 0 if not even one does. No term shrinks as slots are
    added."""
    counts = range(1, most + 1)
    return bisect_right(
        counts,
        memory,
        key=lambda slots: total(terms(account, load, slots, draft, pair=pair, kind=kind)),
    )


def _whole(entries: int) -> int:
    return -(-entries // SPLIT_SIZE) * SPLIT_SIZE


# --------------------------------------------------------------------------------------- what stays


def _entries(load: LongestRequest, width: int) -> tuple[int, int]:
    """Of a row in the two stores of the cache. Text that stands before a video or between its
    frames is in the first; how much is not known, so it is as much as takes most."""
    behind = load.question + load.written + width
    least = _whole(load.prefix), _whole(behind)
    over = least[0] - load.prefix + 1  # tokens of text that need one step more there
    if load.visual and over < load.question:
        moved = least[0] + SPLIT_SIZE, _whole(behind - over)
        return max(least, moved, key=sum)
    return least


def _view(load: LongestRequest, draft: Draft | None, pair: ModelSize | None, width: int) -> int:
    """Entries of a row that a draft has for itself."""
    if draft is None or (draft.policy in ("full", "ngram") and pair is None):
        return 0
    kept = load.prefix if draft.policy == "full" else draft.budget(load.prefix)
    return _whole(kept + load.question + load.written + width)


def _copy(account: ModelSize, draft: Draft | None, kind: str) -> float:
    """Packed projections and head of a low-bit draft; on a CPU all projections once more, laid out
    for sparse channels. Experts' weights are no projections of their own and stay as they are."""
    if draft is None or (draft.weights not in BITS and (draft.channels == 1 or kind != "cpu")):
        return 0.0
    body = account.layers * draft.depth * account.packable
    if draft.weights not in BITS:
        return body * account.weight_bytes
    scales = (
        16 * (FLOAT if kind == "cpu" else account.weight_bytes) / 32
        if draft.weights == "int4"
        else 0.0
    )
    return (
        body * (BITS[draft.weights] + scales) + account.hidden * account.vocabulary * BITS["int8"]
    ) / 8


# ------------------------------------------------------------------------------ what comes and goes


def _live(account: ModelSize) -> float:
    """A token's numbers in one layer: its residual, the layer's input, the norm's output, and three
    of the MLP's, or queries and keys before and after rotation, with what that takes. A captured
    round keeps those of its widest step, and its logits, in a pool of its own for as long as it may
    be replayed."""
    mlp = 3 * account.intermediate * account.experts
    attention = 4 * account.head_dim * (account.heads + account.kv_heads)
    return (3 * account.hidden + max(mlp, attention) + 6 * account.head_dim) * account.weight_bytes


def _chunk(account: ModelSize, load: LongestRequest, draft: Draft | None, kind: str) -> float:
    """A chunk of the prefix and all visual features, or the question's last chunk and what a
    selection looks at."""
    levels = account.hidden * account.levels * account.weight_bytes
    first = min(load.chunk, load.prefix) * (
        _live(account) + levels - account.hidden * account.weight_bytes
    )
    last = min(load.chunk, load.question)
    asked = min(last, ASKED) if draft and draft.policy == "snapkv" else last
    chosen = (
        _mass(account, load.prefix, asked, kind)
        if draft and draft.policy not in ("full", "ngram")
        else 0.0
    )
    return max(first + load.visual * levels, last * _live(account) + chosen)


def _mass(account: ModelSize, entries: int, asked: int, kind: str) -> float:
    """Attention of `asked` tokens to a row's entries: sums of all layers, the keys of one; on a CPU
    its scores too."""
    keys = account.kv_heads * entries * account.head_dim * account.kv_bytes
    sums = account.layers * account.kv_heads * entries * FLOAT
    return (
        sums
        + keys
        + (account.heads * asked * entries * _float_too(account) if kind == "cpu" else 0.0)
    )


def _choosing_again(
    account: ModelSize, load: LongestRequest, slots: int, draft: Draft | None, kind: str
) -> float:
    if draft is None or not draft.refresh:
        return 0.0
    keys = (
        account.kv_heads * load.prefix * account.head_dim * account.kv_bytes
    )  # a CPU's product wants them in a row
    return slots * (
        _mass(account, load.prefix, draft.gamma + 1, kind) + (keys if kind == "cpu" else 0.0)
    )


def _scores(account: ModelSize, load: LongestRequest, width: int) -> float:
    """A row's logits, as they come and in float32; where tokens are drawn, what one position takes,
    and where they are drawn afresh the two models' distributions and their difference."""
    drawn = 0 if load.draws == "greedy" else DRAWING
    more = 2 * FLOAT * width if load.draws == "fresh" else 0
    return account.vocabulary * (width * _float_too(account) + max(drawn, more))


def _float_too(account: ModelSize) -> float:
    """Bytes of a number and its float32, which in float32 is the same."""
    return FLOAT + (account.weight_bytes if account.weight_bytes < FLOAT else 0)


def _tower(account: ModelSize, load: LongestRequest, kind: str) -> float:
    """A piece of a video in one block of the vision tower, and the features of all."""
    size = account.weight_bytes
    width = account.tower_width
    full = FLOAT / size  # it rotates queries and keys in float32
    turning = width * (5 + 4 * full + (2 * full if full > 1 else 0)) if account.tower_turns else 0
    patch = max(turning, 3 * width + account.tower_mlp) + (
        width * full if account.tower_places else 0
    )
    if (
        account.tower_turns and account.tower_places
    ):  # four learned places around each are weighed, in float32
        patch = max(patch, width * (5 + 4 * full + (4 * full if full > 1 else 0)))
    if kind != "cpu" or full > 1:
        patch += account.pixels  # as they came, brought to the tower
    piece = min(SEEN, load.visual)
    feature = account.hidden * account.levels
    return (piece * max(account.patches * patch, 2 * feature) + load.visual * feature) * size
