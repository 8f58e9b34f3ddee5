"""`sparse_linear` in Triton: the weights of input channels that no row activates are not read.

One program lists the channels that any row activates. Each tile of the product then iterates over
that list. The list's length stays on the device, so no launch waits for it. The weight may be in
row-major or channel-major layout, but only the latter saves memory traffic
(`std_core.kernels.sparse_linear.channel_major`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TARGET_PROGRAMS = 256  # with fewer output tiles than this the active channels are split too
MIN_SPLIT_CHANNELS = 256
BLOCK_N = 64


def sparse_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    """See `std_core.kernels.sparse_linear.sparse_linear`. A tile holds up to 64 rows of x."""
    flat = x.flatten(0, -2).contiguous()
    rows, in_channels = flat.shape
    out_channels = len(weight)
    active = torch.empty(in_channels, dtype=torch.int32, device=x.device)
    num_active = torch.empty(1, dtype=torch.int32, device=x.device)
    _active[(1,)](
        x_ptr=flat,
        active_ptr=active,
        num_active_ptr=num_active,
        threshold=threshold,
        rows=rows,
        in_channels=in_channels,
        BLOCK=1024,
    )
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    row_tiles = triton.cdiv(rows, block_m)
    out_tiles = triton.cdiv(out_channels, BLOCK_N)
    wanted_splits = TARGET_PROGRAMS // (row_tiles * out_tiles)
    splits = max(1, min(wanted_splits, in_channels // MIN_SPLIT_CHANNELS))
    partial = torch.empty(splits, rows, out_channels, dtype=torch.float32, device=x.device)
    _product[(out_tiles, splits, row_tiles)](
        x_ptr=flat,
        w_ptr=weight,
        active_ptr=active,
        num_active_ptr=num_active,
        out_ptr=partial,
        threshold=threshold,
        rows=rows,
        in_channels=in_channels,
        out_channels=out_channels,
        stride_wn=weight.stride(0),
        stride_wk=weight.stride(1),
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=32,
    )
    y = partial.sum(0)
    y = y if bias is None else y + bias
    return y.to(x.dtype).unflatten(0, x.shape[:-1])


@triton.jit(do_not_specialize=["rows"])
def _active(
    x_ptr, active_ptr, num_active_ptr, threshold, rows, in_channels, BLOCK: tl.constexpr
):  # fmt: skip
    """List the channels whose magnitude is above the threshold in any row, in ascending order."""
    num_active = 0
    for start in range(0, in_channels, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        valid = channel < in_channels
        largest = tl.full([BLOCK], -1.0, tl.float32)
        for row in range(0, rows):
            x = tl.load(x_ptr + row * in_channels + channel, mask=valid, other=0.0)
            largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
        is_active = ((largest > threshold) & valid).to(tl.int32)
        index = num_active + tl.cumsum(is_active, 0) - is_active
        tl.store(active_ptr + index, channel, mask=is_active > 0)
        num_active += tl.sum(is_active, 0)
    tl.store(num_active_ptr, num_active)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x_ptr, w_ptr, active_ptr, num_active_ptr, out_ptr, threshold,
    rows, in_channels, out_channels,
    stride_wn, stride_wk,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Partial products of a tile of rows and output channels over one split of the active list."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    offs_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    num_active = tl.load(num_active_ptr)
    num_splits = tl.num_programs(1)
    size = ((num_active + num_splits - 1) // num_splits + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    end = tl.minimum((split + 1) * size, num_active)
    acc = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for start_k in range(split * size, end, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        channel = tl.load(active_ptr + offs_k, mask=offs_k < end, other=0).to(tl.int64)
        x_mask = (offs_m[:, None] < rows) & (offs_k[None, :] < end)
        x_ptrs = x_ptr + offs_m[:, None] * in_channels + channel[None, :]
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        # a channel is listed if one row activates it; other rows may be below the threshold
        x = tl.where(tl.abs(x.to(tl.float32)) > threshold, x, 0.0).to(x.dtype)
        w_ptrs = w_ptr + channel[:, None] * stride_wk + offs_n[None, :].to(tl.int64) * stride_wn
        w_mask = (offs_k[:, None] < end) & (offs_n[None, :] < out_channels)
        w = tl.load(w_ptrs, mask=w_mask, other=0.0)
        acc += tl.dot(x, w, input_precision="ieee")
    out_rows = (split * rows + offs_m[:, None]).to(tl.int64)
    out_ptrs = out_ptr + out_rows * out_channels + offs_n[None, :]
    tl.store(out_ptrs, acc, mask=(offs_m[:, None] < rows) & (offs_n[None, :] < out_channels))
