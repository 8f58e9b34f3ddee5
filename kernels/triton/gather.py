"""`gather_entries` in Triton: reads one index per entry; `Tensor.gather` reads one per element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def gather_entries(cache: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """See `std_core.kernels.gather.gather_entries`."""
    heads, count = indices.shape
    dim = cache.shape[2]
    out = torch.empty(heads, count, dim, dtype=cache.dtype, device=cache.device)
    if count:
        _gather[(triton.cdiv(count, 32), heads)](
            cache_ptr=cache,
            index_ptr=indices,
            out_ptr=out,
            stride_ch=cache.stride(0),
            stride_cn=cache.stride(1),
            stride_cd=cache.stride(2),
            stride_ih=indices.stride(0),
            stride_in=indices.stride(1),
            count=count,
            HEAD_DIM=dim,
            BLOCK_N=32,
            BLOCK_D=triton.next_power_of_2(dim),
        )
    return out


@triton.jit(do_not_specialize=["count"])
def _gather(
    cache_ptr, index_ptr, out_ptr,
    stride_ch, stride_cn, stride_cd,
    stride_ih, stride_in,
    count,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(1)
    offs_d = tl.arange(0, BLOCK_D)
    valid_n = offs_n < count
    index = tl.load(index_ptr + head * stride_ih + offs_n * stride_in, mask=valid_n, other=0)
    index = index.to(tl.int64)
    mask = valid_n[:, None] & (offs_d[None, :] < HEAD_DIM)
    cache_base = cache_ptr + head.to(tl.int64) * stride_ch
    cache_ptrs = cache_base + index[:, None] * stride_cn + offs_d[None, :] * stride_cd
    entries = tl.load(cache_ptrs, mask=mask)
    out_rows = (head * count + offs_n)[:, None].to(tl.int64)
    tl.store(out_ptr + out_rows * HEAD_DIM + offs_d[None, :], entries, mask=mask)
