"""Attention over ragged KV caches, for decode steps and for chunked prefill.

    attend_rows(query, own, lengths, prefix, groups, scale, fixed) -> Attention
    attend_chunk(query, past, new, scale) -> Attention
    write_rows(cache, lengths, new)

`attend_rows` is a decode step: T = 1..32 new tokens of every row. Each row attends to two segments:
a prefix that rows may share, and the row's own entries. `attend_chunk` is one chunk of one prompt's
prefill.

Each segment is attended separately, and the results are merged by their log-sum-exps. The query
heads of a KV head, and the rows that share a prefix, are packed into one matrix product, so that
keys and values are read once for all of them.

Shapes: query (B, query heads, T, d); the segments' keys and values (rows or prefixes, KV heads,
capacity, d). Token t of row b attends to its whole prefix and to its own entries
[0, lengths[b] + t].

With `fixed`, the result of a token is bitwise the same whatever the other rows are and at whichever
of the T positions the token stands: segments are reduced in whole splits of `SPLIT_SIZE` entries
from their start, and no shape depends on the lengths.
"""

from __future__ import annotations

import torch

from std_core.kernels import flash_attention
from std_core.kernels.cpu import attention as cpu_attention
from std_core.kernels.dispatch import uses_triton
from std_core.kernels.shared.constants import SPLIT_SIZE
from std_core.kernels.shared.segments import Attention, PrefixGroups, Segment


def attend_rows(
    query: torch.Tensor,
    own: Segment,
    lengths: torch.Tensor,
    prefix: Segment | None,
    groups: PrefixGroups | None,
    scale: float,
    fixed: bool = False,
) -> Attention:
    """Attention of T new tokens per row over the rows' prefixes and own entries.

    Args:
        query: (B, query heads, T, d).
        own: (B, KV heads, capacity, d); already holds the T new tokens.
        lengths: (B,) entries of `own` before the new tokens.
        prefix: (prefixes, KV heads, capacity, d); None if no row has a prefix.
        groups: assignment of rows to prefixes; None if no row has a prefix.
        scale: factor of the scores, usually d ** -0.5.
        fixed: make each token's result independent of the rest of the batch, bit for bit. The
            capacities must be multiples of `SPLIT_SIZE`.

    Returns:
        Output (B, query heads, T, d); log-sum-exp (B, query heads, T), float32.
    """
    if uses_triton(query):
        from std_core.kernels.triton import attention as triton_attention

        return triton_attention.attend_rows(
            query, own, lengths, prefix, groups=groups, scale=scale, fixed=fixed
        )
    if groups is None or not len(groups.members):
        prefix = None
    segments = [own] if prefix is None else [own, prefix]
    if cpu_attention.supports(query, segments):  # meets the contract of `fixed` in any case
        return cpu_attention.attend_rows(query, own, lengths, prefix, groups=groups, scale=scale)
    return _attend_rows(query, own, lengths, prefix, groups=groups, scale=scale, fixed=fixed)


def attend_chunk(query: torch.Tensor, past: list[Segment], new: Segment, scale: float) -> Attention:
    """Attention of a prefill chunk of T tokens of one prompt.

    Args:
        query: (1, query heads, T, d).
        past: segments that all T tokens see whole, each (1, KV heads, entries, d).
        new: the chunk's own entries, (1, KV heads, T, d), attended causally.
        scale: factor of the scores.

    Returns:
        Output (1, query heads, T, d); log-sum-exp (1, query heads, T), float32.
    """
    past = [segment for segment in past if segment.key.shape[2]]
    if cpu_attention.available(query):
        segments = [*past, Segment(new.key.contiguous(), new.value.contiguous())]
        if cpu_attention.supports(query, segments):
            return cpu_attention.attend_chunk(query, segments, scale)
    heads = query.shape[1]
    kv_heads = new.key.shape[1]
    repeated = Segment(*(x.repeat_interleave(heads // kv_heads, 1) for x in new))
    merged = _attend_segment(query, repeated, bias=None, scale=scale, causal=True)
    packed = query.reshape(1, kv_heads, -1, query.shape[3])
    for segment in past:
        output, logsumexp = _attend_segment(packed, segment, bias=None, scale=scale)
        other = Attention(output.reshape(query.shape), logsumexp.reshape(query.shape[:3]))
        merged = merge_partials(merged, other)
    return merged


def write_rows(cache: torch.Tensor, lengths: torch.Tensor, new: torch.Tensor) -> None:
    """Write T entries per row behind its first `lengths` entries, in place.

    Args:
        cache: (B, KV heads, capacity, d), keys or values.
        lengths: (B,) entries that each row has already, int64.
        new: (B, KV heads, T, d), of the cache's dtype.

    Raises:
        TypeError: the dtypes differ, so the kernel would read or write past the end of a tensor.
    """
    if cache.dtype != new.dtype or lengths.dtype != torch.int64:
        raise TypeError(
            f"write_rows takes entries of the cache's dtype and lengths of int64; the cache is"
            f" {cache.dtype}, the entries {new.dtype}, the lengths {lengths.dtype}"
        )
    if cpu_attention.supports_write(cache, new):
        cpu_attention.write_rows(cache, lengths, new)
        return
    rows, _, width, _ = new.shape
    row_index = torch.arange(rows, device=lengths.device)[:, None]
    entry_index = lengths[:, None] + torch.arange(width, device=lengths.device)
    cache[row_index, :, entry_index] = new.transpose(1, 2)


def merge_partials(first: Attention, second: Attention) -> Attention:
    """Combine attention over two disjoint sets of entries as if it were one softmax.

    A set without entries has the log-sum-exp -inf.
    """
    logsumexp = torch.logaddexp(first.logsumexp, second.logsumexp)
    output = _weighted(first, logsumexp) + _weighted(second, logsumexp)
    return Attention(output, logsumexp)


def _weighted(part: Attention, total: torch.Tensor) -> torch.Tensor:
    """A partial output times its share of the whole softmax."""
    share = (part.logsumexp - total).exp()[..., None]
    return part.output * share.to(part.output.dtype)


def implementation_name(dtype: torch.dtype, device: torch.device, head_dim: int) -> str:
    """Name of the implementation that `attend_rows` selects, for reports."""
    probe = torch.empty(1, 1, 1, head_dim, dtype=dtype, device=device)
    if uses_triton(probe):
        return "kernels/triton/attention.py"
    if cpu_attention.supports(probe, [Segment(probe, probe)]):
        return "kernels/cpu/attention.cpp"
    return "PyTorch's fused attention" if device.type == "cpu" else "PyTorch's products"


# ----------------------------------------------------------------------------------------- PyTorch


def _attend_rows(
    query: torch.Tensor,
    own: Segment,
    lengths: torch.Tensor,
    prefix: Segment | None,
    groups: PrefixGroups | None,
    scale: float,
    fixed: bool,
) -> Attention:
    """`attend_rows` in PyTorch's operations."""
    rows, heads, width, dim = query.shape
    kv_heads = own.key.shape[1]
    heads_per_kv = heads // kv_heads
    packed = query.reshape(rows, kv_heads, heads_per_kv * width, dim)
    newest = lengths[:, None] + torch.arange(width, device=query.device)  # (B, T)
    merged = _attend_masked(packed, own, newest.repeat(1, heads_per_kv), scale, fixed=fixed)
    if prefix is not None and groups is not None:
        shared = _attend_prefixes(packed, prefix, groups, scale, fixed=fixed)
        merged = merge_partials(merged, shared)
    return Attention(
        merged.output.reshape(rows, heads, width, dim), merged.logsumexp.reshape(rows, heads, width)
    )


def _attend_prefixes(
    packed: torch.Tensor, prefix: Segment, groups: PrefixGroups, scale: float, fixed: bool
) -> Attention:
    """Attention of packed queries (B, KV heads, M, d) to their rows' prefixes."""
    _, kv_heads, _, dim = packed.shape
    prefixes, rows_per_prefix = groups.members.shape
    grouped = packed[groups.members].transpose(1, 2).reshape(prefixes, kv_heads, -1, dim)
    last_visible = (groups.prefix_lengths - 1)[:, None].expand(-1, grouped.shape[2])
    in_use = Segment(prefix.key[:prefixes], prefix.value[:prefixes])
    attended = _attend_masked(grouped, in_use, last_visible, scale, fixed=fixed)

    prefix_index = groups.prefix_of_row.clamp(min=0)

    def of_rows(x: torch.Tensor) -> torch.Tensor:
        """(prefixes, KV heads, rows × M, …) to (B, KV heads, M, …)."""
        split = x.view(prefixes, kv_heads, rows_per_prefix, -1, *x.shape[3:])
        return split[prefix_index, :, groups.index_in_group]

    without_prefix = (groups.prefix_of_row < 0)[:, None, None]
    logsumexp = of_rows(attended.logsumexp).masked_fill(without_prefix, float("-inf"))
    return Attention(of_rows(attended.output), logsumexp)


def _attend_masked(
    query: torch.Tensor, segment: Segment, last_visible: torch.Tensor, scale: float, fixed: bool
) -> Attention:
    """Attention of each query to the entries [0, last_visible] of a segment.

    Args:
        query: (N, KV heads, M, d).
        segment: (N, KV heads, capacity, d).
        last_visible: (N, M), -1 for queries that see no entry.
        scale: factor of the scores.
        fixed: round the entries up to whole splits. Masked splits change no bit of a result.
    """
    entries = max(int(last_visible.max()) + 1, 1)
    if fixed:
        entries = -(-entries // SPLIT_SIZE) * SPLIT_SIZE
    visible = torch.arange(entries, device=query.device) <= last_visible[..., None]
    bias = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
    bias.masked_fill_(~visible, float("-inf"))
    used = Segment(segment.key[:, :, :entries], segment.value[:, :, :entries])
    output, logsumexp = _attend_segment(query, used, bias=bias[:, None], scale=scale)
    return Attention(output, logsumexp.masked_fill((last_visible < 0)[:, None], float("-inf")))


def _attend_segment(
    query: torch.Tensor,
    segment: Segment,
    bias: torch.Tensor | None,
    scale: float,
    causal: bool = False,
) -> Attention:
    """Attention to one segment by PyTorch's fused kernel where there is one.

    Args:
        query: (N, heads, M, d).
        segment: (N, heads, entries, d).
        bias: (N, 1, M, entries), added to the scores; None for none.
        scale: factor of the scores.
        causal: query m sees the entries [0, m].
    """
    key, value = segment
    if query.device.type == "cpu":
        # the public `scaled_dot_product_attention` does not return the log-sum-exp
        output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=bias, scale=scale
        )
        return Attention(output, logsumexp)
    if query.device.type == "cuda" and bias is None:
        return flash_attention.flash_attention(query, key, value, scale=scale, causal=causal)
    # scaled before the product, which could overflow in float16
    scores = (query * scale @ key.transpose(-1, -2)).float()
    if causal:
        bias = torch.full(scores.shape[-2:], float("-inf"), device=query.device).triu(1)
    if bias is not None:
        scores = scores + bias
    logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp[..., None]).exp().nan_to_num(0.0)  # NaN: no entry is visible
    return Attention(weights.to(value.dtype) @ value, logsumexp)
