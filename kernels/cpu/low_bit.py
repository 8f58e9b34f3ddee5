"""`pack_weight` and `low_bit_linear` in C++ (draft_linear.cpp).

Input channels are padded to whole blocks of `BLOCK`. 8 bits: levels (out, padded), int8. 4 bits:
uint8 (out, blocks, 32); of a block of 64 channels byte i holds channel i in its lower and channel
i + 32 in its upper half. Scale and offset at 4 bits: (2, out, groups).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from std_core.kernels.cpu import loader
from std_core.kernels.shared.low_bit_format import (
    GROUP_SIZE,
    PackedWeight,
    Quantized,
    by_output_slices,
    quantize_4_bit,
    quantize_8_bit,
)

BLOCK = 64  # input channels that the product reads at once


def supports(weight: torch.Tensor, bits: int) -> bool:
    """Whether there is a product for the weight's device and dtype."""
    return loader.supports(f"int{bits}", weight)


def pack_weight(weight: torch.Tensor, bits: int) -> PackedWeight:
    """See `std_core.kernels.low_bit.pack_weight`."""
    if bits == 8:
        levels, scale = by_output_slices(_pack_8_bit, weight)
    else:
        levels, scale = by_output_slices(_pack_4_bit, weight)
        scale = scale.permute(2, 0, 1).contiguous()
    return PackedWeight(levels, scale, bits, layout="cpp")


def _pack_8_bit(weight: torch.Tensor) -> Quantized:
    return quantize_8_bit(_padded(weight))


def _pack_4_bit(weight: torch.Tensor) -> Quantized:
    levels, scale = quantize_4_bit(_padded(weight))
    halves = levels.unflatten(1, (-1, 2, GROUP_SIZE))
    return Quantized(halves[:, :, 0] | halves[:, :, 1] << 4, scale)


def _padded(weight: torch.Tensor) -> torch.Tensor:
    return F.pad(weight, (0, -weight.shape[1] % BLOCK))


def low_bit_linear(
    x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """See `std_core.kernels.low_bit.low_bit_linear`; x: (rows, in)."""
    x = x.contiguous()
    rows, channels = x.shape
    offset: torch.Tensor | None = None
    scale = packed.scale
    if packed.bits == 4:
        scale, offset = packed.scale
    y = x.new_empty(rows, len(scale))
    loader.kernel(f"int{packed.bits}", x.dtype)(
        x.data_ptr(),
        packed.weight.data_ptr(),
        scale.data_ptr(),
        0 if offset is None else offset.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        rows,
        channels,
        len(scale),
        torch.get_num_threads(),
    )
    return y
