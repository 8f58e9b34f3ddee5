"""`attend_rows` on a GPU: split-KV attention whose tile packs the query heads of a KV head, the T
tokens of a row and, under a prefix, the rows that share it.

    attend_rows(query, own, lengths, prefix, groups, scale, fixed) -> output, logsumexp
    attend_blocks(query, own, lengths, prefix, groups, scale, block) -> output, logsumexp, of each
    block of the prefix

Shapes are those of `attention.py`. Both segments write their partial results, one per split, into
one buffer, which a second kernel merges by log-sum-exp. The grid covers the caches' capacity; what
is used of them is read on the device, so no step waits for a length and every launch can be
captured in a CUDA graph. Splits have a size either of the used length over their number, or
(`fixed`, blocks) of so many entries from the segment's start, whatever is used.

With `fixed`, which operations a token's output goes through, and in which order, depends only on
its own query and on the entries that it attends to: not on its slot, its index in the width, other
rows, or the capacity of the caches. Its bits then are the same in every batch of this shape,
provided that `tl.dot` computes each row of a tile in the same order. Tensor cores do. Triton's
interpreter does not promise it: it calls the BLAS library."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from std_core.kernels.attention import SPLIT, Groups, Segment

PROGRAMS = 512  # what keeps a GPU busy: two to four of them on each multiprocessor
SMALLEST = 128  # entries of a split below which splitting costs more than it gives


def attend_rows(
    query: torch.Tensor,
    own: Segment,
    lengths: torch.Tensor,
    prefix: Segment | None,
    groups: Groups | None,
    scale: float,
    fixed: bool = False,
) -> Segment:
    """See `attention.attend_rows`."""
    return _attend(
        query, own, lengths, prefix, groups=groups, scale=scale, step=SPLIT if fixed else 0
    )[:2]


def attend_blocks(
    query: torch.Tensor,
    own: Segment,
    lengths: torch.Tensor,
    prefix: Segment,
    groups: Groups,
    scale: float,
    block: int = SPLIT,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `attend_rows`, and the log-sum-exp of each `block` entries of the row's prefix, (B, query
    heads, T, blocks), -inf where a row has none: what a selection that is made again needs, without
    a second pass over the keys.

    block: a multiple of 64.
    """
    return _attend(query, own, lengths, prefix, groups=groups, scale=scale, step=block)


@dataclass(frozen=True)
class _Part:
    """How a launch cuts one segment."""

    tiles: int  # of the packed queries
    splits: int
    block_m: int
    block_n: int

    @classmethod
    def of(cls, segment: Segment, busy: int, queries: int, step: int) -> _Part:
        """busy: rows or prefixes that have something to attend to, at most; queries: packed ones of
        each; step: entries of a split, 0 if the used length decides."""
        exact = (
            segment[0].dtype == torch.float32
        )  # plain multiply-adds: a large tile would not fit the registers
        block_m = min(max(16, triton.next_power_of_2(queries)), 32 if exact else 128)
        tiles = triton.cdiv(queries, block_m)
        _, heads, capacity, _ = segment[0].shape
        if step:
            splits = triton.cdiv(capacity, step)
        else:
            splits = min(PROGRAMS // (busy * heads * tiles), triton.cdiv(capacity, SMALLEST))
        return cls(tiles, max(1, splits), block_m, 32 if exact else 64)


def _attend(
    query: torch.Tensor,
    own: Segment,
    lengths: torch.Tensor,
    prefix: Segment | None,
    groups: Groups | None,
    scale: float,
    step: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, heads, width, dim = query.shape
    group = heads // own[0].shape[1]
    shares = groups is not None and len(groups.members) > 0 and prefix is not None
    parts = [_Part.of(own, rows, group * width, step)]
    if shares:
        assert prefix is not None and groups is not None
        count, share = groups.members.shape
        busy = min(
            count, rows - share + 1
        )  # some prefix has `share` rows: so many are left for others
        parts.append(_Part.of(prefix, busy, share * group * width, step))
    total = sum(part.splits for part in parts)
    out = torch.empty(rows, heads, width, total, dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(rows, heads, width, total, dtype=torch.float32, device=query.device)
    _launch(
        query, own, lengths, None, scale=scale, step=step, part=parts[0], first=0, out=out, lse=lse
    )
    if shares:
        assert prefix is not None and groups is not None
        _launch(
            query,
            prefix,
            groups.lengths,
            groups,
            scale=scale,
            step=step,
            part=parts[1],
            first=parts[0].splits,
            out=out,
            lse=lse,
        )
    merged = _merge(
        out,
        lse,
        groups.prefix if shares and groups is not None else None,
        parts[0].splits,
        dtype=query.dtype,
    )
    blocks = lse[..., parts[0].splits :]
    if shares and groups is not None:  # nobody wrote what belongs to rows without a prefix
        blocks = blocks.masked_fill((groups.prefix < 0)[:, None, None, None], float("-inf"))
    return *merged, blocks


def _launch(
    query: torch.Tensor,
    segment: Segment,
    lengths: torch.Tensor,
    groups: Groups | None,
    scale: float,
    step: int,
    part: _Part,
    first: int,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """One segment's splits, from place `first` of the partial results on; groups: if it is the
    prefixes'."""
    key, value = (_last_dense(x) for x in segment)
    query = _last_dense(query)
    _, heads, width, dim = query.shape
    rows_of = (
        (groups.members, groups.prefix, groups.rank)
        if groups is not None
        else (lengths, lengths, lengths)
    )
    count = (
        len(groups.members) if groups is not None else len(query)
    )  # the store may hold more prefixes
    kv_heads = key.shape[1]
    _attend_split[(part.tiles * part.splits, kv_heads, count)](
        query,
        key,
        value,
        lengths,
        *rows_of,
        out,
        lse,
        scale * 1.4426950408889634,  # powers of two are what the hardware has
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        part.splits,
        first,
        lse.shape[-1],
        WIDTH=width,
        GROUP=heads // kv_heads,
        SHARE=groups.members.shape[1] if groups is not None else 0,
        DIM=dim,
        STEP=step,
        TILES=part.tiles,
        BLOCK_M=part.block_m,
        BLOCK_N=part.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        num_warps=8 if part.block_m == 128 else 4,
        num_stages=2,
    )


def _last_dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _merge(
    part: torch.Tensor, lse: torch.Tensor, prefix: torch.Tensor | None, own: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, width, total, dim = part.shape
    out = torch.empty(rows, heads, width, dim, dtype=dtype, device=part.device)
    whole = torch.empty(rows, heads, width, dtype=torch.float32, device=part.device)
    _merge_splits[(rows * heads * width,)](
        part,
        lse,
        prefix if prefix is not None else lse,
        out,
        whole,
        own,
        total,
        PER_ROW=heads * width,
        SHARED=prefix is not None,
        DIM=dim,
        BLOCK_S=16,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        num_warps=4,
    )
    return out, whole


@triton.jit(do_not_specialize=["splits", "first", "total"])
def _attend_split(
    query, key, value, lengths, members, prefix, rank, out, lse, scale,
    q_row, q_head, q_token, k_row, k_head, k_entry, v_row, v_head, v_entry, splits, first, total,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr,
    TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of packed queries over one split of one segment. SHARE: rows at most under a prefix;
    0: the rows' own."""
    tile = tl.program_id(0) % TILES  # neighbours read the same keys
    split = tl.program_id(0) // TILES
    kv_head = tl.program_id(1)
    n = tl.program_id(2)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = m % WIDTH
    head = kv_head * GROUP + (m % (GROUP * WIDTH)) // WIDTH
    length = tl.load(lengths + n)
    if SHARE > 0:
        place = m // (GROUP * WIDTH)
        row = tl.load(members + n * SHARE + place, mask=place < SHARE, other=0)
        asks = (place < SHARE) & (tl.load(prefix + row) == n) & (tl.load(rank + row) == place)
        used = length
        last = m * 0 + length - 1
    else:
        row = m * 0 + n
        asks = m < GROUP * WIDTH
        used = length + WIDTH
        last = length + token
    size = STEP
    if STEP == 0:
        size = ((used + splits - 1) // splits + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    begin = split * size
    end = tl.minimum(begin + size, used)
    end = tl.where(tl.max(asks.to(tl.int32), 0) > 0, end, begin)  # nobody asks: nothing is read

    row = row.to(tl.int64)
    q_at = (
        query
        + row[:, None] * q_row
        + head[:, None] * q_head
        + token[:, None] * q_token
        + d[None, :]
    )
    q = tl.load(q_at, mask=asks[:, None] & (d[None, :] < DIM), other=0.0)
    k_at = key + n.to(tl.int64) * k_row + kv_head * k_head
    v_at = value + n.to(tl.int64) * v_row + kv_head * v_head
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.full([BLOCK_M], 0.0, tl.float32)
    taken = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    for at in range(begin, end, BLOCK_N):
        e = at + tl.arange(0, BLOCK_N)
        inside = e < end
        k = tl.load(
            k_at + e[None, :] * k_entry + d[:, None],
            mask=inside[None, :] & (d[:, None] < DIM),
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(inside[None, :] & (e[None, :] <= last[:, None]), scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        p = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(best - level)
        weight = weight * shrink + tl.sum(p, 1)
        v = tl.load(
            v_at + e[:, None] * v_entry + d[None, :],
            mask=inside[:, None] & (d[None, :] < DIM),
            other=0.0,
        )
        taken = taken * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        best = higher

    seen = weight > 0
    whole = tl.where(seen, weight, 1.0)
    to = ((row * tl.num_programs(1) * GROUP + head) * WIDTH + token) * total + first + split
    tl.store(
        lse + to,
        tl.where(seen, (best + tl.log2(whole)) * 0.6931471805599453, float("-inf")),
        mask=asks,
    )
    keep = asks & seen
    tl.store(
        out + to[:, None] * DIM + d[None, :],
        taken / whole[:, None],
        mask=keep[:, None] & (d[None, :] < DIM),
    )


@triton.jit(do_not_specialize=["own", "total"])
def _merge_splits(
    part, lse, prefix, out, whole, own, total,
    PER_ROW: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """All splits of one token and head: `own` of its own segment, the others of its prefix. Each
    segment is summed from its own start in blocks of BLOCK_S, so that splits behind what is used
    change no bit."""
    at = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    first = lse + at * total
    end = total
    if SHARED:
        end = tl.where(tl.load(prefix + at // PER_ROW) >= 0, total, own)
    best = float("-inf")
    for i in range(0, end, BLOCK_S):
        best = tl.maximum(
            best, tl.max(tl.load(first + i + s, mask=i + s < end, other=float("-inf")), 0)
        )
    weight = 0.0
    taken = tl.full([BLOCK_D], 0.0, tl.float32)
    for i in range(0, own, BLOCK_S):
        w = tl.exp(tl.load(first + i + s, mask=i + s < own, other=float("-inf")) - best)
        rows = part + (at * total + i + s)[:, None] * DIM + d[None, :]
        taken += tl.sum(
            w[:, None] * tl.load(rows, mask=(w > 0)[:, None] & (d[None, :] < DIM), other=0.0), 0
        )
        weight += tl.sum(w, 0)
    for i in range(own, end, BLOCK_S):
        w = tl.exp(tl.load(first + i + s, mask=i + s < end, other=float("-inf")) - best)
        rows = part + (at * total + i + s)[:, None] * DIM + d[None, :]
        taken += tl.sum(
            w[:, None] * tl.load(rows, mask=(w > 0)[:, None] & (d[None, :] < DIM), other=0.0), 0
        )
        weight += tl.sum(w, 0)
    tl.store(out + at * DIM + d, taken / weight, mask=d < DIM)
    tl.store(whole + at, best + tl.log(weight))
