"""`gather_entries` on a GPU: whole entries are copied, one index read for each; `Tensor.gather`
reads one per number.

gather_entries(cache, chosen) -> (KV heads, K, d)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def gather_entries(cache: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """See `gather.gather_entries`."""
    heads, count = chosen.shape
    dim = cache.shape[2]
    out = torch.empty(heads, count, dim, dtype=cache.dtype, device=cache.device)
    if count:
        _gather[(triton.cdiv(count, 32), heads)](
            cache,
            chosen,
            out,
            *cache.stride(),
            *chosen.stride(),
            count,
            DIM=dim,
            BLOCK_N=32,
            BLOCK_D=triton.next_power_of_2(dim),
        )
    return out


@triton.jit(do_not_specialize=["count"])
def _gather(
    cache, chosen, out, head_stride, entry_stride, dim_stride, chosen_head, chosen_place, count,
    DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    there = n < count
    place = tl.load(chosen + head * chosen_head + n * chosen_place, mask=there, other=0).to(
        tl.int64
    )
    both = there[:, None] & (d[None, :] < DIM)
    start = cache + head.to(tl.int64) * head_stride
    taken = tl.load(start + place[:, None] * entry_stride + d[None, :] * dim_stride, mask=both)
    tl.store(out + (head * count + n)[:, None].to(tl.int64) * DIM + d[None, :], taken, mask=both)
