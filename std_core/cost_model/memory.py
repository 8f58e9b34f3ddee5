"""An engine's device memory, by purpose, for slots × the longest request of a wave.

The figures are sizes of tensors; `jobs/benchmark.py --suite memory` compares them with measured
ones. Not included: host memory of requests (frames, patches) and the allocator's reserve.

Three things depend on the kind of device, `cpu` or `cuda`: on a CPU, KV selection stores attention
scores, sparse input channels are read from a second copy of the weights, and rounds are not
captured as CUDA graphs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from std_core.cost_model.model_size import ModelSize
from std_core.kernels.shared.constants import GROUP_SIZE, SPLIT_SIZE
from std_core.types import OBSERVATION_WINDOW, WEIGHT_BITS, Draft

# A prompt without visual tokens: its last tokens play the question's part, those before them the
# video's, so a draft selects among these.
TEXT_SUFFIX = 64
# Visual tokens that the vision tower processes at once; more only where a single frame has more.
VISION_CHUNK = 2048
FLOAT32 = 4  # bytes
# Bytes per vocabulary entry while the noise of one position is made: four 64-bit numbers. Sorting
# the scores for top-k and top-p needs less.
NOISE = 32

SamplingMode = Literal["greedy", "seeded", "fresh"]
# Purposes that occupy memory at all times. The others alternate.
PERMANENT = ("weights", "draft_weights", "kv", "draft_kv", "graphs")


@dataclass(frozen=True)
class LongestRequest:
    """The longest request of a wave, in tokens, and how the engine processes it.

    Args:
        context: tokens of the prompt, visual ones included.
        visual: of these, visual tokens.
        max_tokens: tokens that the request may generate.
        chunk: tokens per prefill chunk.
        strict_width: tokens per row that every verification is padded to; 0 without `strict`.
        sampling: how tokens are chosen: greedily, with noise keyed by a seed, or with fresh noise
            (the largest).
    """

    context: int
    visual: int
    max_tokens: int
    chunk: int = 2048
    strict_width: int = 0
    sampling: SamplingMode = "fresh"

    @property
    def prefix(self) -> int:
        """Tokens that a draft may leave out and other questions may share, at the least."""
        return self.visual or max(0, self.context - TEXT_SUFFIX)

    @property
    def question(self) -> int:
        """Tokens that are not in the prefix."""
        return self.context - self.prefix


def memory_breakdown(
    size: ModelSize,
    longest: LongestRequest,
    slots: int,
    draft: Draft | None = None,
    second_model: ModelSize | None = None,
    device_kind: str = "cuda",
) -> dict[str, float]:
    """Return bytes by purpose.

    `PERMANENT` ones are occupied at all times. Of the others one at a time is, except that `round`
    and `logits` go together.

    Args:
        second_model: of a draft that has one.
    """
    width = max(draft.gamma + 1 if draft else 1, longest.strict_width)
    prefix, suffix = _cache_entries(longest, width)
    draft_entries = _draft_entries(longest, draft, second_model, width)
    draft_size = second_model or size
    models = [size] if second_model is None else [size, second_model]
    round_bytes = slots * width * _activation_bytes(size)
    round_bytes += slots * _refresh_bytes(size, longest, draft, device_kind)
    logits = slots * _logits_bytes(size, longest, width)
    draft_weights = _draft_weight_bytes(size, draft, device_kind)
    if second_model is not None:
        draft_weights += second_model.parameters * second_model.weight_bytes
    return {
        "weights": size.parameters * size.weight_bytes,
        "draft_weights": draft_weights,
        "kv": slots * (prefix + suffix) * size.entry_bytes,
        "draft_kv": slots * draft_entries * draft_size.entry_bytes,
        # a captured round keeps the activations of its widest step and its logits in its own pool
        "graphs": round_bytes + logits if device_kind == "cuda" else 0.0,
        "prefill": max(_prefill_bytes(model, longest, draft, device_kind) for model in models),
        "vision": max(_vision_bytes(model, longest, device_kind) for model in models),
        "round": round_bytes,
        "logits": logits,
        "growth": max(
            _growth_bytes(size, slots * prefix),
            _growth_bytes(size, slots * suffix),
            _growth_bytes(draft_size, slots * draft_entries),
        ),
    }


def peak_memory(breakdown: Mapping[str, float]) -> float:
    """Return the peak in bytes: the permanent purposes plus the largest of the alternating ones."""
    alternating = max(
        breakdown["prefill"],
        breakdown["vision"],
        breakdown["round"] + breakdown["logits"],
        breakdown["growth"],
    )
    return sum(breakdown[name] for name in PERMANENT) + alternating


def max_slots(
    size: ModelSize,
    longest: LongestRequest,
    memory: float,
    limit: int,
    draft: Draft | None = None,
    second_model: ModelSize | None = None,
    device_kind: str = "cuda",
) -> int:
    """Return how many of `limit` slots fit into `memory` bytes; 0 if not even one does.

    A binary search, since no purpose's bytes fall as slots are added.
    """

    def peak(slots: int) -> float:
        return peak_memory(
            memory_breakdown(
                size,
                longest,
                slots,
                draft=draft,
                second_model=second_model,
                device_kind=device_kind,
            )
        )

    return bisect_right(range(1, limit + 1), memory, key=peak)


def _whole_splits(entries: int) -> int:
    """Round up to whole splits of the attention kernel, by which caches grow."""
    return -(-entries // SPLIT_SIZE) * SPLIT_SIZE


# ---------------------------------------------------------------------------------------- permanent


def _cache_entries(longest: LongestRequest, width: int) -> tuple[int, int]:
    """Return a row's entries in the prefix cache and in its own cache.

    Text before a video or between its frames belongs to the prefix, but its length is unknown here.
    So the division that occupies the most splits is assumed.
    """
    behind = longest.question + longest.max_tokens + width
    all_text_behind = _whole_splits(longest.prefix), _whole_splits(behind)
    # the fewest tokens of text that need one more split in the prefix
    text = all_text_behind[0] - longest.prefix + 1
    if not longest.visual or text >= longest.question:
        return all_text_behind
    some_in_prefix = all_text_behind[0] + SPLIT_SIZE, _whole_splits(behind - text)
    return max(all_text_behind, some_in_prefix, key=sum)


def _draft_entries(
    longest: LongestRequest, draft: Draft | None, second_model: ModelSize | None, width: int
) -> int:
    """Return a row's entries in the draft's cache; none where the draft reads the full cache."""
    if draft is None or (draft.policy in ("full", "ngram") and second_model is None):
        return 0
    kept = longest.prefix if draft.policy == "full" else draft.budget(longest.prefix)
    return _whole_splits(kept + longest.question + longest.max_tokens + width)


def _draft_weight_bytes(size: ModelSize, draft: Draft | None, device_kind: str) -> float:
    """Return the bytes of a draft's own copy of the weights.

    Low-bit drafts have packed projections and an 8-bit head. Sparse input channels need a
    transposed copy of the projections on a CPU; it is counted for every CPU, though it is only made
    where the C++ kernel runs (AVX-512). The experts' weights are not copied.
    """
    if draft is None:
        return 0.0
    weights = size.layers * draft.depth * size.packable
    if draft.weights not in WEIGHT_BITS:
        copied = draft.channels < 1 and device_kind == "cpu"
        return weights * size.weight_bytes if copied else 0.0
    scale_bits = 0.0  # per weight
    if draft.weights == "int4":
        # a scale and an offset per group
        scale_bytes = FLOAT32 if device_kind == "cpu" else size.weight_bytes
        scale_bits = 2 * 8 * scale_bytes / GROUP_SIZE
    head_bits = size.hidden * size.vocabulary * WEIGHT_BITS["int8"]
    return (weights * (WEIGHT_BITS[draft.weights] + scale_bits) + head_bits) / 8


# -------------------------------------------------------------------------------------- alternating


def _growth_bytes(size: ModelSize, entries: int) -> float:
    """Return the bytes of one layer's keys or values, which exist twice while that cache grows."""
    return entries * size.entry_bytes / (2 * size.layers)


def _activation_bytes(size: ModelSize) -> float:
    """Return a token's activations in one layer.

    They are the residual, the layer's input and the norm's output; and either three vectors of the
    MLP, or queries and keys before and after rotation with the rotation's temporaries.
    """
    mlp = 3 * size.intermediate * size.experts
    attention = 4 * size.head_dim * (size.heads + size.kv_heads)
    return (3 * size.hidden + max(mlp, attention) + 6 * size.head_dim) * size.weight_bytes


def _prefill_bytes(
    size: ModelSize, longest: LongestRequest, draft: Draft | None, device_kind: str
) -> float:
    """Return the larger of two chunks: one of the prefix, beside the visual features; and the last
    one of the question, beside the attention mass that KV selection collects.
    """
    features = size.hidden * size.feature_levels * size.weight_bytes  # of a visual token
    embedding = size.hidden * size.weight_bytes
    prefix_chunk = min(longest.chunk, longest.prefix)
    prefix = prefix_chunk * (_activation_bytes(size) + features - embedding)
    question_chunk = min(longest.chunk, longest.question)
    question = question_chunk * _activation_bytes(size)
    if draft and draft.policy not in ("full", "ngram"):
        queries = question_chunk
        if draft.policy == "snapkv":
            queries = min(queries, OBSERVATION_WINDOW)
        question += _selection_bytes(size, longest.prefix, queries, device_kind)
    return max(prefix + longest.visual * features, question)


def _selection_bytes(size: ModelSize, entries: int, queries: int, device_kind: str) -> float:
    """Return the bytes of collecting the attention mass that `queries` tokens give to entries.

    They are the mass in all layers and the gathered keys of one; on a CPU its scores as well.
    """
    keys = size.kv_heads * entries * size.head_dim * size.kv_bytes
    mass = size.layers * size.kv_heads * entries * FLOAT32
    scores = size.heads * queries * entries * _with_float32_copy(size)
    return mass + keys + (scores if device_kind == "cpu" else 0.0)


def _refresh_bytes(
    size: ModelSize, longest: LongestRequest, draft: Draft | None, device_kind: str
) -> float:
    """Return the bytes per row of a selection that is repeated during decoding."""
    if draft is None or not draft.refresh:
        return 0.0
    selection = _selection_bytes(size, longest.prefix, draft.gamma + 1, device_kind)
    # matrix products on a CPU copy the keys to contiguous memory
    keys = size.kv_heads * longest.prefix * size.head_dim * size.kv_bytes
    return selection + (keys if device_kind == "cpu" else 0.0)


def _logits_bytes(size: ModelSize, longest: LongestRequest, width: int) -> float:
    """Return a row's logits in the model's dtype and in float32, and what sampling adds.

    Sampling makes noise for one position at a time. Fresh noise needs the distributions of draft
    and verifier, and their difference.
    """
    noise = 0 if longest.sampling == "greedy" else NOISE
    distributions = 2 * FLOAT32 * width if longest.sampling == "fresh" else 0
    return size.vocabulary * (width * _with_float32_copy(size) + max(noise, distributions))


def _with_float32_copy(size: ModelSize) -> float:
    """Return the bytes of a number and its float32 copy; float32 itself is not copied."""
    return FLOAT32 + (size.weight_bytes if size.weight_bytes < FLOAT32 else 0)


def _vision_bytes(size: ModelSize, longest: LongestRequest, device_kind: str) -> float:
    """Return one chunk of a video in a block of the vision tower, and all visual features.

    Counted in numbers of the weights' dtype; one float32 number counts `float32` of them.
    """
    width = size.tower_width
    float32 = FLOAT32 / size.weight_bytes
    is_half = float32 > 1  # float32 copies exist only beside 16-bit numbers
    mlp = 3 * width + size.tower_mlp
    rotation = 0.0  # of queries and keys, in float32
    if size.tower_rope:
        rotation = width * (5 + 4 * float32 + (2 * float32 if is_half else 0))
    patch = max(rotation, mlp)
    if size.tower_learned_positions:
        patch += width * float32
    if size.tower_rope and size.tower_learned_positions:
        # bilinear interpolation of four position embeddings around each patch, in float32
        interpolation = width * (5 + 4 * float32 + (4 * float32 if is_half else 0))
        patch = max(patch, interpolation)
    if device_kind != "cpu" or is_half:
        patch += size.pixels  # the patches, copied to the tower's device and dtype
    chunk = min(VISION_CHUNK, longest.visual)
    features = size.hidden * size.feature_levels  # of a visual token
    chunk_numbers = chunk * max(size.patches * patch, 2 * features)
    return (chunk_numbers + longest.visual * features) * size.weight_bytes
