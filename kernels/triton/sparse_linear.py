"""`sparse_linear` on a GPU: the weights of input channels that no row activates are not read.

    sparse_linear(x, weight, bias, threshold) -> y by_channel(weight) -> the same weight, laid out
    so that leaving out channels saves what they weigh

Shapes are those of `sparse_linear.py`. First one program lists the channels that any row activates,
then each block of output channels walks over that list. How long it is stays on the device. A
channel is a column of the weight: laid out row by row, as a checkpoint has it, a column shares
memory lines with its neighbours and leaving it out saves nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 256  # that a product is spread over where it has too few output channels of its own


def by_channel(weight: torch.Tensor) -> torch.Tensor:
    """(out, in) with the numbers of an input channel side by side; for dense products either layout
    is as good."""
    return weight.t().contiguous().t()


def sparse_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    """See `sparse_linear.sparse_linear`; x of at most 64 rows in one tile, more take several."""
    flat = x.flatten(0, -2).contiguous()
    rows, channels = flat.shape
    outputs = len(weight)
    order = torch.empty(channels, dtype=torch.int32, device=x.device)
    count = torch.empty(1, dtype=torch.int32, device=x.device)
    _active[(1,)](flat, order, count, threshold, rows, channels, BLOCK=1024)
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(rows, block_m)
    blocks = triton.cdiv(outputs, 64)
    splits = max(1, min(PROGRAMS // (tiles * blocks), channels // 256))
    part = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    _product[(blocks, splits, tiles)](
        flat,
        weight,
        order,
        count,
        part,
        threshold,
        rows,
        channels,
        outputs,
        *weight.stride(),
        BLOCK_M=block_m,
        BLOCK_N=64,
        BLOCK_K=32,
    )
    y = part.sum(0)
    y = y if bias is None else y + bias
    return y.to(x.dtype).unflatten(0, x.shape[:-1])


@triton.jit(do_not_specialize=["rows"])
def _active(x, order, count, threshold, rows, channels, BLOCK: tl.constexpr):
    """Lists the channels whose magnitude is above the threshold in any row, in their order."""
    found = 0
    for at in range(0, channels, BLOCK):
        c = at + tl.arange(0, BLOCK)
        largest = tl.full([BLOCK], -1.0, tl.float32)
        for row in range(0, rows):
            value = tl.load(x + row * channels + c, mask=c < channels, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(value))
        flag = ((largest > threshold) & (c < channels)).to(tl.int32)
        place = found + tl.cumsum(flag, 0) - flag
        tl.store(order + place, c, mask=flag > 0)
        found += tl.sum(flag, 0)
    tl.store(count, found)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, order, count, part, threshold, rows, channels, outputs, w_out, w_in,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    active = tl.load(count)
    splits = tl.num_programs(1)
    size = ((active + splits - 1) // splits + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    end = tl.minimum((split + 1) * size, active)
    taken = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for at in range(split * size, end, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        c = tl.load(order + k, mask=k < end, other=0).to(tl.int64)
        inside = (m[:, None] < rows) & (k[None, :] < end)
        value = tl.load(x + m[:, None] * channels + c[None, :], mask=inside, other=0.0)
        value = tl.where(tl.abs(value.to(tl.float32)) > threshold, value, 0.0).to(value.dtype)
        w = tl.load(
            weight + c[:, None] * w_in + n[None, :].to(tl.int64) * w_out,
            mask=(k[:, None] < end) & (n[None, :] < outputs),
            other=0.0,
        )
        taken += tl.dot(value, w, input_precision="ieee")
    to = part + (split * rows + m[:, None]).to(tl.int64) * outputs + n[None, :]
    tl.store(to, taken, mask=(m[:, None] < rows) & (n[None, :] < outputs))
