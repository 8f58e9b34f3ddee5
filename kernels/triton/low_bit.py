"""`pack` and `low_bit_linear` on a GPU: at 4 bits in bfloat16 PyTorch's own packed product, else a
Triton kernel that unpacks weights on their way from memory.

    pack(weight, bits) -> Packed
    low_bit_linear(x, packed, bias) -> y

Shapes and meaning of levels and scales are those of `low_bit.py`. The Triton kernel takes 8 bits as
(out, in) int8, and 4 bits as (out, in / 2) uint8, the even channel in the upper half; PyTorch's
product has a layout of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from std_core.kernels.low_bit import GROUP, Packed, levels_of

PROGRAMS = 256  # that a product is spread over where it has too few output channels of its own


def pack(weight: torch.Tensor, bits: int) -> Packed:
    """See `low_bit.pack`."""
    levels, scale = levels_of(weight, bits)
    packed = pack_plainly(levels, scale, bits)
    if bits == 4 and (tiles := _tiles(weight)):
        return Packed(
            torch.ops.aten._convert_weight_to_int4pack(packed.weight, tiles), packed.scale, bits
        )
    return packed


def pack_plainly(levels: torch.Tensor, scale: torch.Tensor, bits: int) -> Packed:
    """As the Triton kernel takes it."""
    if bits == 8:
        return Packed(levels, scale, bits)
    return Packed(
        levels[:, ::2].to(torch.uint8) << 4 | levels[:, 1::2].to(torch.uint8), scale, bits
    )


def _tiles(weight: torch.Tensor) -> int:
    """Of 16 channels, that PyTorch's 4-bit product takes together; 0 where it does not serve."""
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16 or len(weight) % 8:
        return 0
    return next((tiles for tiles in (8, 4, 2) if weight.shape[1] % (16 * tiles) == 0), 0)


def low_bit_linear(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """See `low_bit.low_bit_linear`."""
    flat = x.flatten(0, -2).contiguous()
    if packed.weight.ndim == 4:
        y = torch.ops.aten._weight_int4pack_mm(flat, packed.weight, GROUP, packed.scale)
    else:
        y = product(flat, packed)
    y = y if bias is None else y + bias
    return y.unflatten(0, x.shape[:-1])


def product(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """The Triton kernel: x (rows, in), weights in its layout."""
    rows, channels = x.shape
    outputs = len(packed.weight)
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(rows, block_m)
    blocks = triton.cdiv(outputs, 64)
    splits = max(1, min(PROGRAMS // (tiles * blocks), channels // 512))
    part = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    _product[(blocks, splits, tiles)](
        x,
        packed.weight,
        packed.scale,
        part,
        rows,
        channels,
        outputs,
        BITS=packed.bits,
        CHANNELS=GROUP,
        BLOCK_M=block_m,
        BLOCK_N=64,
        BLOCK_K=32 if x.dtype == torch.float32 else 64,
    )
    return part.sum(0).to(x.dtype)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, scale, part, rows, channels, outputs,
    BITS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_K stored numbers of a channel at a time: at 4 bits each is two channels, which are
    multiplied apart. CHANNELS share a scale."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    PER: tl.constexpr = 8 // BITS
    stored = channels // PER
    splits = tl.num_programs(1)
    size = ((stored + splits - 1) // splits + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    begin = tl.program_id(1) * size
    end = tl.minimum(begin + size, stored)
    there = n[None, :] < outputs
    taken = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for at in range(begin, end, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        both = (k[:, None] < end) & there
        asks = (m[:, None] < rows) & (k[None, :] < end)
        packed = tl.load(weight + n[None, :].to(tl.int64) * stored + k[:, None], mask=both, other=0)
        value = tl.load(x + m[:, None] * channels + k[None, :] * PER, mask=asks, other=0.0)
        if BITS == 8:
            taken += tl.dot(value, packed.to(tl.float32).to(value.dtype), input_precision="ieee")
        else:
            group = scale + ((k[:, None] * 2 // CHANNELS) * outputs + n[None, :]) * 2
            step = tl.load(group, mask=both, other=0.0).to(tl.float32)
            middle = tl.load(group + 1, mask=both, other=0.0).to(tl.float32)
            high = ((packed >> 4).to(tl.float32) - 8) * step + middle
            low = ((packed & 15).to(tl.float32) - 8) * step + middle
            taken += tl.dot(value, high.to(value.dtype), input_precision="ieee")
            odd = tl.load(x + m[:, None] * channels + k[None, :] * 2 + 1, mask=asks, other=0.0)
            taken += tl.dot(odd, low.to(value.dtype), input_precision="ieee")
    if BITS == 8:
        taken = taken * tl.load(scale + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    to = part + (tl.program_id(1) * rows + m[:, None]).to(tl.int64) * outputs + n[None, :]
    tl.store(to, taken, mask=(m[:, None] < rows) & there)
