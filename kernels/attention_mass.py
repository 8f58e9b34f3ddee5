"""How much the text looks at each visual token: what selection is made from (Sparse-to-Dense §3.2).

    attention_mass(query, key, logsumexp, scale) -> mass

query: (…, query heads, m_t, d), the text behind the visual tokens, rotated; key: (…, KV heads, m_v,
d), the visual tokens'; logsumexp: (…, query heads, m_t), of all scores of a text token, which
attention has anyway. Mass: (…, KV heads, m_v), float32: the softmax's values, mean over the text
tokens, sum over the query heads of a group. m_t × m_v of one layer at a time."""

from __future__ import annotations

import torch

from std_core.kernels.devices import TRITON


def attention_mass(
    query: torch.Tensor, key: torch.Tensor, logsumexp: torch.Tensor, scale: float
) -> torch.Tensor:
    if query.device.type in TRITON:
        from std_core.kernels.triton import attention_mass as triton_attention_mass

        return triton_attention_mass.attention_mass(query, key, logsumexp, scale)
    text = query.shape[-2]
    kv_heads = key.shape[-3]
    packed = query.unflatten(-3, (kv_heads, -1)).flatten(-3, -2)
    scores = (packed @ key.transpose(-1, -2)).float().mul_(scale)
    weights = scores.sub_(logsumexp.unflatten(-2, (kv_heads, -1)).flatten(-2)[..., None]).exp_()
    return weights.sum(-2) / text
