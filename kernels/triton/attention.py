"""`attend_rows` in Triton: split-KV attention with packed query heads.

A program computes one tile of packed queries over one split of one segment. The queries packed
together are those that read the same keys: the query heads of a KV head, the T tokens of a row and,
over a prefix, all rows that share it. A second kernel merges the splits of both segments by their
log-sum-exps.

The grid covers the capacity of the caches, and the kernels read the used lengths on the device.
Hence no launch waits for a length, and all of them can be captured in a CUDA graph. The size of a
split is the used length divided by the number of splits or, with `fixed`, `SPLIT_SIZE` entries
counted from the segment's start.

With `fixed`, the operations that compute a token's output, and their order, depend only on its own
query and on the entries it attends to: not on its slot, its position among the T tokens, other
rows, or the capacity of the caches. Its bits are then the same in every batch of this shape,
provided that `tl.dot` sums every row of a tile in the same order. Tensor cores do. Triton's
interpreter does not guarantee it, since it calls the BLAS library.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from std_core.kernels.shared.constants import SPLIT_SIZE
from std_core.kernels.shared.segments import Attention, PrefixGroups, Segment

TARGET_PROGRAMS = 512  # programs that occupy a GPU: two to four per multiprocessor
MIN_SPLIT_SIZE = 128  # with shorter splits the merge costs more than the parallelism gains
LOG2_E = 1.4426950408889634  # the hardware's exponential is exp2


def attend_rows(
    query: torch.Tensor,
    own: Segment,
    lengths: torch.Tensor,
    prefix: Segment | None,
    groups: PrefixGroups | None,
    scale: float,
    fixed: bool = False,
) -> Attention:
    """See `std_core.kernels.attention.attend_rows`."""
    rows, heads, width, _ = query.shape
    queries = heads // own.key.shape[1] * width
    split_size = SPLIT_SIZE if fixed else 0
    launches = [
        _plan_launch(
            own,
            lengths,
            groups=None,
            count=rows,
            active=rows,
            queries=queries,
            split_size=split_size,
        )
    ]
    prefix_of_row = None
    if prefix is not None and groups is not None and len(groups.members) > 0:
        launches.append(
            _plan_prefix_launch(prefix, groups, rows=rows, queries=queries, split_size=split_size)
        )
        prefix_of_row = groups.prefix_of_row
    partials = _Partials.empty(query, num_splits=[launch.num_splits for launch in launches])
    first_split = 0
    for launch in launches:
        launch.run(query, scale, partials, first_split)
        first_split += launch.num_splits
    return _merge(partials, prefix_of_row, query.dtype)


@dataclass(frozen=True)
class _Partials:
    """Attention of every token and head over every split, own entries first; float32."""

    output: torch.Tensor  # (rows, query heads, T, splits, d), normalized within the split
    logsumexp: torch.Tensor  # (rows, query heads, T, splits)
    own_splits: int

    @classmethod
    def empty(cls, query: torch.Tensor, num_splits: list[int]) -> _Partials:
        rows, heads, width, dim = query.shape
        shape = (rows, heads, width, sum(num_splits))
        return cls(
            output=torch.empty(*shape, dim, dtype=torch.float32, device=query.device),
            logsumexp=torch.empty(shape, dtype=torch.float32, device=query.device),
            own_splits=num_splits[0],
        )


@dataclass(frozen=True)
class _Launch:
    """How one segment is divided into tiles and splits."""

    segment: Segment
    lengths: torch.Tensor  # (rows or prefixes,)
    groups: PrefixGroups | None  # None for the rows' own entries
    count: int  # rows or prefixes; the store may hold more prefixes than are in use
    num_tiles: int  # of the packed queries
    num_splits: int
    split_size: int  # entries; 0: used length / num_splits
    block_m: int  # queries of a tile
    block_n: int  # entries of a step

    def run(self, query: torch.Tensor, scale: float, partials: _Partials, first_split: int) -> None:
        """Write the partial results of this segment's splits."""
        key, value = (_dense_last_dim(x) for x in self.segment)
        query = _dense_last_dim(query)
        _, heads, width, dim = query.shape
        kv_heads = key.shape[1]
        groups = self.groups
        # without groups these three pointers are not read
        members = groups.members if groups is not None else self.lengths
        prefix_of_row = groups.prefix_of_row if groups is not None else self.lengths
        index_in_group = groups.index_in_group if groups is not None else self.lengths
        _attend_split[(self.num_tiles * self.num_splits, kv_heads, self.count)](
            q_ptr=query,
            k_ptr=key,
            v_ptr=value,
            lengths_ptr=self.lengths,
            members_ptr=members,
            prefix_of_row_ptr=prefix_of_row,
            index_in_group_ptr=index_in_group,
            out_ptr=partials.output,
            lse_ptr=partials.logsumexp,
            qk_scale=scale * LOG2_E,
            stride_qb=query.stride(0),
            stride_qh=query.stride(1),
            stride_qt=query.stride(2),
            stride_kb=key.stride(0),
            stride_kh=key.stride(1),
            stride_kn=key.stride(2),
            stride_vb=value.stride(0),
            stride_vh=value.stride(1),
            stride_vn=value.stride(2),
            num_splits=self.num_splits,
            first_split=first_split,
            total_splits=partials.logsumexp.shape[-1],
            WIDTH=width,
            HEADS_PER_KV=heads // kv_heads,
            ROWS_PER_PREFIX=groups.members.shape[1] if groups is not None else 0,
            HEAD_DIM=dim,
            SPLIT_SIZE=self.split_size,
            NUM_TILES=self.num_tiles,
            BLOCK_M=self.block_m,
            BLOCK_N=self.block_n,
            BLOCK_D=max(16, triton.next_power_of_2(dim)),
            num_warps=8 if self.block_m == 128 else 4,
            num_stages=2,
        )


def _plan_prefix_launch(
    prefix: Segment, groups: PrefixGroups, rows: int, queries: int, split_size: int
) -> _Launch:
    prefixes, rows_per_prefix = groups.members.shape
    return _plan_launch(
        prefix,
        groups.prefix_lengths,
        groups=groups,
        count=prefixes,
        # one prefix has `rows_per_prefix` rows, so the other rows use at most one prefix each
        active=min(prefixes, rows - rows_per_prefix + 1),
        queries=rows_per_prefix * queries,
        split_size=split_size,
    )


def _plan_launch(
    segment: Segment,
    lengths: torch.Tensor,
    groups: PrefixGroups | None,
    count: int,
    active: int,
    queries: int,
    split_size: int,
) -> _Launch:
    """Choose tiles and splits of a segment.

    Args:
        segment: keys and values.
        lengths: entries in use.
        groups: for prefixes.
        count: rows or prefixes in the grid.
        active: at most so many of them have entries to attend to.
        queries: packed queries of each.
        split_size: entries of a split; 0: derived from the used length.
    """
    # float32 products are plain multiply-adds, and a larger tile would not fit the registers
    float32 = segment.key.dtype == torch.float32
    block_m = min(max(16, triton.next_power_of_2(queries)), 32 if float32 else 128)
    num_tiles = triton.cdiv(queries, block_m)
    _, kv_heads, capacity, _ = segment.key.shape
    if split_size:
        num_splits = triton.cdiv(capacity, split_size)
    else:
        by_programs = TARGET_PROGRAMS // (active * kv_heads * num_tiles)
        num_splits = min(by_programs, triton.cdiv(capacity, MIN_SPLIT_SIZE))
    return _Launch(
        segment=segment,
        lengths=lengths,
        groups=groups,
        count=count,
        num_tiles=num_tiles,
        num_splits=max(1, num_splits),
        split_size=split_size,
        block_m=block_m,
        block_n=32 if float32 else 64,
    )


def _dense_last_dim(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _merge(
    partials: _Partials, prefix_of_row: torch.Tensor | None, dtype: torch.dtype
) -> Attention:
    rows, heads, width, total_splits, dim = partials.output.shape
    device = partials.output.device
    output = torch.empty(rows, heads, width, dim, dtype=dtype, device=device)
    logsumexp = torch.empty(rows, heads, width, dtype=torch.float32, device=device)
    _merge_splits[(rows * heads * width,)](
        part_ptr=partials.output,
        part_lse_ptr=partials.logsumexp,
        prefix_of_row_ptr=partials.logsumexp if prefix_of_row is None else prefix_of_row,
        out_ptr=output,
        lse_ptr=logsumexp,
        own_splits=partials.own_splits,
        total_splits=total_splits,
        TOKENS_PER_ROW=heads * width,
        HAS_PREFIX=prefix_of_row is not None,
        HEAD_DIM=dim,
        BLOCK_S=16,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        num_warps=4,
    )
    return Attention(output, logsumexp)


@triton.jit(do_not_specialize=["num_splits", "first_split", "total_splits"])
def _attend_split(
    q_ptr, k_ptr, v_ptr, lengths_ptr, members_ptr, prefix_of_row_ptr, index_in_group_ptr,
    out_ptr, lse_ptr, qk_scale,
    stride_qb, stride_qh, stride_qt,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    num_splits, first_split, total_splits,
    WIDTH: tl.constexpr, HEADS_PER_KV: tl.constexpr, ROWS_PER_PREFIX: tl.constexpr,
    HEAD_DIM: tl.constexpr, SPLIT_SIZE: tl.constexpr, NUM_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of packed queries to one split of one segment.

    ROWS_PER_PREFIX is 0 for the rows' own entries. SPLIT_SIZE is 0 if the used length is divided
    by the number of splits.
    """
    tile = tl.program_id(0) % NUM_TILES  # neighbouring programs read the same keys
    split = tl.program_id(0) // NUM_TILES
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    token = offs_m % WIDTH
    head = kv_head * HEADS_PER_KV + (offs_m % (HEADS_PER_KV * WIDTH)) // WIDTH
    length = tl.load(lengths_ptr + segment)
    if ROWS_PER_PREFIX > 0:
        index = offs_m // (HEADS_PER_KV * WIDTH)
        valid_index = index < ROWS_PER_PREFIX
        row = tl.load(members_ptr + segment * ROWS_PER_PREFIX + index, mask=valid_index, other=0)
        # unoccupied slots of `members` hold row 0: check that the row is really assigned here
        is_member = tl.load(prefix_of_row_ptr + row) == segment
        valid_m = valid_index & is_member & (tl.load(index_in_group_ptr + row) == index)
        used = length
        last_visible = offs_m * 0 + length - 1
    else:
        row = offs_m * 0 + segment
        valid_m = offs_m < HEADS_PER_KV * WIDTH
        used = length + WIDTH
        last_visible = length + token
    size = SPLIT_SIZE
    if SPLIT_SIZE == 0:
        size = ((used + num_splits - 1) // num_splits + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    begin = split * size
    end = tl.minimum(begin + size, used)
    any_valid = tl.max(valid_m.to(tl.int32), 0) > 0
    end = tl.where(any_valid, end, begin)  # a tile without queries reads no entry

    row = row.to(tl.int64)
    q_ptrs = (
        q_ptr
        + row[:, None] * stride_qb
        + head[:, None] * stride_qh
        + token[:, None] * stride_qt
        + offs_d[None, :]
    )
    q = tl.load(q_ptrs, mask=valid_m[:, None] & (offs_d[None, :] < HEAD_DIM), other=0.0)
    k_base = k_ptr + segment.to(tl.int64) * stride_kb + kv_head * stride_kh
    v_base = v_ptr + segment.to(tl.int64) * stride_vb + kv_head * stride_vh
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    for start_n in range(begin, end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        valid_n = offs_n < end
        k = tl.load(
            k_base + offs_n[None, :] * stride_kn + offs_d[:, None],
            mask=valid_n[None, :] & (offs_d[:, None] < HEAD_DIM),
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision="ieee") * qk_scale
        visible = valid_n[None, :] & (offs_n[None, :] <= last_visible[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # no entry was visible yet
        p = tl.exp2(scores - m_safe[:, None])
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = tl.load(
            v_base + offs_n[:, None] * stride_vn + offs_d[None, :],
            mask=valid_n[:, None] & (offs_d[None, :] < HEAD_DIM),
            other=0.0,
        )
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m_i = m_new

    nonempty = l_i > 0
    l_safe = tl.where(nonempty, l_i, 1.0)
    token_index = (row * tl.num_programs(1) * HEADS_PER_KV + head) * WIDTH + token
    part = token_index * total_splits + first_split + split
    lse = (m_i + tl.log2(l_safe)) * 0.6931471805599453  # ln 2
    tl.store(lse_ptr + part, tl.where(nonempty, lse, float("-inf")), mask=valid_m)
    tl.store(
        out_ptr + part[:, None] * HEAD_DIM + offs_d[None, :],
        acc / l_safe[:, None],
        mask=(valid_m & nonempty)[:, None] & (offs_d[None, :] < HEAD_DIM),
    )


@triton.jit(do_not_specialize=["own_splits", "total_splits"])
def _merge_splits(
    part_ptr, part_lse_ptr, prefix_of_row_ptr, out_ptr, lse_ptr, own_splits, total_splits,
    TOKENS_PER_ROW: tl.constexpr, HAS_PREFIX: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge all splits of one token and head: first those of its own segment, then its prefix's.

    Each segment is summed from its own start in blocks of BLOCK_S, so that splits behind the used
    length change no bit of the result.
    """
    token_index = tl.program_id(0).to(tl.int64)
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_D)
    lse_base = part_lse_ptr + token_index * total_splits
    end = total_splits
    if HAS_PREFIX:
        has_prefix = tl.load(prefix_of_row_ptr + token_index // TOKENS_PER_ROW) >= 0
        end = tl.where(has_prefix, total_splits, own_splits)
    m_i = float("-inf")
    for start in range(0, end, BLOCK_S):
        offs = start + offs_s
        lse = tl.load(lse_base + offs, mask=offs < end, other=float("-inf"))
        m_i = tl.maximum(m_i, tl.max(lse, 0))
    l_i = 0.0
    acc = tl.full([BLOCK_D], 0.0, tl.float32)
    for start in range(0, own_splits, BLOCK_S):
        offs = start + offs_s
        lse = tl.load(lse_base + offs, mask=offs < own_splits, other=float("-inf"))
        weight = tl.exp(lse - m_i)
        part_ptrs = part_ptr + (token_index * total_splits + offs)[:, None] * HEAD_DIM
        mask = (weight > 0)[:, None] & (offs_d[None, :] < HEAD_DIM)
        part = tl.load(part_ptrs + offs_d[None, :], mask=mask, other=0.0)
        acc += tl.sum(weight[:, None] * part, 0)
        l_i += tl.sum(weight, 0)
    for start in range(own_splits, end, BLOCK_S):
        offs = start + offs_s
        lse = tl.load(lse_base + offs, mask=offs < end, other=float("-inf"))
        weight = tl.exp(lse - m_i)
        part_ptrs = part_ptr + (token_index * total_splits + offs)[:, None] * HEAD_DIM
        mask = (weight > 0)[:, None] & (offs_d[None, :] < HEAD_DIM)
        part = tl.load(part_ptrs + offs_d[None, :], mask=mask, other=0.0)
        acc += tl.sum(weight[:, None] * part, 0)
        l_i += tl.sum(weight, 0)
    tl.store(out_ptr + token_index * HEAD_DIM + offs_d, acc / l_i, mask=offs_d < HEAD_DIM)
    tl.store(lse_ptr + token_index, m_i + tl.log(l_i))
