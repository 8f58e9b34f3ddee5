"""A model's dimensions, and the bytes that a decode step reads (Crossover §3.1, §3.2).

Symbols: P projection weights per layer, h_kv KV heads, d_h head size, n context tokens, r_P and
r_KV the kept fractions of projection weights and KV entries, u_B the fraction of the projection
weights that any of B sequences activates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from std_core.kernels.shared.constants import GROUP_SIZE
from std_core.types import WEIGHT_BITS, Draft

# Bits per weight that scales and offsets add: at 4 bits two 16-bit numbers per group.
SCALE_BITS = {"int8": 0.0, "int4": 2 * 16 / GROUP_SIZE}


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of a model's text stack and vision tower.

    The whole model's parameters and the tower's dimensions matter for memory only and are 0 where
    only a decode step's bytes are computed.

    Args:
        layers: of the text stack, as all up to `kv_bytes`.
        hidden: size of the hidden states.
        intermediate: size of the MLP; in a mixture of experts, of one expert.
        heads: query heads.
        kv_heads: h_kv.
        head_dim: d_h.
        vocabulary: size of the output head.
        experts: that each token activates.
        router: experts that the router chooses from; 0 without experts.
        weight_bytes: per weight.
        kv_bytes: per element of keys and values.
        parameters: of the whole model.
        tower: parameters of the vision tower and of what merges its output.
        tower_width: hidden size of the tower's blocks.
        patches: patches per visual token.
        tower_mlp: numbers of one patch that a block's MLP holds at once.
        tower_rope: the tower rotates queries and keys (RoPE).
        tower_learned_positions: the tower has learned position embeddings.
        pixels: numbers of one patch before the tower.
        feature_levels: features per visual token: the last layer's, and one per DeepStack level.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 1
    router: int = 0
    weight_bytes: float = 2
    kv_bytes: float = 2
    parameters: int = 0
    tower: int = 0
    tower_width: int = 0
    patches: int = 4
    tower_mlp: int = 0
    tower_rope: bool = False
    tower_learned_positions: bool = False
    pixels: int = 0
    feature_levels: int = 1

    @classmethod
    def of(cls, config: Any, weight_bytes: float = 2, kv_bytes: float = 2) -> ModelSize:
        """Read the dimensions from a Hugging Face configuration of a model or of a text stack.

        `parameters`, `tower`, `tower_width` and `patches` are left out; see
        `checkpoint.full_model_size`.
        """
        text = config.get_text_config()
        heads = text.num_attention_heads
        router = getattr(text, "num_experts", 0) or getattr(text, "num_local_experts", 0) or 0
        expert_size = getattr(text, "moe_intermediate_size", None) if router else None
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=expert_size or text.intermediate_size,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            vocabulary=text.vocab_size,
            experts=text.num_experts_per_tok if router else 1,
            router=router,
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
            **_vision_dimensions(getattr(config, "vision_config", None)),
        )

    @property
    def projections(self) -> int:
        """P: weights of a layer's seven projections; of active experts only, plus the router."""
        mlp = 3 * self.hidden * self.intermediate * self.experts
        return self._attention_projections + mlp + self.hidden * self.router

    @property
    def packable(self) -> int:
        """Weights of a layer that a low-bit draft copies: all projections but the experts'."""
        mlp = 0 if self.router else 3 * self.hidden * self.intermediate
        return self._attention_projections + mlp

    @property
    def _attention_projections(self) -> int:
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def projection_bytes(self) -> float:
        """Bytes of the projections of all layers."""
        return self.layers * self.projections * self.weight_bytes

    @property
    def head_bytes(self) -> float:
        """Bytes of the output head.

        Every step reads it, tied to the embedding or not. Of the embedding a step reads one row.
        """
        return self.hidden * self.vocabulary * self.weight_bytes

    @property
    def entry_bytes(self) -> float:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    def step_bytes(
        self, entries: Sequence[float], draft: Draft | None = None, shared: Sequence[float] = ()
    ) -> float:
        """Return the bytes that one decode step of a batch reads.

        Args:
            entries: KV entries of each row that no other row shares.
            draft: count its weights instead of the full model's.
            shared: entries of each prefix that rows share; read once.
        """
        kv = (sum(entries) + sum(shared)) * self.kv_read(draft)
        return self.weights_read(draft, len(entries)) + kv

    def weights_read(
        self, draft: Draft | None = None, rows: int = 1, union_fraction: float | None = None
    ) -> float:
        """Return the bytes of projections and output head that one step reads.

        Args:
            draft: None for the full model.
            rows: B.
            union_fraction: u_B as measured; without it the rows' channels are taken as independent,
                u_B = 1 − (1 − r_P)^B.
        """
        if draft is None:
            return self.projection_bytes + self.head_bytes
        if union_fraction is None:
            union_fraction = 1 - (1 - draft.channels) ** rows
        projections = self.projection_bytes * draft.depth * union_fraction
        head = self.head_bytes
        if draft.weights in WEIGHT_BITS:
            full_bits = 8 * self.weight_bytes
            projections *= (WEIGHT_BITS[draft.weights] + SCALE_BITS[draft.weights]) / full_bits
            head *= WEIGHT_BITS["int8"] / full_bits
        return projections + head

    def kv_read(self, draft: Draft | None = None) -> float:
        """Return the bytes of one KV entry in the layers that a draft (or the model) runs."""
        return self.entry_bytes * (draft.depth if draft else 1.0)


def _vision_dimensions(vision: Any) -> dict[str, Any]:
    """Read the tower's dimensions from its configuration; nothing without a tower."""
    if vision is None:
        return {}
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    intermediate = getattr(vision, "intermediate_size", None) or round(width * vision.mlp_ratio)
    # a gated MLP, or an activation made of several operations, holds one tensor more
    mlp_tensors = 2 if vision.hidden_act.startswith("gelu") else 3
    is_qwen = hasattr(vision, "temporal_patch_size")  # the towers with RoPE
    return {
        "tower_mlp": mlp_tensors * intermediate,
        "tower_rope": is_qwen,
        "tower_learned_positions": hasattr(vision, "num_position_embeddings") or not is_qwen,
        "pixels": 3 * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2,
        "feature_levels": 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ()),
    }
