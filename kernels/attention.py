"""Attention of a few new tokens per row over two segments: a prefix that rows may share, and the
row's own entries.

    attend_rows(query, own, lengths, prefix, groups, scale, fixed) -> output, logsumexp
    attend_chunk(query, past, new, scale) -> output, logsumexp

`attend_rows` is the decode step: T = 1..32 tokens of every row, ragged. `attend_chunk` is a chunk
of one prompt's prefill. Each segment is attended by itself and gives its log-sum-exp; the two are
merged by it. The query heads of a KV head, and the rows of a prefix, are packed into one product,
so keys and values are read once for all of them.

Shapes: query (B, query heads, T, d); a segment is its keys and values, (rows or prefixes, KV heads,
capacity, d), of which the first `lengths` entries count. Token t of row b sees its whole prefix and
its own entries [0, lengths[b] + t].

With `fixed`, what a row gets is the same bit for bit whatever the other rows are and wherever among
its T tokens a token stands: segments are read in whole splits of `SPLIT` entries from their start,
and no shape depends on lengths."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from std_core.kernels.cpu import loader
from std_core.kernels.devices import TRITON

Segment = tuple[torch.Tensor, torch.Tensor]  # keys, values
SPLIT = 512  # entries that are reduced together; PyTorch's CPU kernel has the same number built in


@dataclass(frozen=True)
class Groups:
    """Which row stands where under which prefix. P prefixes, R rows at most under one of them; a
    place that no row takes repeats row 0, whose result there is never read."""

    lengths: torch.Tensor  # (P,) entries of each prefix
    members: torch.Tensor  # (P, R) rows
    prefix: torch.Tensor  # (B,) each row's prefix, -1 for none
    rank: torch.Tensor  # (B,) and its place under it

    def to(self, device: torch.device) -> Groups:
        return Groups(*(x.to(device) for x in vars(self).values()))

    @classmethod
    def of(
        cls,
        prefix_of_row: list[int],
        lengths: list[int],
        device: str | torch.device = "cpu",
        fixed: bool = False,
    ) -> Groups:
        """From each row's prefix (-1 for none) and each prefix's length, both known to the host.
        `fixed`: the shape is the same for all batches without a shared prefix (P is the number of
        prefixes, taken or not)."""
        count = [0] * len(lengths)
        rank = [0] * len(prefix_of_row)
        for row, prefix in enumerate(prefix_of_row):
            if prefix >= 0:
                rank[row] = count[prefix]
                count[prefix] += 1
        used = len(lengths) if fixed else max(prefix_of_row) + 1
        members = torch.zeros(used, max(count, default=0) or int(fixed), dtype=torch.long)
        for row, prefix in enumerate(prefix_of_row):
            if prefix >= 0:
                members[prefix, rank[row]] = row
        tensors = (
            torch.tensor(lengths[:used]),
            members,
            torch.tensor(prefix_of_row),
            torch.tensor(rank),
        )
        return cls(*(x.to(device) for x in tensors))


def attend_rows(
    query: torch.Tensor,
    own: Segment,
    lengths: torch.Tensor,
    prefix: Segment | None,
    groups: Groups | None,
    scale: float,
    fixed: bool = False,
) -> Segment:
    """(B, query heads, T, d), and the log-sum-exp of all scores, (B, query heads, T) float32; `own`
    already holds the T new tokens, `lengths` (B,) counts what lies before them."""
    if query.device.type in TRITON:
        from std_core.kernels.triton import attention as triton_attention

        return triton_attention.attend_rows(
            query, own, lengths, prefix, groups=groups, scale=scale, fixed=fixed
        )
    if groups is None or not len(groups.members):
        prefix = None
    if _in_one(query, own, prefix):
        return _fused(query, own, lengths, prefix, groups=groups, scale=scale)
    rows, heads, width, dim = query.shape
    kv_heads = own[0].shape[1]
    packed = query.reshape(rows, kv_heads, heads // kv_heads * width, dim)
    newest = lengths[:, None] + torch.arange(
        width, device=query.device
    )  # (B, T): the last entry each token sees
    out, lse = _masked(packed, own, newest.repeat(1, heads // kv_heads), scale, fixed=fixed)
    if prefix is not None and groups is not None:
        count, share = groups.members.shape
        grouped = packed[groups.members].transpose(1, 2).reshape(count, kv_heads, -1, dim)
        last = (groups.lengths - 1)[:, None].expand(-1, grouped.shape[2])
        part = [
            x.view(count, kv_heads, share, -1, *x.shape[3:])[
                groups.prefix.clamp(min=0), :, groups.rank
            ]
            for x in _masked(
                grouped, (prefix[0][:count], prefix[1][:count]), last, scale, fixed=fixed
            )
        ]
        seen = part[1].masked_fill((groups.prefix < 0)[:, None, None], float("-inf"))
        out, lse = merge((out, lse), (part[0], seen))
    return out.reshape(rows, heads, width, dim), lse.reshape(rows, heads, width)


def write_rows(cache: torch.Tensor, lengths: torch.Tensor, new: torch.Tensor) -> None:
    """Puts T entries per row behind `lengths` (B,); cache: (rows, KV heads, capacity, d), new: (B,
    KV heads, T, d)."""
    rows, kv_heads, width, dim = new.shape
    if loader.serves("write_rows", cache) and new.stride(3) == 1:
        strides = (
            new.data_ptr(),
            *new.stride()[:3],
            cache.data_ptr(),
            *cache.stride()[:2],
            lengths.data_ptr(),
        )
        loader.call("write_rows", cache.dtype, *strides, rows, kv_heads, width, dim)
        return
    places = lengths[:, None] + torch.arange(width, device=lengths.device)
    cache[torch.arange(rows, device=lengths.device)[:, None], :, places] = new.transpose(1, 2)


def attend_chunk(
    query: torch.Tensor, past: list[Segment], new: Segment, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """T tokens of one prompt: all of `past`, and `new` (the chunk itself) causally.

    Returns:
        (1, query heads, T, d), and the log-sum-exp of all scores, (1, query heads, T) float32.
    """
    past = [segment for segment in past if segment[0].shape[2]]
    if loader.serves("attend_chunk", query):
        segments = [*past, (new[0].contiguous(), new[1].contiguous())]
        if all(_in_one(query, segment, None) for segment in segments):
            return _fused_chunk(query, segments, scale)
    heads = query.shape[1]
    kv_heads = new[0].shape[1]
    key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in new)
    merged = flash(query, key, value, None, scale=scale, causal=True)
    for segment in past:
        packed = query.reshape(1, kv_heads, -1, query.shape[3])
        out, lse = flash(packed, *segment, None, scale)
        merged = merge(merged, (out.reshape(query.shape), lse.reshape(query.shape[:3])))
    return merged


def merge(one: Segment, other: Segment) -> Segment:
    """Two partial attentions, (…, d) with their log-sum-exps (…), as if it had been one softmax. A
    part that saw nothing has a log-sum-exp of -inf."""
    (a, la), (b, lb) = one, other
    lse = torch.logaddexp(la, lb)
    return a * (la - lse).exp()[..., None].to(a.dtype) + b * (lb - lse).exp()[..., None].to(
        b.dtype
    ), lse


def path_name(dtype: torch.dtype, device: torch.device, head_dim: int) -> str:
    """Which implementation `attend_rows` takes, for reports."""
    if device.type in TRITON:
        return "kernels/triton/triton_attention.py"
    entries = torch.empty(1, 1, 1, head_dim, dtype=dtype, device=device)
    if _in_one(entries, (entries, entries), None):
        return "kernels/cpu/attention.cpp"
    return "PyTorch's fused attention" if device.type == "cpu" else "PyTorch's products"


def _in_one(query: torch.Tensor, own: Segment, prefix: Segment | None) -> bool:
    """Whether the C++ kernel takes this; it needs no shapes pinned for `fixed`."""
    stores = (*own, *(prefix or ()))
    lie = all(
        x.stride(3) == 1 and x.stride(2) == x.shape[3] and x.dtype == query.dtype for x in stores
    )
    return lie and query.shape[3] % 32 == 0 and loader.serves("attend_rows", query)


def _fused(
    query: torch.Tensor,
    own: Segment,
    lengths: torch.Tensor,
    prefix: Segment | None,
    groups: Groups | None,
    scale: float,
) -> Segment:
    query = query.contiguous()
    rows, heads, width, dim = query.shape
    out = torch.empty_like(query)
    lse = query.new_empty(rows, heads, width, dtype=torch.float32)
    shared: tuple[int, ...] = (0, 0, 0, 0)
    under: tuple[int, int, int] = (lengths.data_ptr(), 0, 0)
    if prefix is not None and groups is not None:
        shared = prefix[0].data_ptr(), prefix[1].data_ptr(), *prefix[0].stride()[:2]
        under = lengths.data_ptr(), groups.prefix.data_ptr(), groups.lengths.data_ptr()
    count = len(groups.lengths) if prefix is not None and groups is not None else 0
    shape = rows, heads, own[0].shape[1], width, dim, count, scale
    entries = query.data_ptr(), own[0].data_ptr(), own[1].data_ptr(), *own[0].stride()[:2]
    results = out.data_ptr(), lse.data_ptr(), torch.get_num_threads()
    loader.call("attend_rows", query.dtype, *entries, *shared, *under, *shape, *results)
    return out, lse


def _fused_chunk(query: torch.Tensor, segments: list[Segment], scale: float) -> Segment:
    query = query.contiguous()
    _, heads, width, dim = query.shape
    out = torch.empty_like(query)
    lse = query.new_empty(1, heads, width, dtype=torch.float32)
    lie = [(k.data_ptr(), v.data_ptr(), k.stride(1), k.shape[2]) for k, v in segments]
    table = torch.tensor(lie, dtype=torch.int64)  # laid out as the kernel has them
    shape = len(segments), heads, segments[0][0].shape[1], width, dim, scale
    results = out.data_ptr(), lse.data_ptr(), torch.get_num_threads()
    loader.call("attend_chunk", query.dtype, query.data_ptr(), table.data_ptr(), *shape, *results)
    return out, lse


def _masked(
    query: torch.Tensor, segment: Segment, last: torch.Tensor, scale: float, fixed: bool
) -> Segment:
    """query (N, KV heads, M, d) over the entries [0, last] of a segment; last: (N, M), -1 where
    there are none."""
    used = max(int(last.max()) + 1, 1)
    if fixed:  # a split that a row sees nothing of changes no bit of what it has
        used = -(-used // SPLIT) * SPLIT
    sees = torch.arange(used, device=query.device) <= last[..., None]
    bias = torch.zeros(sees.shape, dtype=query.dtype, device=query.device).masked_fill_(
        ~sees, float("-inf")
    )
    out, lse = flash(
        query, segment[0][:, :, :used], segment[1][:, :, :used], bias[:, None], scale=scale
    )
    return out, lse.masked_fill((last < 0)[:, None], float("-inf"))


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    causal: bool = False,
) -> Segment:
    """One segment's attention and its log-sum-exp: on a CPU PyTorch's fused kernel, whose public
    function keeps the latter to itself, and on a GPU those there; elsewhere the plain products."""
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=bias, scale=scale
        )
    if query.device.type == "cuda" and bias is None:
        from std_core.kernels.flash_attention import flash

        return flash(query, key, value, scale, scale=causal)
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if causal:
        bias = torch.full(scores.shape[-2:], float("-inf"), device=query.device).triu(1)
    scores = scores if bias is None else scores + bias
    logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp[..., None]).exp().nan_to_num(0.0)  # nothing seen: nothing taken
    return weights.to(value.dtype) @ value, logsumexp


def reference_rows(
    query: torch.Tensor,
    own: Segment,
    lengths: torch.Tensor,
    prefix: Segment | None,
    groups: Groups | None,
    scale: float,
) -> torch.Tensor:
    """The definition of `attend_rows`, one softmax per row, head and token, in float64; for
    tests."""
    out = torch.empty(query.shape, dtype=torch.float64)
    share = query.shape[1] // own[0].shape[1]
    for b in range(query.shape[0]):
        for head in range(query.shape[1]):
            for t in range(query.shape[2]):
                k, v = (x[b, head // share, : int(lengths[b]) + t + 1].double() for x in own)
                if prefix is not None and groups is not None and groups.prefix[b] >= 0:
                    p = int(groups.prefix[b])
                    pk, pv = (
                        x[p, head // share, : int(groups.lengths[p])].double() for x in prefix
                    )
                    k = torch.cat([pk, k])
                    v = torch.cat([pv, v])
                out[b, head, t] = ((k @ query[b, head, t].double()) * scale).softmax(0) @ v
    return out
