"""Attention of a few new tokens per row over caches of different lengths.

    ragged_attention(query, key, value, lengths, scale) -> output

query: (B, query heads, T, d), the T newest tokens of each row; key, value: (B, KV heads, S, d), caches that already
hold those T tokens; lengths: (B,), entries before them. Token t of row b sees the entries [0, lengths[b] + t].
Output: (B, query heads, T, d).

`reference` is the definition in plain sums; `cpu` packs the query heads of a KV head together, so that keys and values
are read once for all of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor, scale: float
) -> torch.Tensor:
    """The definition, row by row in float64; for tests."""
    out = torch.empty(query.shape, dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    for b in range(query.shape[0]):
        for head in range(query.shape[1]):
            for t in range(query.shape[2]):
                seen = int(lengths[b]) + t + 1
                k, v = (x[b, head // group, :seen].double() for x in (key, value))
                out[b, head, t] = ((k @ query[b, head, t].double()) * scale).softmax(0) @ v
    return out


def cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor, scale: float
) -> torch.Tensor:
    rows, heads, width, dim = query.shape
    kv_heads = key.shape[1]
    used = int(lengths.max()) + width
    packed = query.reshape(rows, kv_heads, heads // kv_heads * width, dim)
    last = lengths[:, None] + torch.arange(width, device=lengths.device)  # (B, T): the newest entry each token sees
    sees = torch.arange(used, device=lengths.device) <= last.repeat(1, heads // kv_heads)[..., None]
    out = F.scaled_dot_product_attention(
        packed, key[:, :, :used], value[:, :, :used], attn_mask=sees[:, None], scale=scale
    )
    return out.reshape(rows, heads, width, dim)


ragged_attention = cpu
