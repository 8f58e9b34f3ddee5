"""The demo models' forward pass for training: the same weights and results as the model's own (the
tests hold it to that), at a fraction of the time. Frame pairs that are shown again are seen once;
the video, which all conversations about it share, attends causally without a mask; and logits are
computed only where something is asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLDecoderLayer

from jobs.demo_model.training.batches import TrainingBatch
from jobs.demo_model.world import COLOURS, KINDS, MAX_SCENES


def see(model: Qwen2VLForConditionalGeneration, batch: TrainingBatch) -> torch.Tensor:
    """The vision tower over equal frame pairs at once: (pairs, tokens, hidden). Same weights and
    result as the model's own forward, which takes one frame pair at a time and a Conv3d whose
    backward costs 40% of a step."""
    tower = model.model.visual
    pairs, count, _ = batch.patches.shape
    x = F.linear(batch.patches, tower.patch_embed.proj.weight.flatten(1))
    _, rows, columns = batch.grid
    h = torch.arange(rows)[:, None].expand(rows, columns)
    w = torch.arange(columns)[None, :].expand(rows, columns)
    order = [p.view(rows // 2, 2, columns // 2, 2).permute(0, 2, 1, 3).flatten() for p in (h, w)]
    cos, sin = tower.rotary_pos_emb(x, torch.stack(order, dim=1))
    for block in tower.blocks:
        attn = block.attn
        y = block.norm1(x)
        q, k, v = attn.qkv(y).view(pairs, count, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        q = q * cos + _turn(q) * sin
        k = k * cos + _turn(k) * sin
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(pairs, count, -1)
        x = x + attn.proj(y)
        x = x + block.mlp(block.norm2(x))
    return tower.merger(x).view(pairs, count // 4, -1)


def _turn(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def say(
    model: Qwen2VLForConditionalGeneration, batch: TrainingBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits where something is asked, and what should have been said there: (n, vocabulary),
    (n,)."""
    return _asked(model, batch, _hidden(model, batch)[0])


class Probes(torch.nn.Module):
    """More tasks, for training only, each read linearly: what a frame pair shows off the end of
    what the first layer is fed of it, and which scene that is, anywhere in it, off what the last
    layer is fed. Captions alone teach that far more slowly."""

    def __init__(self, hidden: int):
        super().__init__()
        self.shown = torch.nn.Linear(hidden, len(KINDS) + len(COLOURS))
        self.number = torch.nn.Linear(hidden, MAX_SCENES)

    def forward(self, model: Qwen2VLForConditionalGeneration, batch: TrainingBatch) -> Probed:
        spoken, states = _hidden(model, batch)
        size, temporal = batch.scene.shape
        cells = (batch.visual.stop - batch.visual.start) // temporal
        last = batch.visual.start + torch.arange(1, temporal + 1) * cells - 1
        any_of = last - torch.randint(cells, (size, temporal))
        rows = torch.arange(size)[:, None]
        shown, number = (
            probe(F.layer_norm(state[rows, at], state.shape[-1:]))
            for probe, state, at in (
                (self.shown, states[0], last),
                (self.number, states[-1], any_of),
            )
        )
        losses = {
            "shown": _look_loss(shown, batch.looks),
            "number": F.cross_entropy(number.flatten(0, 1), batch.scene.flatten()),
        }
        return Probed(*_asked(model, batch, spoken), number, losses)


@dataclass
class Probed:
    """What a model says, and what its probes read."""

    logits: torch.Tensor  # (n, vocabulary), where something is asked
    target: torch.Tensor  # (n,), what should have been said
    number: torch.Tensor  # (B, T, 12) logits
    losses: dict[str, torch.Tensor]  # of the probes' tasks


def _look_loss(logits: torch.Tensor, looks: torch.Tensor) -> torch.Tensor:
    """Cross entropy of kind and of colour; `looks` (B, T, 2)."""
    kind, colour = logits.flatten(0, 1).split((len(KINDS), len(COLOURS)), -1)
    return F.cross_entropy(kind, looks[..., 0].flatten()) + F.cross_entropy(
        colour, looks[..., 1].flatten()
    )


def _asked(
    model: Qwen2VLForConditionalGeneration, batch: TrainingBatch, spoken: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    asked = batch.target != -100
    return model.lm_head(spoken[asked[:, -spoken.shape[1] :]]), batch.target[asked]


def _hidden(
    model: Qwen2VLForConditionalGeneration, batch: TrainingBatch
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden states: (B, S, hidden) behind the video at the end, normed, and (B, P, hidden) of the
    video and what comes before it, first as fed in, then behind each layer but the last."""
    text = model.model.language_model
    shown = see(model, batch)[batch.order].flatten(1, 2)  # (B, visual tokens, hidden)
    if batch.noise:
        shown = shown + torch.randn_like(shown) * (batch.noise * shown.detach().std())
    embeds = model.get_input_embeddings()(batch.ids)
    embeds = embeds.masked_scatter((batch.ids == model.config.video_token_id)[..., None], shown)
    turns = [angle[:, None] for angle in text.rotary_emb(embeds, batch.positions)]
    cut = batch.ids.shape[1] - batch.mask.shape[2]
    prefix = embeds[:, :cut]
    suffix = embeds[:, cut:]
    states = [prefix]
    for number, layer in enumerate(text.layers, 1):
        query, key, value = _project(layer, torch.cat((prefix, suffix), 1), turns)
        spoken = F.scaled_dot_product_attention(query[:, :, cut:], key, value, batch.mask)
        suffix = _rest(layer, suffix, spoken)
        if number < len(text.layers):  # nothing is asked of the video itself at the end
            seen = F.scaled_dot_product_attention(
                query[:, :, :cut], key[:, :, :cut], value[:, :, :cut], is_causal=True
            )
            states.append(prefix := _rest(layer, prefix, seen))
    return text.norm(suffix), states


def _project(
    layer: Qwen2VLDecoderLayer, x: torch.Tensor, turns: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Queries, keys and values, each (B, heads, L, head size); keys and values repeated for the
    queries' heads."""
    attn = layer.self_attn
    x = layer.input_layernorm(x)
    cos, sin = turns
    query, key, value = (
        f(x).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
        for f in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    query = query * cos + _turn(query) * sin
    key = key * cos + _turn(key) * sin
    groups = attn.num_key_value_groups
    return [query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)]


def _rest(layer: Qwen2VLDecoderLayer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """A decoder layer behind its attention."""
    x = x + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x))
