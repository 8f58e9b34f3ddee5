"""How much the text looks at each visual token: what selection is made from (Sparse-to-Dense §3.2).

    attention_mass(query, key, visual, scale) -> mass

query: (query heads, m_t, d), the last m_t tokens of the prompt, rotated; key: (KV heads, n, d), all of it; visual:
(m_v,) places of the visual tokens. Mass: (KV heads, m_v), float32: softmax over everything a text token sees, mean over
the text tokens, sum over the query heads of a group. Never n × n; m_t × n of one layer at a time.
"""

from __future__ import annotations

import torch


def attention_mass(query: torch.Tensor, key: torch.Tensor, visual: torch.Tensor, scale: float) -> torch.Tensor:
    heads, text, dim = query.shape
    kv_heads, entries, _ = key.shape
    packed = query.reshape(kv_heads, heads // kv_heads * text, dim)
    scores = (packed @ key.transpose(1, 2)).float().mul_(scale).view(kv_heads, -1, text, entries)
    newest = torch.arange(entries - text, entries, device=key.device)
    scores.masked_fill_(torch.arange(entries, device=key.device) > newest[:, None], float("-inf"))
    return scores.softmax(-1)[..., visual].mean(2).sum(1)
