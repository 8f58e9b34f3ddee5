"""`attend_rows`, `attend_chunk` and `write_rows` in C++ (attention.cpp)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from std_core.kernels.cpu import loader
from std_core.kernels.shared.segments import Attention, PrefixGroups, Segment


def available(query: torch.Tensor) -> bool:
    """Whether there are kernels for the query's device, dtype and head size."""
    return loader.supports("attend_rows", query) and query.shape[3] % 32 == 0


def supports(query: torch.Tensor, segments: Iterable[Segment]) -> bool:
    """Whether the kernels accept these tensors: entries of a head must be contiguous."""
    return available(query) and all(
        x.stride(3) == 1 and x.stride(2) == x.shape[3] and x.dtype == query.dtype
        for segment in segments
        for x in segment
    )


def supports_write(cache: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether `write_rows` accepts these tensors."""
    return (
        loader.supports("write_rows", cache)
        and new.dtype == cache.dtype
        and new.stride(3) == 1
        and cache.stride(3) == 1
    )


def attend_rows(
    query: torch.Tensor,
    own: Segment,
    lengths: torch.Tensor,
    prefix: Segment | None,
    groups: PrefixGroups | None,
    scale: float,
) -> Attention:
    """See `std_core.kernels.attention.attend_rows`. Keys and values have the same strides."""
    query = query.contiguous()
    rows, heads, width, dim = query.shape
    output = torch.empty_like(query)
    logsumexp = query.new_empty(rows, heads, width, dtype=torch.float32)
    prefix_key = prefix_value = prefix_stride = prefix_head_stride = 0
    prefix_of_row = prefix_lengths = prefixes = 0
    if prefix is not None and groups is not None:
        prefix_key = prefix.key.data_ptr()
        prefix_value = prefix.value.data_ptr()
        prefix_stride = prefix.key.stride(0)
        prefix_head_stride = prefix.key.stride(1)
        prefix_of_row = groups.prefix_of_row.data_ptr()
        prefix_lengths = groups.prefix_lengths.data_ptr()
        prefixes = len(groups.prefix_lengths)
    loader.kernel("attend_rows", query.dtype)(
        query.data_ptr(),
        own.key.data_ptr(),
        own.value.data_ptr(),
        own.key.stride(0),
        own.key.stride(1),
        prefix_key,
        prefix_value,
        prefix_stride,
        prefix_head_stride,
        lengths.data_ptr(),
        prefix_of_row,
        prefix_lengths,
        rows,
        heads,
        own.key.shape[1],
        width,
        dim,
        prefixes,
        scale,
        output.data_ptr(),
        logsumexp.data_ptr(),
        torch.get_num_threads(),
    )
    return Attention(output, logsumexp)


def attend_chunk(query: torch.Tensor, segments: list[Segment], scale: float) -> Attention:
    """See `std_core.kernels.attention.attend_chunk`; the chunk itself is the last segment."""
    query = query.contiguous()
    _, heads, width, dim = query.shape
    output = torch.empty_like(query)
    logsumexp = query.new_empty(1, heads, width, dtype=torch.float32)
    # an array of the struct ChunkSegment in attention.cpp: four 64-bit fields each
    table = torch.tensor(
        [(k.data_ptr(), v.data_ptr(), k.stride(1), k.shape[2]) for k, v in segments],
        dtype=torch.int64,
    )
    loader.kernel("attend_chunk", query.dtype)(
        query.data_ptr(),
        table.data_ptr(),
        len(segments),
        heads,
        segments[0].key.shape[1],
        width,
        dim,
        scale,
        output.data_ptr(),
        logsumexp.data_ptr(),
        torch.get_num_threads(),
    )
    return Attention(output, logsumexp)


def write_rows(cache: torch.Tensor, lengths: torch.Tensor, new: torch.Tensor) -> None:
    """See `std_core.kernels.attention.write_rows`."""
    rows, kv_heads, width, dim = new.shape
    loader.kernel("write_rows", cache.dtype)(
        new.data_ptr(),
        new.stride(0),
        new.stride(1),
        new.stride(2),
        cache.data_ptr(),
        cache.stride(0),
        cache.stride(1),
        lengths.data_ptr(),
        rows,
        kv_heads,
        width,
        dim,
    )
