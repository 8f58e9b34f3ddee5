"""Projections with 8-bit or 4-bit weights, of drafts: our C++ product on a CPU that has its
instructions, which rounds activations to bfloat16; else PyTorch's own packed products on a CPU, and
plain ones elsewhere.

    pack(weight, bits) -> Packed
    low_bit_linear(x, packed, bias) -> y

weight: (out, in). 8 bits: one scale per output channel. 4 bits: one scale and offset per `GROUP`
input channels. x: (…, in), any floating type; y: (…, out)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from std_core.kernels.cpu import loader
from std_core.kernels.devices import TRITON

GROUP = 32  # input channels that share a scale at 4 bits
BLOCK = 64  # input channels that the C++ product takes at once
ROWS = 32  # output channels that are packed at a time


@dataclass(frozen=True)
class Packed:
    """Weights as the product takes them."""

    weight: torch.Tensor
    scale: (
        torch.Tensor
    )  # 8 bits: (out,); 4 bits: (groups, out, 2) with the value of level 8, C++'s (2, out, groups)
    bits: int
    by: Literal["cpp", "pytorch", "plain", "triton"] = "triton"

    @property
    def nbytes(self) -> int:
        return (
            self.weight.numel() * self.weight.element_size()
            + self.scale.numel() * self.scale.element_size()
        )


def packable(weight: torch.Tensor, bits: int) -> bool:
    """Whether a packed product takes this shape; PyTorch's with 4 bits needs whole groups, and 16
    output channels at a time."""
    fits = weight.shape[1] % GROUP == 0 and weight.shape[0] % 16 == 0
    return bits == 8 or fits or loader.serves("int4", weight)


def pack(weight: torch.Tensor, bits: int) -> Packed:
    if weight.device.type in TRITON:
        from std_core.kernels.triton import low_bit as triton_low_bit

        return triton_low_bit.pack(weight, bits)
    if loader.serves(f"int{bits}", weight):
        return _packed_for_cpp(weight, bits)
    levels, scale = levels_of(weight, bits)
    if weight.device.type == "cpu":
        stored = (
            levels
            if bits == 8
            else torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int(), 1)
        )
        return Packed(stored, scale, bits, "pytorch")
    return Packed(unpacked(levels, scale, bits).to(weight.dtype), scale, bits, "plain")


def levels_of(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, in) levels, and scales of the weight's type."""
    levels, scale = _by_rows(_levels8 if bits == 8 else _levels4, weight)
    return levels, (scale if bits == 8 else scale.transpose(0, 1).contiguous()).to(weight.dtype)


def unpacked(levels: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """(out, in) float32: what PyTorch's levels stand for."""
    if bits == 8:
        return levels.float() * scale.float()[:, None]
    step, middle = (x.transpose(0, 1)[..., None].float() for x in scale.unbind(-1))
    return ((levels.unflatten(1, (-1, GROUP)).float() - 8) * step + middle).flatten(1)


def low_bit_linear(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    if x.device.type in TRITON:
        from std_core.kernels.triton import low_bit as triton_low_bit

        return triton_low_bit.low_bit_linear(x, packed, bias)
    flat = x.flatten(0, -2)
    if packed.by == "cpp":
        return _by_cpp(flat, packed, bias).unflatten(0, x.shape[:-1])
    if packed.by == "plain":
        y = flat @ packed.weight.T
    elif packed.bits == 8:
        y = torch.ops.aten._weight_int8pack_mm(flat, packed.weight, packed.scale)
    else:
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, packed.weight, GROUP, packed.scale)
    y = y if bias is None else y + bias
    return y.unflatten(0, x.shape[:-1])


def _by_rows(
    make: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], weight: torch.Tensor
) -> list[torch.Tensor]:
    """What is made of each output channel by itself, of some at a time: what it takes on the way is
    several times a weight, and a head has hundreds of millions."""
    made: list[torch.Tensor] = []
    for at in range(0, len(weight), ROWS):
        parts = make(weight[at : at + ROWS].float())
        made = made or [part.new_empty(len(weight), *part.shape[1:]) for part in parts]
        for whole, part in zip(made, parts, strict=True):
            whole[at : at + ROWS] = part
    return made


def _levels8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax(1).clamp(min=1e-8) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


def _levels4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels, and scales (out, groups, 2)."""
    grouped = weight.unflatten(1, (-1, GROUP))
    low = grouped.amin(2)
    high = grouped.amax(2)
    step = (high - low).clamp(min=1e-8) / 15
    levels = (
        ((grouped - low[..., None]) / step[..., None])
        .round()
        .clamp(0, 15)
        .to(torch.uint8)
        .flatten(1)
    )
    return levels, torch.stack([step, low + 8 * step], dim=-1)


# ---------------------------------------------------------------------------------- the C++ product


def _packed_for_cpp(weight: torch.Tensor, bits: int) -> Packed:
    levels, scale = _by_rows(_padded8 if bits == 8 else _halves4, weight)
    return Packed(levels, scale if bits == 8 else scale.permute(2, 0, 1).contiguous(), bits, "cpp")


def _padded8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _levels8(F.pad(weight, (0, -weight.shape[1] % BLOCK)))


def _halves4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    levels, scale = _levels4(F.pad(weight, (0, -weight.shape[1] % BLOCK)))
    halves = levels.unflatten(1, (-1, 2, GROUP))
    return halves[:, :, 0] | halves[:, :, 1] << 4, scale


def _by_cpp(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    x = x.contiguous()
    scale, middle = (packed.scale, None) if packed.bits == 8 else packed.scale
    y = x.new_empty(len(x), len(scale))
    tensors = (0 if t is None else t.data_ptr() for t in (x, packed.weight, scale, middle, bias, y))
    loader.call(
        f"int{packed.bits}",
        x.dtype,
        *tensors,
        len(x),
        x.shape[1],
        len(scale),
        torch.get_num_threads(),
    )
    return y
