"""Quantization of weights to 8 or 4 bits, and the record of a packed weight.

    quantize(weight, bits) -> levels, scale
    dequantize(levels, scale, bits) -> weight

8 bits: one scale per output channel, weight = level · scale. 4 bits: one scale and one offset per
`GROUP_SIZE` input channels, weight = (level - 8) · scale + offset. weight and levels: (out, in).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from std_core.kernels.shared.constants import GROUP_SIZE

_SLICE = 32  # output channels that are quantized at a time


class Quantized(NamedTuple):
    """Integer levels and the scales that map them to weights."""

    levels: torch.Tensor  # (out, in): int8 at 8 bits, uint8 in 0..15 at 4 bits
    scale: torch.Tensor  # 8 bits: (out,); 4 bits: see the function that returns it


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight in the memory layout of the product that reads it."""

    weight: torch.Tensor
    scale: (
        torch.Tensor
    )  # 8 bits: (out,); 4 bits: (groups, out, 2), in layout "cpp" (2, out, groups)
    bits: int
    layout: Literal["cpp", "pytorch", "triton", "dense"]  # dense: dequantized, no packed product

    @property
    def nbytes(self) -> int:
        """Bytes of weight and scales."""
        return sum(x.numel() * x.element_size() for x in (self.weight, self.scale))


def quantize(weight: torch.Tensor, bits: int) -> Quantized:
    """Round a weight to levels.

    Returns:
        Levels (out, in). Scales of the weight's dtype: (out,) at 8 bits, (groups, out, 2) with
        scale and offset at 4 bits.
    """
    if bits == 8:
        levels, scale = by_output_slices(quantize_8_bit, weight)
    else:
        levels, scale = by_output_slices(quantize_4_bit, weight)
        scale = scale.transpose(0, 1).contiguous()
    return Quantized(levels, scale.to(weight.dtype))


def dequantize(levels: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """The weight (out, in) that the levels represent, float32."""
    if bits == 8:
        return levels.float() * scale.float()[:, None]
    step, offset = (x.transpose(0, 1)[..., None].float() for x in scale.unbind(-1))
    grouped = levels.unflatten(1, (-1, GROUP_SIZE)).float()
    return ((grouped - 8) * step + offset).flatten(1)


def by_output_slices(
    quantizer: Callable[[torch.Tensor], Quantized], weight: torch.Tensor
) -> Quantized:
    """Apply a quantizer to a few output channels at a time, which bounds its memory.

    Quantizing needs several times the memory of its input, and an output head has hundreds of
    millions of weights.
    """
    results: Quantized | None = None
    for start in range(0, len(weight), _SLICE):
        part = quantizer(weight[start : start + _SLICE].float())
        if results is None:
            results = Quantized(*(x.new_empty(len(weight), *x.shape[1:]) for x in part))
        results.levels[start : start + _SLICE] = part.levels
        results.scale[start : start + _SLICE] = part.scale
    assert results is not None, "the weight has no output channels"
    return results


def quantize_8_bit(weight: torch.Tensor) -> Quantized:
    """Levels in -127..127 (out, in) and scales (out,) of a float32 weight."""
    scale = weight.abs().amax(1).clamp(min=1e-8) / 127
    return Quantized((weight / scale[:, None]).round().to(torch.int8), scale)


def quantize_4_bit(weight: torch.Tensor) -> Quantized:
    """Levels in 0..15 (out, in), and scale and offset (out, groups, 2), of a float32 weight."""
    grouped = weight.unflatten(1, (-1, GROUP_SIZE))
    low = grouped.amin(2)
    high = grouped.amax(2)
    step = (high - low).clamp(min=1e-8) / 15
    levels = ((grouped - low[..., None]) / step[..., None]).round().clamp(0, 15)
    return Quantized(levels.to(torch.uint8).flatten(1), torch.stack([step, low + 8 * step], dim=-1))
