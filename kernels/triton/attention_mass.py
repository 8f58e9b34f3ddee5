"""`attention_mass` on a GPU: the scores of text and visual tokens are summed as they are made,
never stored.

    attention_mass(query, key, logsumexp, scale) -> mass

Shapes are those of `mass.py`. A program owns a block of visual tokens of one KV head and walks over
the packed queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def attention_mass(
    query: torch.Tensor, key: torch.Tensor, logsumexp: torch.Tensor, scale: float
) -> torch.Tensor:
    """See `mass.attention_mass`."""
    heads, text, dim = query.shape[-3:]
    kv_heads, visual = key.shape[-3:-1]
    asks, keys = (x.reshape(-1, *x.shape[-3:]) for x in (query, key))
    seen = logsumexp.reshape(-1, heads, text).contiguous()
    asks, keys = (x if x.stride(-1) == 1 else x.contiguous() for x in (asks, keys))
    out = torch.empty(len(keys), kv_heads, visual, dtype=torch.float32, device=key.device)
    exact = query.dtype == torch.float32
    block_m, block_n = (32, 32) if exact else (64, 64)
    _mass[(triton.cdiv(visual, block_n), kv_heads, len(keys))](
        asks,
        keys,
        seen,
        out,
        scale,
        *asks.stride()[:3],
        *keys.stride()[:3],
        text,
        visual,
        GROUP=heads // kv_heads,
        DIM=dim,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        num_stages=2,
    )
    return out.view(*key.shape[:-1])


@triton.jit(do_not_specialize=["text", "visual"])
def _mass(
    query, key, logsumexp, out, scale, q_row, q_head, q_token, k_row, k_head, k_entry, text, visual,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    k_at = key + row * k_row + kv_head * k_head + e[None, :] * k_entry + d[:, None]
    k = tl.load(k_at, mask=(e[None, :] < visual) & (d[:, None] < DIM), other=0.0)
    mass = tl.full([BLOCK_N], 0.0, tl.float32)
    for at in range(0, GROUP * text, BLOCK_M):
        m = at + tl.arange(0, BLOCK_M)
        asks = m < GROUP * text
        head = kv_head * GROUP + m // text
        token = m % text
        q_at = query + row * q_row + head[:, None] * q_head + token[:, None] * q_token + d[None, :]
        q = tl.load(q_at, mask=asks[:, None] & (d[None, :] < DIM), other=0.0)
        whole = tl.load(
            logsumexp + (row * tl.num_programs(1) * GROUP + head) * text + token,
            mask=asks,
            other=float("inf"),
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        mass += tl.sum(tl.exp(scores - whole[:, None]), 0)  # places beyond the queries: exp(-inf)
    to = out + (row * tl.num_programs(1) + kv_head) * visual + e
    tl.store(to, mass / text, mask=e < visual)
