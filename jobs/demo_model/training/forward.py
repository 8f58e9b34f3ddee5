"""The demo models' forward pass for training, with the weights and results of the model's own
(tested), in a fraction of the time.

Frame pairs that are shown again are encoded once; the video, which all conversations about it
share, attends causally without a mask; logits are computed only where a token is predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLDecoderLayer

from jobs.demo_model.training.batches import IGNORED, TrainingBatch
from jobs.demo_model.world import COLOURS, KINDS, MAX_SCENES


def encode_frame_pairs(
    model: Qwen2VLForConditionalGeneration, batch: TrainingBatch
) -> torch.Tensor:
    """The vision tower over all frame pairs at once: (pairs, tokens, hidden).

    The model's own forward takes one frame pair at a time, and its Conv3d's backward is 40% of a
    step.
    """
    tower = model.model.visual
    pairs, count, _ = batch.patches.shape
    _, rows, columns = batch.grid
    x = F.linear(batch.patches, tower.patch_embed.proj.weight.flatten(1))
    cos, sin = tower.rotary_pos_emb(x, _patch_positions(rows, columns))
    for block in tower.blocks:
        attention = block.attn
        normed = block.norm1(x)
        qkv = attention.qkv(normed).view(pairs, count, 3, attention.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        query = _apply_rope(query, cos, sin)
        key = _apply_rope(key, cos, sin)
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + attention.proj(attended.transpose(1, 2).reshape(pairs, count, -1))
        x = x + block.mlp(block.norm2(x))
    return tower.merger(x).view(pairs, count // 4, -1)


def _patch_positions(rows: int, columns: int) -> torch.Tensor:
    """(patches, 2): row and column, in the processor's order of 2 × 2 groups."""
    row = torch.arange(rows)[:, None].expand(rows, columns)
    column = torch.arange(columns)[None, :].expand(rows, columns)

    def grouped(index: torch.Tensor) -> torch.Tensor:
        return index.view(rows // 2, 2, columns // 2, 2).permute(0, 2, 1, 3).flatten()

    return torch.stack((grouped(row), grouped(column)), dim=1)


def _apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Predictions(NamedTuple):
    """`logits`: (n, vocabulary), where a token is predicted; `target`: (n,), the true tokens."""

    logits: torch.Tensor
    target: torch.Tensor


def predict(model: Qwen2VLForConditionalGeneration, batch: TrainingBatch) -> Predictions:
    """Logits of all predicted tokens of the batch."""
    return _predictions(model, batch, _hidden_states(model, batch).text)


class Probes(torch.nn.Module):
    """Two auxiliary tasks for training, each a linear probe of hidden states: kind and colour at
    the last token of a frame pair before the first layer, and the number of the scene at any token
    of it before the last layer. From captions alone the model learns both far more slowly."""

    def __init__(self, hidden: int):
        super().__init__()
        self.look = torch.nn.Linear(hidden, len(KINDS) + len(COLOURS))
        self.number = torch.nn.Linear(hidden, MAX_SCENES)

    def forward(self, model: Qwen2VLForConditionalGeneration, batch: TrainingBatch) -> ProbedBatch:
        states = _hidden_states(model, batch)
        size, frame_pairs = batch.scene.shape
        visual = batch.text.visual
        tokens = (visual.stop - visual.start) // frame_pairs  # of a frame pair
        last_token = visual.start + torch.arange(1, frame_pairs + 1) * tokens - 1
        random_token = last_token - torch.randint(tokens, (size, frame_pairs))
        look = _probe(self.look, states.prefix[0], last_token)
        number = _probe(self.number, states.prefix[-1], random_token)
        losses = {
            "look": _look_loss(look, batch.looks),
            "number": F.cross_entropy(number.flatten(0, 1), batch.scene.flatten()),
        }
        predictions = _predictions(model, batch, states.text)
        return ProbedBatch(predictions, scene_logits=number, losses=losses)


@dataclass
class ProbedBatch:
    """The model's predictions and the probes'.

    Args:
        scene_logits: (B, T, `MAX_SCENES`).
        losses: by auxiliary task.
    """

    predictions: Predictions
    scene_logits: torch.Tensor
    losses: dict[str, torch.Tensor]


def _probe(linear: torch.nn.Linear, state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Logits of a probe at the given tokens, (T,) or (B, T), of normalized hidden states."""
    rows = torch.arange(len(state))[:, None]
    return linear(F.layer_norm(state[rows, token], state.shape[-1:]))


def _look_loss(logits: torch.Tensor, looks: torch.Tensor) -> torch.Tensor:
    """Cross entropy of kind and of colour; `looks`: (B, T, 2)."""
    kind, colour = logits.flatten(0, 1).split((len(KINDS), len(COLOURS)), -1)
    return F.cross_entropy(kind, looks[..., 0].flatten()) + F.cross_entropy(
        colour, looks[..., 1].flatten()
    )


def _predictions(
    model: Qwen2VLForConditionalGeneration, batch: TrainingBatch, text: torch.Tensor
) -> Predictions:
    predicted = batch.text.target != IGNORED
    logits = model.lm_head(text[predicted[:, -text.shape[1] :]])
    return Predictions(logits, batch.text.target[predicted])


class HiddenStates(NamedTuple):
    """Hidden states of the prefix, which is the video and what stands before it, and of the text
    behind it.

    Args:
        text: (B, S, hidden), after the last layer, normalized.
        prefix: (B, P, hidden), before each layer.
    """

    text: torch.Tensor
    prefix: list[torch.Tensor]


def _hidden_states(model: Qwen2VLForConditionalGeneration, batch: TrainingBatch) -> HiddenStates:
    stack = model.model.language_model
    text = batch.text
    embeds = model.get_input_embeddings()(text.ids)
    is_video = (text.ids == model.config.video_token_id)[..., None]
    embeds = embeds.masked_scatter(is_video, _visual_features(model, batch))
    rope = [angle[:, None] for angle in stack.rotary_emb(embeds, text.positions)]
    cut = text.ids.shape[1] - text.mask.shape[2]  # length of the prefix
    prefix = embeds[:, :cut]
    suffix = embeds[:, cut:]
    prefix_states = [prefix]
    for number, layer in enumerate(stack.layers, 1):
        query, key, value = _project(layer, torch.cat((prefix, suffix), 1), rope)
        attended = F.scaled_dot_product_attention(query[:, :, cut:], key, value, text.mask)
        suffix = _finish_layer(layer, suffix, attended)
        if number < len(stack.layers):  # behind the last layer the prefix predicts nothing
            attended = F.scaled_dot_product_attention(
                query[:, :, :cut], key[:, :, :cut], value[:, :, :cut], is_causal=True
            )
            prefix = _finish_layer(layer, prefix, attended)
            prefix_states.append(prefix)
    return HiddenStates(stack.norm(suffix), prefix_states)


def _visual_features(model: Qwen2VLForConditionalGeneration, batch: TrainingBatch) -> torch.Tensor:
    """(B, visual tokens, hidden), with the batch's noise."""
    features = encode_frame_pairs(model, batch)[batch.order].flatten(1, 2)
    if not batch.noise:
        return features
    spread = features.detach().std()
    return features + torch.randn_like(features) * (batch.noise * spread)


class Projections(NamedTuple):
    """Each (B, heads, L, head size)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def _project(layer: Qwen2VLDecoderLayer, x: torch.Tensor, rope: list[torch.Tensor]) -> Projections:
    """Queries, keys and values; keys and values repeated for the query heads that share them."""
    attention = layer.self_attn
    normed = layer.input_layernorm(x)
    cos, sin = rope

    def heads(projection: torch.nn.Module) -> torch.Tensor:
        return projection(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

    query = _apply_rope(heads(attention.q_proj), cos, sin)
    key = _apply_rope(heads(attention.k_proj), cos, sin)
    value = heads(attention.v_proj)
    groups = attention.num_key_value_groups
    return Projections(query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))


def _finish_layer(
    layer: Qwen2VLDecoderLayer, x: torch.Tensor, attended: torch.Tensor
) -> torch.Tensor:
    """A decoder layer from its attention's output on."""
    x = x + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x))
