"""The demo models' forward pass for training: the same weights and results as the model's own (the tests hold it to
that), at a fraction of the time. Frame pairs that are shown again are seen once; the video, which all conversations
about it share, attends causally without a mask; and logits are computed only where something is asked."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import Qwen2VLForConditionalGeneration

from demo_batches import Batch

def see(model: Qwen2VLForConditionalGeneration, batch: Batch) -> torch.Tensor:
    """The vision tower over equal frame pairs at once: (pairs, tokens, hidden). Same weights and result as the model's
    own forward, which takes one frame pair at a time and a Conv3d whose backward costs 40% of a step."""
    tower = model.model.visual
    pairs, count, _ = batch.patches.shape
    x = F.linear(batch.patches, tower.patch_embed.proj.weight.flatten(1))
    _, rows, columns = batch.grid
    h = torch.arange(rows)[:, None].expand(rows, columns)
    w = torch.arange(columns)[None, :].expand(rows, columns)
    order = [p.view(rows // 2, 2, columns // 2, 2).permute(0, 2, 1, 3).flatten() for p in (h, w)]
    cos, sin = tower.rotary_pos_emb(x, torch.stack(order, dim=1))
    for block in tower.blocks:
        attn, y = block.attn, block.norm1(x)
        q, k, v = attn.qkv(y).view(pairs, count, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k = q * cos + _turn(q) * sin, k * cos + _turn(k) * sin
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(pairs, count, -1)
        x = x + attn.proj(y)
        x = x + block.mlp(block.norm2(x))
    return tower.merger(x).view(pairs, count // 4, -1)


def _turn(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def _turn(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def say(model: Qwen2VLForConditionalGeneration, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits where something is asked, and what should have been said there: (n, vocabulary), (n,)."""
    text = model.model.language_model
    shown = see(model, batch)[batch.order].flatten(1, 2)  # (B, visual tokens, hidden)
    if batch.noise:
        shown = shown + torch.randn_like(shown) * (batch.noise * shown.detach().std())
    embeds = model.get_input_embeddings()(batch.ids)
    embeds = embeds.masked_scatter((batch.ids == model.config.video_token_id)[..., None], shown.to(embeds.dtype))
    turns = [angle[:, None] for angle in text.rotary_emb(embeds, batch.positions)]
    cut = batch.ids.shape[1] - batch.mask.shape[2]
    prefix, suffix = embeds[:, :cut], embeds[:, cut:]
    for number, layer in enumerate(text.layers, 1):
        query, key, value = _project(layer, torch.cat((prefix, suffix), 1), turns)
        spoken = F.scaled_dot_product_attention(query[:, :, cut:], key, value, batch.mask)
        suffix = _rest(layer, suffix, spoken)
        if number < len(text.layers):  # nothing is asked of the video itself
            seen = F.scaled_dot_product_attention(query[:, :, :cut], key[:, :, :cut], value[:, :, :cut], is_causal=True)
            prefix = _rest(layer, prefix, seen)
    asked = batch.target != -100
    return model.lm_head(text.norm(suffix[asked[:, cut:]])), batch.target[asked]


def _project(layer: torch.nn.Module, x: torch.Tensor, turns: list[torch.Tensor]) -> list[torch.Tensor]:
    """Queries, keys and values, each (B, heads, L, head size); keys and values repeated for the queries' heads."""
    attn, x = layer.self_attn, layer.input_layernorm(x)
    cos, sin = turns
    query, key, value = (
        f(x).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2) for f in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    query, key = query * cos + _turn(query) * sin, key * cos + _turn(key) * sin
    groups = attn.num_key_value_groups
    return [query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)]


def _rest(layer: torch.nn.Module, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """A decoder layer behind its attention."""
    x = x + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x))
