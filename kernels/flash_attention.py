"""Dense attention with its log-sum-exp on a GPU, for prefill: PyTorch's own fused kernels, of which
the public function keeps the log-sum-exp to itself.

    flash(query, key, value, scale, causal) -> output, logsumexp
    path(dtype) -> the kernel's name, for reports

query: (1, heads, T, d); key, value: (1, heads, n, d); as many heads.
"""

from __future__ import annotations

import torch


def path(dtype: torch.dtype) -> str:
    """FlashAttention takes 16-bit numbers only."""
    return (
        "efficient attention (PyTorch)" if dtype == torch.float32 else "FlashAttention-2 (PyTorch)"
    )


def flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(1, heads, T, d), and (1, heads, T) float32."""
    if query.dtype == torch.float32:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        return out, lse[..., : query.shape[2]]  # padded to whole tiles
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, causal, scale=scale
    )
    return out, lse
