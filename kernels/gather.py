"""Takes the chosen entries of a cache, other ones for each KV head.

    gather_entries(cache, chosen) -> (KV heads, K, d)

cache: (KV heads, n, d), keys or values of one row and layer; chosen: (KV heads, K) places.
"""

from __future__ import annotations

import torch

from std_core.kernels.devices import TRITON


def gather_entries(cache: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    if cache.device.type in TRITON:
        from std_core.kernels.triton import gather as triton_gather

        return triton_gather.gather_entries(cache, chosen)
    return cache.gather(1, chosen[..., None].expand(-1, -1, cache.shape[-1]))
