"""Placement of a model's layers on several devices of one process, for accelerate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def decoder_layer_names(hf: Any) -> list[str]:
    """Return the names of the text stack's layers in the whole model, in order."""
    names = {id(module): name for name, module in hf.named_modules()}
    return [names[id(layer)] for layer in hf.get_decoder().layers]


def layer_device_map(hf: Any, devices: Sequence[str]) -> dict[str, str]:
    """Make a device map with equally many layers per device, in order.

    All other modules (vision tower, embedding, norm, head) go to the first device, so that tokens
    are embedded and sampled there.

    Raises:
        ValueError: there are more devices than layers.
    """
    layers = decoder_layer_names(hf)
    if len(devices) > len(layers):
        raise ValueError(f"{len(layers)} layers cannot be spread over {len(devices)} devices")
    device_map = {
        layer: devices[index * len(devices) // len(layers)] for index, layer in enumerate(layers)
    }
    others = [name for name, _ in hf.named_modules() if name and not _overlaps(name, layers)]
    outermost = [name for name in others if not any(name.startswith(f"{o}.") for o in others)]
    return device_map | dict.fromkeys(outermost, devices[0])


def _overlaps(name: str, layers: Sequence[str]) -> bool:
    """Whether a module is a layer, is part of one, or contains one."""
    return any(
        layer == name or layer.startswith(f"{name}.") or name.startswith(f"{layer}.")
        for layer in layers
    )
