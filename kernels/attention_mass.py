"""Attention mass of text tokens on visual tokens, the score for KV selection.

    attention_mass(query, key, logsumexp, scale) -> mass

Sparse-to-Dense §3.2 keeps the visual entries with the largest mass.
"""

from __future__ import annotations

import torch

from std_core.kernels.dispatch import uses_triton


def attention_mass(
    query: torch.Tensor, key: torch.Tensor, logsumexp: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax weights of visual tokens: mean over text tokens, sum over a KV head's query heads.

    On a CPU the (text tokens × visual tokens) scores of one layer are stored.

    Args:
        query: (…, query heads, text tokens, d), after RoPE.
        key: (…, KV heads, visual tokens, d), after RoPE.
        logsumexp: (…, query heads, text tokens), of all scores of a text token, as attention
            returns it.
        scale: factor of the scores.

    Returns:
        (…, KV heads, visual tokens), float32.
    """
    if uses_triton(query):
        from std_core.kernels.triton import attention_mass as triton_attention_mass

        return triton_attention_mass.attention_mass(query, key, logsumexp, scale)
    text_tokens = query.shape[-2]
    kv_heads = key.shape[-3]
    packed = query.unflatten(-3, (kv_heads, -1)).flatten(-3, -2)
    packed_logsumexp = logsumexp.unflatten(-2, (kv_heads, -1)).flatten(-2)
    # scaled before the product, which could overflow in float16
    scores = (packed * scale @ key.transpose(-1, -2)).float()
    weights = scores.sub_(packed_logsumexp[..., None]).exp_()
    return weights.sum(-2) / text_tokens
