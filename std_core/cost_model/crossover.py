"""What bytes alone allow: the crossover of the two kinds of sparsity, and bounds of the speed-up
(Crossover §3).

Symbols as in the paper: P projection weights per layer, h_kv KV heads, d_h head size, n context
tokens per sequence, B sequences, r_KV and r_P the kept fractions of the KV cache and of the
projection weights, u_B the fraction of the projection weights that any of B sequences activates
(u_1 = r_P).
"""

from __future__ import annotations

from typing import NamedTuple

from std_core.cost_model.model_size import ModelSize


class SpeedupBounds(NamedTuple):
    """Upper bounds of one decode step's speed-up, by what is sparse."""

    weights: float
    kv: float
    both: float


def crossover_context(
    size: ModelSize, keep_kv: float, union_fraction: float, rows: int = 1
) -> float:
    """Return n*_B, the context above which a sparse KV cache saves more bytes than sparse weights.

    n*_B = P (1 − u_B) / (2 B h_kv d_h (1 − r_KV)), times the ratio of bytes per weight and per
    cache element (Crossover §3.3).

    Args:
        keep_kv: r_KV.
        union_fraction: u_B.
        rows: B.

    Returns:
        Tokens per sequence.
    """
    saved = size.projections * (1 - union_fraction) * size.weight_bytes / size.kv_bytes
    return saved / (2 * rows * size.kv_heads * size.head_dim * (1 - keep_kv))


def speedup_bounds(
    size: ModelSize, context: float, keep_kv: float, keep_weights: float
) -> SpeedupBounds:
    """Return B_total / (B_total − ΔB) for one sequence, by what is sparse (Crossover §3.3).

    Args:
        context: n.
        keep_kv: r_KV.
        keep_weights: r_P.
    """
    total = size.step_bytes([context])
    saved_weights = size.projection_bytes * (1 - keep_weights)
    saved_kv = context * size.entry_bytes * (1 - keep_kv)
    return SpeedupBounds(
        weights=total / (total - saved_weights),
        kv=total / (total - saved_kv),
        both=total / (total - saved_weights - saved_kv),
    )


def speedup(tokens: float, gamma: int, draft: float, verify: float, dense: float) -> float:
    """Return the speed-up of rounds of γ draft steps and a verification over dense steps.

    Args:
        tokens: expected tokens of a round.
        draft, verify, dense: cost of one such step; seconds, or bytes for the byte bound.
    """
    return tokens * dense / (gamma * draft + verify)
