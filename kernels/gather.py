"""Gather of selected KV cache entries.

gather_entries(cache, indices) -> (KV heads, K, d)
"""

from __future__ import annotations

import torch

from std_core.kernels.dispatch import uses_triton


def gather_entries(cache: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Copy the selected entries of each KV head.

    Args:
        cache: (KV heads, n, d), keys or values of one row and layer.
        indices: (KV heads, K) entries to copy.

    Returns:
        (KV heads, K, d).
    """
    if uses_triton(cache):
        from std_core.kernels.triton import gather as triton_gather

        return triton_gather.gather_entries(cache, indices)
    return cache.gather(1, indices[..., None].expand(-1, -1, cache.shape[-1]))
