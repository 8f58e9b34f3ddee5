"""Dense attention with its log-sum-exp on a GPU, for prefill, by PyTorch's fused kernels.

    flash_attention(query, key, value, scale, causal) -> Attention
    kernel_name(dtype) -> name of the kernel, for reports

`torch.nn.functional.scaled_dot_product_attention` calls the same kernels but does not return the
log-sum-exp, so the operators below it are called here.
"""

from __future__ import annotations

import torch

from std_core.kernels.shared.segments import Attention


def kernel_name(dtype: torch.dtype) -> str:
    """Name of the kernel for a dtype. FlashAttention accepts 16-bit dtypes only."""
    if dtype == torch.float32:
        return "efficient attention (PyTorch)"
    return "FlashAttention-2 (PyTorch)"


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> Attention:
    """Attention of query (1, heads, T, d) to key and value, both (1, heads, n, d).

    Returns:
        Output (1, heads, T, d); log-sum-exp (1, heads, T), float32.
    """
    if query.dtype == torch.float32:
        output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        return Attention(output, logsumexp[..., : query.shape[2]])  # T is padded to whole tiles
    output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, causal, scale=scale
    )
    return Attention(output, logsumexp)
