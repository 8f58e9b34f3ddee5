"""The bytes of a decode step, and what follows from them alone: where the savings of sparse
projections and of a sparse KV cache cross, and how much faster a step that reads less can be
(Crossover §3).

Symbols as in the paper: P projection weights a layer, h_kv KV heads, d_h head size, n context, r_P
and r_KV kept fractions, u_B the fraction of projection weights that any of B sequences activates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from std_core.types import Draft, Result

BITS = {"int8": 8.0, "int4": 4.0}
SCALE_BITS = {"int8": 0.0, "int4": 1.0}  # 4 bits have a scale of 2 × 16 bits per 32 weights


@dataclass(frozen=True)
class ModelSize:
    """A text stack's dimensions, and how large the model around it is. Bytes are per weight and per
    cache element.

    Args:
        parameters: of the whole model; 0 where only what a step reads is asked for.
        tower: of its vision tower and what merges its output, in parameters.
        tower_width: of the tower's blocks.
        patches: that go into a visual token.
        tower_mlp: numbers of a patch that its blocks' MLP holds at once.
        tower_turns: it rotates queries and keys.
        tower_places: it keeps what it has learned of places.
        pixels: numbers of a patch as it comes.
        levels: features of a visual token; those above the first are DeepStack's.
    """

    layers: int
    hidden: int
    intermediate: int  # of one expert where there are experts
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 1  # that a token is sent to
    router: int = 0  # experts that there are, if a router chooses among them
    weight_bytes: float = 2
    kv_bytes: float = 2
    parameters: int = 0
    tower: int = 0
    tower_width: int = 0
    patches: int = 4
    tower_mlp: int = 0
    tower_turns: bool = False
    tower_places: bool = False
    pixels: int = 0
    levels: int = 1

    @classmethod
    def of(cls, config: Any, weight_bytes: float = 2, kv_bytes: float = 2) -> ModelSize:
        """From a Hugging Face configuration, of a whole model or of its text stack."""
        text = config.get_text_config()
        heads = text.num_attention_heads
        router = getattr(text, "num_experts", 0) or getattr(text, "num_local_experts", 0) or 0
        inner = getattr(text, "moe_intermediate_size", None) if router else None
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=inner or text.intermediate_size,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            vocabulary=text.vocab_size,
            experts=text.num_experts_per_tok if router else 1,
            router=router,
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
            **_tower_of(getattr(config, "vision_config", None)),
        )

    # ---------------------------------------------------------------------------- what a step reads

    @property
    def projections(self) -> int:
        """P: weights of one layer's seven projections (of the active experts; a router's beside
        them)."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return (
            attention
            + 3 * self.hidden * self.intermediate * self.experts
            + self.hidden * self.router
        )

    @property
    def packable(self) -> int:
        """Weights of one layer that low-bit copies are made of; those of experts that a router
        chooses are not."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + (0 if self.router else 3 * self.hidden * self.intermediate)

    @property
    def projection_bytes(self) -> float:
        """Of all layers."""
        return self.layers * self.projections * self.weight_bytes

    @property
    def head_bytes(self) -> float:
        """The output head is read in each step, tied to the embedding or not; of an embedding only
        a row is."""
        return self.hidden * self.vocabulary * self.weight_bytes

    @property
    def entry_bytes(self) -> float:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    def step_bytes(
        self, entries: Sequence[float], draft: Draft | None = None, shared: Sequence[float] = ()
    ) -> float:
        """What one step of a batch reads.

        Args:
            entries: KV entries of each row that it alone has.
            draft: its weights in place of the model's.
            shared: entries of each prefix that rows share, counted once.
        """
        return self.weights_read(draft, len(entries)) + (sum(entries) + sum(shared)) * self.kv_read(
            draft
        )

    def weights_read(
        self, draft: Draft | None = None, rows: int = 1, union: float | None = None
    ) -> float:
        """Projections and head.

        Args:
            union: u_B for `rows` sequences; as if they chose channels independently if not given.
        """
        if draft is None:
            return self.projection_bytes + self.head_bytes
        kept = (1 - (1 - draft.channels) ** rows) if union is None else union
        body = self.projection_bytes * draft.depth * kept
        head = self.head_bytes
        if draft.weights in BITS:
            full = 8 * self.weight_bytes
            body *= (BITS[draft.weights] + SCALE_BITS[draft.weights]) / full
            head *= BITS["int8"] / full
        return body + head

    def kv_read(self, draft: Draft | None = None) -> float:
        """Bytes of one entry, of the layers that a draft runs through."""
        return self.entry_bytes * (draft.depth if draft else 1.0)

    # ------------------------------------------------------------------------ crossovers and bounds

    def crossover(self, keep_kv: float, union: float, rows: int = 1) -> float:
        """n*_B: the context, of each of B sequences, from which on the KV cache's saving is the
        larger one.

        Args:
            keep_kv: r_KV.
            union: u_B; r_P itself for one sequence.
        """
        saved = self.projections * (1 - union) * self.weight_bytes / self.kv_bytes
        return saved / (2 * rows * self.kv_heads * self.head_dim * (1 - keep_kv))

    def budget_crossover(self, budget: float, union: float, rows: int = 1) -> float:
        """The same where the cache keeps `budget` entries whatever the context: r_KV = b/n, valid
        above b."""
        return budget + self.crossover(0.0, union, rows)

    def bounds(self, context: float, keep_kv: float, keep_p: float) -> tuple[float, float, float]:
        """How much faster a single sequence's step can be by sparse projections, by a sparse cache,
        and by both."""
        total = self.step_bytes([context])
        by_p = self.projection_bytes * (1 - keep_p)
        by_kv = context * self.entry_bytes * (1 - keep_kv)
        return total / (total - by_p), total / (total - by_kv), total / (total - by_p - by_kv)


def _tower_of(vision: Any) -> dict[str, Any]:
    """What a vision tower's configuration tells of its blocks; of none, nothing."""
    if vision is None:
        return {}
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    inner = getattr(vision, "intermediate_size", None) or round(width * vision.mlp_ratio)
    simple = vision.hidden_act.startswith(
        "gelu"
    )  # gated, or sigmoids of their own: one tensor more
    turns = hasattr(vision, "temporal_patch_size")
    return {
        "tower_mlp": (2 if simple else 3) * inner,
        "tower_turns": turns,
        "tower_places": hasattr(vision, "num_position_embeddings") or not turns,
        "pixels": 3 * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2,
        "levels": 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ()),
    }


def tokens_per_round(acceptance: float, gamma: int) -> float:
    """Expected tokens of a round whose drafts are each accepted with this probability: (1 −
    a^(γ+1)) / (1 − a)."""
    return (
        float(gamma + 1) if acceptance >= 1 else (1 - acceptance ** (gamma + 1)) / (1 - acceptance)
    )


@dataclass(frozen=True)
class AcceptanceCurve:
    """How likely the tokens of a draft are accepted: at each place the probability if all before it
    were. The last one holds for all places behind it. A model's draft has much the same everywhere;
    what is looked up is either wrong at once or right for long."""

    by_place: tuple[float, ...]

    def at(self, place: int) -> float:
        """From 0 on."""
        return self.by_place[min(place, len(self.by_place) - 1)]

    def tokens(self, gamma: int) -> float:
        """Expected tokens of a round of γ, the full model's own included."""
        return sum(self._reached(gamma))

    def rounds(self, tokens: float, gamma: int) -> float:
        """Expected rounds of γ until so many tokens are written: a text does not end where a round
        does, so the last one writes some in vain. Of a renewal process, far from its start; at
        least one."""
        reached = self._reached(gamma)
        each = sum(reached)
        vain = sum(place * reach for place, reach in enumerate(reached)) / each
        return max(1.0, (tokens + vain) / each)

    def rate(self, gamma: int) -> float:
        """a of a round of γ: accepted tokens over those that were judged."""
        accepted = self.tokens(gamma) - 1
        refused = 1 - math.prod(map(self.at, range(gamma)))
        return accepted / (accepted + refused) if accepted + refused else 0.0

    def _reached(self, gamma: int) -> list[float]:
        """How likely a round writes more than 0, 1, … γ tokens."""
        return [math.prod(map(self.at, range(place))) for place in range(gamma + 1)]

    def moved(self, first: float) -> AcceptanceCurve:
        """With another chance at the first place, and those behind it moved by the same odds."""
        odds = first / (1 - first) * (1 - self.by_place[0]) / self.by_place[0]
        return AcceptanceCurve(tuple(p * odds / (p * odds + 1 - p) for p in self.by_place))


def chances(accepted: Sequence[float], refused: Sequence[float]) -> AcceptanceCurve:
    """By how often the token at each place was accepted, and refused where all before it were
    accepted; never 0 or 1. A place with few cases is taken to be like the one before it."""
    found: list[float] = []
    for yes, no in zip(accepted, refused, strict=True):
        found.append((yes + (found[-1] if found else 0.5)) / (yes + no + 1))
    return AcceptanceCurve(tuple(found) or (0.5,))


def count_accepted_rejected(results: Sequence[Result]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How often what rows drafted was accepted at each place, and refused there, as `chances` takes
    them. A row's last round may have been cut by its end, which is no refusal."""
    places = range(max((len(r.accept_counts) for r in results), default=1) - 1)
    accepted = [sum(sum(r.accept_counts[place + 1 :]) for r in results) for place in places]
    refused = [sum(sum(r.refuse_counts[place : place + 1]) for r in results) for place in places]
    reached = max((place + 1 for place in places if accepted[place] + refused[place]), default=0)
    return tuple(accepted[:reached]), tuple(refused[:reached])


def speedup(tokens: float, gamma: int, draft: float, verify: float, dense: float) -> float:
    """Of rounds of γ draft steps and a verification over dense steps; times, or bytes for the
    bound."""
    return tokens * dense / (gamma * draft + verify)
