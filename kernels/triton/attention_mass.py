"""`attention_mass` in Triton: scores are summed as they are computed and never stored.

A program owns a block of visual tokens of one KV head and iterates over the packed queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def attention_mass(
    query: torch.Tensor, key: torch.Tensor, logsumexp: torch.Tensor, scale: float
) -> torch.Tensor:
    """See `std_core.kernels.attention_mass.attention_mass`."""
    heads, text_tokens, dim = query.shape[-3:]
    kv_heads, visual_tokens = key.shape[-3:-1]
    queries = _dense_last_dim(query.reshape(-1, *query.shape[-3:]))
    keys = _dense_last_dim(key.reshape(-1, *key.shape[-3:]))
    mass = torch.empty(len(keys), kv_heads, visual_tokens, dtype=torch.float32, device=key.device)
    block = 32 if query.dtype == torch.float32 else 64
    _mass[(triton.cdiv(visual_tokens, block), kv_heads, len(keys))](
        q_ptr=queries,
        k_ptr=keys,
        lse_ptr=logsumexp.reshape(-1, heads, text_tokens).contiguous(),
        out_ptr=mass,
        qk_scale=scale,
        stride_qb=queries.stride(0),
        stride_qh=queries.stride(1),
        stride_qt=queries.stride(2),
        stride_kb=keys.stride(0),
        stride_kh=keys.stride(1),
        stride_kn=keys.stride(2),
        text_tokens=text_tokens,
        visual_tokens=visual_tokens,
        HEADS_PER_KV=heads // kv_heads,
        HEAD_DIM=dim,
        BLOCK_M=block,
        BLOCK_N=block,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        num_stages=2,
    )
    return mass.view(*key.shape[:-1])


def _dense_last_dim(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit(do_not_specialize=["text_tokens", "visual_tokens"])
def _mass(
    q_ptr, k_ptr, lse_ptr, out_ptr, qk_scale,
    stride_qb, stride_qh, stride_qt,
    stride_kb, stride_kh, stride_kn,
    text_tokens, visual_tokens,
    HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    k_base = k_ptr + row * stride_kb + kv_head * stride_kh
    k = tl.load(
        k_base + offs_n[None, :] * stride_kn + offs_d[:, None],
        mask=(offs_n[None, :] < visual_tokens) & (offs_d[:, None] < HEAD_DIM),
        other=0.0,
    )
    mass = tl.full([BLOCK_N], 0.0, tl.float32)
    for start_m in range(0, HEADS_PER_KV * text_tokens, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        valid_m = offs_m < HEADS_PER_KV * text_tokens
        head = kv_head * HEADS_PER_KV + offs_m // text_tokens
        token = offs_m % text_tokens
        q_ptrs = (
            q_ptr
            + row * stride_qb
            + head[:, None] * stride_qh
            + token[:, None] * stride_qt
            + offs_d[None, :]
        )
        q = tl.load(q_ptrs, mask=valid_m[:, None] & (offs_d[None, :] < HEAD_DIM), other=0.0)
        token_index = (row * tl.num_programs(1) * HEADS_PER_KV + head) * text_tokens + token
        # invalid queries get the log-sum-exp inf, so they add exp(-inf) = 0
        lse = tl.load(lse_ptr + token_index, mask=valid_m, other=float("inf"))
        scores = tl.dot(q, k, input_precision="ieee") * qk_scale
        mass += tl.sum(tl.exp(scores - lse[:, None]), 0)
    out_ptrs = out_ptr + (row * tl.num_programs(1) + kv_head) * visual_tokens + offs_n
    tl.store(out_ptrs, mass / text_tokens, mask=offs_n < visual_tokens)
