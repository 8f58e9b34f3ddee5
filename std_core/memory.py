"""What an engine holds in its device's memory, term by term, for slots × the longest request of a wave."""

from __future__ import annotations

from dataclasses import dataclass

from std_core.account import BITS, SCALE_BITS, Account
from std_core.types import Draft

STEP = 512  # entries by which caches grow: a split of the attention
SCORES = 4  # bytes: logits are bent and compared in fp32
COPIES = 3  # of logits: as they come, in fp32, bent
TOWER_LIVE = 12  # tensors of the tower's width that are alive at once: residual, query, key, value, four of the MLP's


@dataclass(frozen=True)
class Load:
    """The longest request of a wave, in tokens: its context, the visual ones of it, and what it may write."""

    context: int
    visual: int
    written: int
    chunk: int = 2048  # of prefill


def terms(
    account: Account, load: Load, slots: int, draft: Draft | None = None, pair: Account | None = None
) -> dict[str, float]:
    """Bytes by what they are for.

    Args:
        pair: the second model's, of a draft that has one.
    """
    gamma = draft.gamma if draft else 0
    behind = load.context - load.visual + load.written + gamma + 1
    entries = _whole(load.visual) + _whole(behind)
    return {
        "weights": account.parameters * account.weight_bytes,
        "draft_weights": _copy(account, draft) + (pair.parameters * pair.weight_bytes if pair else 0.0),
        "kv": slots * entries * account.entry_bytes,
        "draft_kv": slots * _view(account, load, draft, pair, behind),
        "prefill": _chunk(account, load),
        "vision": load.visual * account.patches * account.tower_width * TOWER_LIVE * account.weight_bytes,
        "round": slots * (gamma + 1) * _live(account),
        "logits": slots * (gamma + 1) * account.vocabulary * SCORES * COPIES,
    }


def most_slots(
    account: Account, load: Load, memory: float, most: int, draft: Draft | None = None, pair: Account | None = None
) -> int:
    """How many of the `most` slots fit; 0 if not even one does. All terms grow by the slot or not at all."""
    one, two = (sum(terms(account, load, slots, draft, pair).values()) for slots in (1, 2))
    return 0 if one > memory else min(most, int(1 + (memory - one) / (two - one)))


def _whole(entries: int) -> int:
    return -(-entries // STEP) * STEP


def _copy(account: Account, draft: Draft | None) -> float:
    """Packed projections and head of a low-bit draft; of experts all."""
    if draft is None or draft.weights not in BITS:
        return 0.0
    head = account.hidden * account.vocabulary
    body = max(account.parameters - account.tower - 2 * head, account.layers * account.projections)
    return (body * (BITS[draft.weights] + SCALE_BITS[draft.weights]) + head * BITS["int8"]) / 8


def _view(account: Account, load: Load, draft: Draft | None, pair: Account | None, behind: int) -> float:
    """Of one row."""
    if draft is None or (draft.policy in ("full", "ngram") and pair is None):
        return 0.0
    return _whole(draft.budget(load.visual) + behind) * (pair or account).entry_bytes


def _chunk(account: Account, load: Load) -> float:
    """Activations of one layer, and where a selection is made, one layer's attention of the question."""
    tokens = min(load.chunk, load.context)
    question = min(tokens, load.context - load.visual)
    return tokens * _live(account) + account.heads * question * load.visual * SCORES


def _live(account: Account) -> float:
    """A token's activations in one layer. A captured round keeps those of its widest step, and its logits, in a pool of
    its own for as long as it may be replayed."""
    live = 4 * account.hidden + 3 * account.intermediate * account.experts + 2 * account.heads * account.head_dim
    return live * account.weight_bytes
