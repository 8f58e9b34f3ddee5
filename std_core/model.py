"""A Hugging Face model as it is, behind four verbs: see, place, prefill, step.

Its attention is ours through `AttentionInterface`; vision tower, merging of placeholders and M-RoPE index stay its
own. Positions are always passed: what the model remembers of them (`rope_deltas`) is stale as soon as requests
interleave.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForImageTextToText

from std_core.cache import Cache, DecodeStep, PrefillStep
from std_core.checkpoint import Checkpoint, Inputs
from std_core.types import RequestError

ATTENTION = "std_core"


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    kv: PrefillStep | DecodeStep,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer: (B, heads, T, d) in, (B, T, heads, d) out."""
    return kv.attend(module.layer_idx, query, key, value, scaling).transpose(1, 2), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, _attend)


class Model:
    """Weights on a device, in one dtype.

    Raises ValueError where the checkpoint's architecture is none that `AttentionInterface` reaches.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str, device: str):
        hf = AutoModelForImageTextToText.from_pretrained(
            checkpoint.path, dtype=getattr(torch, dtype), use_safetensors=True
        )
        if not hf._supports_attention_backend:
            raise ValueError(f"model {checkpoint.path!r} ({checkpoint.config.model_type}) has an attention of its own")
        hf.set_attn_implementation({"text_config": ATTENTION, "vision_config": "sdpa"})
        self.hf = hf.to(device).eval()  # type: ignore[arg-type]
        self.decoder, self.head = hf.get_decoder(), hf.get_output_embeddings()
        self.embedding = hf.get_input_embeddings()
        text = hf.config.get_text_config()
        self.layers, self.kv_heads = text.num_hidden_layers, text.num_key_value_heads
        self.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self.dtype, self.device = getattr(torch, dtype), device

    @property
    def stop_ids(self) -> list[int]:
        """Ids that end a text, as the checkpoint's generation configuration has them."""
        eos = self.hf.generation_config.eos_token_id
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    def new_cache(self, slots: int) -> Cache:
        return Cache(self.layers, slots, self.kv_heads, self.head_dim, self.dtype, self.device)

    def see(self, inputs: Inputs) -> torch.Tensor:
        """The vision tower: (m_v, hidden) features of all visual tokens."""
        assert inputs.patches is not None and inputs.grid is not None
        out = self.hf.model.get_video_features(inputs.patches.to(self.device), inputs.grid.to(self.device))
        return torch.cat(list(out.pooler_output))

    def place(self, inputs: Inputs) -> tuple[torch.Tensor, int]:
        """Positions (3, 1, n) of a prompt, and that of the first token behind it, which is one past the last one's own
        (as `generate` has it), not past the largest."""
        positions, _ = self.hf.model.get_rope_index(
            inputs.ids, mm_token_type_ids=inputs.types, video_grid_thw=inputs.grid
        )
        return positions.to(self.device), int(positions[..., -1].max()) + 1

    def prefill(self, inputs: Inputs, features: torch.Tensor, positions: torch.Tensor, kv: PrefillStep) -> torch.Tensor:
        """Logits (vocabulary,) behind the prompt.

        Raises:
            RequestError: `placeholder_mismatch`, where the prompt has another number of visual places than features.
        """
        ids = inputs.ids.to(self.device)
        if len(inputs.visual) != len(features):
            raise RequestError(
                "placeholder_mismatch",
                f"the prompt has {len(inputs.visual)} places for visual tokens, the vision tower gave {len(features)}",
            )
        embeds = self.embedding(ids)
        embeds = embeds.masked_scatter((inputs.types != 0).to(self.device)[..., None], features.to(embeds.dtype))
        hidden = self._decode(embeds, positions, kv)
        return self.head(hidden[0, -1])

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, kv: DecodeStep) -> torch.Tensor:
        """Logits (B, T, vocabulary) behind each of `tokens` (B, T) at `positions` (B, T)."""
        return self.head(self._decode(self.embedding(tokens), positions, kv))

    def _decode(self, embeds: torch.Tensor, positions: torch.Tensor, kv: PrefillStep | DecodeStep) -> torch.Tensor:
        return self.decoder(
            inputs_embeds=embeds, position_ids=positions, attention_mask=None, use_cache=False, kv=kv
        ).last_hidden_state
