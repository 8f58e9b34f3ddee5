"""Takes the chosen entries of a cache, other ones for each KV head.

    gather_entries(cache, chosen) -> (KV heads, K, d)

cache: (KV heads, n, d), keys or values of one row and layer; chosen: (KV heads, K) places.
"""

from __future__ import annotations

import torch


def gather_entries(cache: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return cache.gather(1, chosen[..., None].expand(-1, -1, cache.shape[-1]))
