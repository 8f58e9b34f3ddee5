"""`pack_weight` and `low_bit_linear` on a GPU.

4 bits in bfloat16: PyTorch's packed product, which has its own layout. Otherwise a Triton kernel
that dequantizes weights between memory and the matrix product. Its layouts are (out, in) int8 at 8
bits and (out, in / 2) uint8 at 4 bits, the even input channel in the upper half of the byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from std_core.kernels.shared.low_bit_format import GROUP_SIZE, PackedWeight, quantize

TARGET_PROGRAMS = 256  # with fewer output tiles than this the input channels are split too
MIN_SPLIT_CHANNELS = 512
BLOCK_N = 64


def pack_weight(weight: torch.Tensor, bits: int) -> PackedWeight:
    """See `std_core.kernels.low_bit.pack_weight`."""
    levels, scale = quantize(weight, bits)
    packed = pack_for_triton(levels, scale, bits)
    inner_k_tiles = _inner_k_tiles(weight) if bits == 4 else 0
    if not inner_k_tiles:
        return packed
    tiled = torch.ops.aten._convert_weight_to_int4pack(packed.weight, inner_k_tiles)
    return PackedWeight(tiled, scale, bits, layout="pytorch")


def pack_for_triton(levels: torch.Tensor, scale: torch.Tensor, bits: int) -> PackedWeight:
    """The Triton kernel's layout of quantized levels (out, in)."""
    if bits == 4:
        levels = levels[:, ::2].to(torch.uint8) << 4 | levels[:, 1::2].to(torch.uint8)
    return PackedWeight(levels, scale, bits, layout="triton")


def _inner_k_tiles(weight: torch.Tensor) -> int:
    """Tiles of 16 input channels that PyTorch's 4-bit product interleaves; 0: not supported."""
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16 or len(weight) % 8:
        return 0
    return next((tiles for tiles in (8, 4, 2) if weight.shape[1] % (16 * tiles) == 0), 0)


def low_bit_linear(
    x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """See `std_core.kernels.low_bit.low_bit_linear`."""
    flat = x.flatten(0, -2).contiguous()
    if packed.layout == "pytorch":
        y = torch.ops.aten._weight_int4pack_mm(flat, packed.weight, GROUP_SIZE, packed.scale)
    else:
        y = triton_product(flat, packed)
    y = y if bias is None else y + bias
    return y.unflatten(0, x.shape[:-1])


def triton_product(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """x Wᵀ by the Triton kernel; x: (rows, in), weight in layout "triton"."""
    rows, in_channels = x.shape
    out_channels = len(packed.weight)
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    row_tiles = triton.cdiv(rows, block_m)
    out_tiles = triton.cdiv(out_channels, BLOCK_N)
    wanted_splits = TARGET_PROGRAMS // (row_tiles * out_tiles)
    splits = max(1, min(wanted_splits, in_channels // MIN_SPLIT_CHANNELS))
    partial = torch.empty(splits, rows, out_channels, dtype=torch.float32, device=x.device)
    _product[(out_tiles, splits, row_tiles)](
        x_ptr=x,
        w_ptr=packed.weight,
        scale_ptr=packed.scale,
        out_ptr=partial,
        rows=rows,
        in_channels=in_channels,
        out_channels=out_channels,
        BITS=packed.bits,
        GROUP_SIZE=GROUP_SIZE,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=32 if x.dtype == torch.float32 else 64,
    )
    return partial.sum(0).to(x.dtype)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x_ptr, w_ptr, scale_ptr, out_ptr, rows, in_channels, out_channels,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Partial products of a tile of rows and output channels over one split of the input channels.

    A step reads BLOCK_K bytes of each output channel. At 4 bits a byte holds two input channels,
    which are multiplied separately.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    offs_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    PER_BYTE: tl.constexpr = 8 // BITS
    row_bytes = in_channels // PER_BYTE
    num_splits = tl.num_programs(1)
    size = ((row_bytes + num_splits - 1) // num_splits + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    begin = split * size
    end = tl.minimum(begin + size, row_bytes)
    valid_n = offs_n[None, :] < out_channels
    acc = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for start_k in range(begin, end, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        w_mask = (offs_k[:, None] < end) & valid_n
        x_mask = (offs_m[:, None] < rows) & (offs_k[None, :] < end)
        w_ptrs = w_ptr + offs_n[None, :].to(tl.int64) * row_bytes + offs_k[:, None]
        packed = tl.load(w_ptrs, mask=w_mask, other=0)
        x_ptrs = x_ptr + offs_m[:, None] * in_channels + offs_k[None, :] * PER_BYTE
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        if BITS == 8:
            acc += tl.dot(x, packed.to(tl.float32).to(x.dtype), input_precision="ieee")
        else:
            group = offs_k[:, None] * 2 // GROUP_SIZE
            scale_ptrs = scale_ptr + (group * out_channels + offs_n[None, :]) * 2
            scale = tl.load(scale_ptrs, mask=w_mask, other=0.0).to(tl.float32)
            offset = tl.load(scale_ptrs + 1, mask=w_mask, other=0.0).to(tl.float32)
            w_even = ((packed >> 4).to(tl.float32) - 8) * scale + offset
            w_odd = ((packed & 15).to(tl.float32) - 8) * scale + offset
            acc += tl.dot(x, w_even.to(x.dtype), input_precision="ieee")
            x_odd = tl.load(x_ptrs + 1, mask=x_mask, other=0.0)
            acc += tl.dot(x_odd, w_odd.to(x.dtype), input_precision="ieee")
    if BITS == 8:
        scale = tl.load(scale_ptr + offs_n, mask=offs_n < out_channels, other=0.0)
        acc = acc * scale.to(tl.float32)[None, :]
    out_rows = (split * rows + offs_m[:, None]).to(tl.int64)
    out_ptrs = out_ptr + out_rows * out_channels + offs_n[None, :]
    tl.store(out_ptrs, acc, mask=(offs_m[:, None] < rows) & valid_n)
