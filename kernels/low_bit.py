"""Projections with 8-bit or 4-bit weights, for drafts.

    pack_weight(weight, bits) -> PackedWeight
    low_bit_linear(x, packed, bias) -> y

weight: (out, in); x: (…, in), any floating dtype; y: (…, out). `shared/low_bit_format.py` defines
the quantization.

On a CPU the C++ product is used where the instructions exist; it rounds activations to bfloat16.
Otherwise PyTorch's packed CPU products are used. On a GPU: `triton/low_bit.py`. On other devices
the weight is dequantized.
"""

from __future__ import annotations

import torch

from std_core.kernels.cpu import low_bit as cpu_low_bit
from std_core.kernels.dispatch import uses_triton
from std_core.kernels.shared.low_bit_format import GROUP_SIZE, PackedWeight, dequantize, quantize


def can_pack(weight: torch.Tensor, bits: int) -> bool:
    """Whether a packed product supports this weight's shape.

    At 4 bits PyTorch's products need whole groups of input channels and a multiple of 16 output
    channels.
    """
    whole_groups = weight.shape[1] % GROUP_SIZE == 0 and weight.shape[0] % 16 == 0
    return bits == 8 or whole_groups or cpu_low_bit.supports(weight, bits)


def pack_weight(weight: torch.Tensor, bits: int) -> PackedWeight:
    """Quantize a weight to 8 or 4 bits in the layout of this device's product."""
    if uses_triton(weight):
        from std_core.kernels.triton import low_bit as triton_low_bit

        return triton_low_bit.pack_weight(weight, bits)
    if cpu_low_bit.supports(weight, bits):
        return cpu_low_bit.pack_weight(weight, bits)
    levels, scale = quantize(weight, bits)
    if weight.device.type != "cpu":
        dense = dequantize(levels, scale, bits).to(weight.dtype)
        return PackedWeight(dense, scale, bits, layout="dense")
    if bits == 4:
        levels = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int(), 1)
    return PackedWeight(levels, scale, bits, layout="pytorch")


def low_bit_linear(
    x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """x Wᵀ + b with a packed weight."""
    if uses_triton(x):
        from std_core.kernels.triton import low_bit as triton_low_bit

        return triton_low_bit.low_bit_linear(x, packed, bias)
    flat = x.flatten(0, -2)
    if packed.layout == "cpp":
        return cpu_low_bit.low_bit_linear(flat, packed, bias).unflatten(0, x.shape[:-1])
    if packed.layout == "dense":
        y = flat @ packed.weight.T
    elif packed.bits == 8:
        y = torch.ops.aten._weight_int8pack_mm(flat, packed.weight, packed.scale)
    else:
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(
            flat, packed.weight, GROUP_SIZE, packed.scale
        )
    y = y if bias is None else y + bias
    return y.unflatten(0, x.shape[:-1])
