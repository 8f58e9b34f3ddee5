"""Everything on a GPU that has a right answer: kernels against plain products in float64, captured
rounds against Hugging Face's `generate`, `strict` against the dense loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from triton.errors import TritonError

from jobs.suites.gpu.shapes import small_llama
from jobs.suites.shared import triton_interpreter
from std_core import sparse_to_dense
from std_core.kernels import attention
from std_core.kernels.low_bit import low_bit_linear, pack_weight
from std_core.kernels.shared.low_bit_format import dequantize, quantize
from std_core.kernels.shared.segments import Attention, PrefixGroups, Segment
from std_core.kernels.sparse_linear import channel_major
from std_core.kernels.triton import attention as triton_attention
from std_core.kernels.triton import attention_mass as triton_attention_mass
from std_core.kernels.triton import gather as triton_gather
from std_core.kernels.triton import low_bit as triton_low_bit
from std_core.kernels.triton import sparse_linear as triton_sparse_linear
from std_core.types import Draft

Check = tuple[str, Callable[[], float]]
HALF = 2e-2  # of 16-bit results, whose own rounding is 4e-3
EXACT = 1e-4
DRAFTS = {
    "dense": Draft("full", gamma=1),
    "std": Draft("std", keep=0.2, gamma=4),
    "int4": Draft("std", keep=0.3, gamma=3, weights="int4"),
    "ngram": Draft("ngram", gamma=5),
}


def run(device: str, tiny: bool, deadline: float) -> tuple[dict[str, Any], list[str]]:
    """Of each check its largest error and whether that is small enough; and the names of those
    without time."""
    done: dict[str, Any] = {}
    late = []
    for name, check in (*_kernels(device, tiny), *_tokens(device, tiny)):
        if time.monotonic() > deadline:
            late.append(name)
            continue
        try:
            with (
                triton_interpreter.row_independent_products()
                if tiny and name.startswith("fixed")
                else nullcontext()
            ):
                error = check()
        except (
            RuntimeError,
            TritonError,
        ) as failure:  # what one GPU or compiler refuses: the others are still told
            done[name] = {"error": str(failure).splitlines()[0], "ok": False}
            continue
        limit = (
            0.0
            if name.startswith(("tokens", "gather", "fixed"))
            else HALF
            if "float16" in name
            else EXACT
        )
        done[name] = {"error": error, "ok": error <= limit}
    return done, late


def _kernels(device: str, tiny: bool) -> Iterator[Check]:
    # the interpreter multiplies bfloat16 as whole numbers
    dtypes = [torch.float32] if tiny else [torch.bfloat16, torch.float16, torch.float32]
    for shape, dtype, width, fixed in _row_cases(tiny):
        what = f"{shape[0]}/{shape[1]} heads of {shape[2]}, T={width}, {str(dtype)[6:]}"
        yield f"rows {what}, {fixed=}", partial(_rows, device, shape, dtype, width, tiny, fixed)
    for dtype in dtypes:
        short = str(dtype)[6:]
        size = (2, 1, 9, 64, 32) if tiny else (28, 4, 40, 4096, 128)
        yield f"mass {short}", partial(_mass, device, dtype, size)
        yield f"chunk {short}", partial(_chunk, device, dtype, size)
        for bits in (8, 4):
            sizes = (32, 64) if tiny else (3584, 18944)
            yield f"int{bits} product, {short}", partial(_low_bit, device, dtype, bits, sizes)
            yield (
                f"int{bits} Triton product, {short}",
                partial(_low_bit, device, dtype, bits, sizes, own=True),
            )
        yield f"sparse product, {short}", partial(_sparse, device, dtype, sizes)
    yield "gather", partial(_gather, device)
    yield "fixed splits: bits differ", partial(_fixed, device, dtypes[0])


def _row_cases(tiny: bool) -> list[tuple[tuple[int, int, int], torch.dtype, int, bool]]:
    """Heads, numbers, T and `fixed`; each is compiled anew, which takes seconds."""
    if tiny:
        return [((4, 2, 32), torch.float32, 1, False), ((4, 2, 32), torch.float32, 3, True)]
    heads = ((28, 4, 128), (32, 8, 128), (16, 2, 64), (10, 2, 80))
    bfloat16 = [(shape, torch.bfloat16, width, False) for shape in heads for width in (1, 8)]
    others = [
        (heads[0], dtype, 8, fixed)
        for dtype in (torch.float16, torch.float32)
        for fixed in (False, True)
    ]
    return [
        *bfloat16,
        *others,
        (heads[0], torch.bfloat16, 32, False),
        (heads[0], torch.bfloat16, 8, True),
    ]


def _tokens(device: str, tiny: bool) -> Iterator[Check]:
    for name, draft in {"std": DRAFTS["std"]}.items() if tiny else DRAFTS.items():
        yield f"tokens, {name} against generate", partial(_against_generate, device, draft, tiny)
    if not tiny:
        yield "tokens, strict bfloat16 against its dense loop", partial(_strict, device)


# ------------------------------------------------------------------------------------------ kernels


def _segment(device: str, dtype: torch.dtype, *shape: int) -> Segment:
    key = torch.randn(*shape, device=device, dtype=dtype)
    value = torch.randn(*shape, device=device, dtype=dtype)
    return Segment(key, value)


def _dense(query: torch.Tensor, segment: Segment, sees: torch.Tensor, scale: float) -> Attention:
    """Plain products in float64: query (B, heads, T, d), sees (B, T, n)."""
    share = query.shape[1] // segment.key.shape[1]
    key, value = (x.double().repeat_interleave(share, 1) for x in segment)
    scores = (query.double() @ key.transpose(2, 3) * scale).masked_fill(
        ~sees[:, None], float("-inf")
    )
    lse = scores.logsumexp(-1)
    return Attention((scores - lse[..., None]).exp().nan_to_num(0.0) @ value, lse)


def _rows(
    device: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    width: int,
    tiny: bool,
    fixed: bool,
) -> float:
    """Three rows, two of them under one prefix, none a multiple of anything long."""
    heads, kv_heads, dim = shape
    own_n, prefix_n = (70, 90) if tiny else (1300, 9000)
    query = torch.randn(3, heads, width, dim, device=device, dtype=dtype)
    own = _segment(device, dtype, 3, kv_heads, own_n + width, dim)
    prefix = _segment(device, dtype, 2, kv_heads, prefix_n, dim)
    lengths = torch.tensor([own_n, 5, own_n // 2], device=device)
    groups = PrefixGroups.from_lists([1, -1, 1], [3, prefix_n - 7], device)
    out, lse = triton_attention.attend_rows(
        query, own, lengths, prefix, groups=groups, scale=dim**-0.5, fixed=fixed
    )
    place = torch.arange(own_n + width, device=device)
    newest = lengths[:, None] + torch.arange(width, device=device)
    one = _dense(query, own, place <= newest[..., None], dim**-0.5)
    of_row = Segment(*(x[groups.prefix_of_row.clamp(min=0)] for x in prefix))
    seen = torch.where(
        groups.prefix_of_row >= 0, groups.prefix_lengths[groups.prefix_of_row.clamp(min=0)], 0
    )
    sees = torch.arange(prefix_n, device=device) < seen[:, None, None]
    want, whole = attention.merge_partials(
        one, _dense(query, of_row, sees.expand(-1, width, -1), dim**-0.5)
    )
    return max(_off(out, want), _off(lse, whole))


def _off(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((got.double() - want).abs().max() / want.abs().max())


def _mass(device: str, dtype: torch.dtype, size: tuple[int, ...]) -> float:
    heads, kv_heads, text, visual, dim = size
    query, key = (
        torch.randn(h, n, dim, device=device).to(dtype)
        for h, n in ((heads, text), (kv_heads, visual))
    )
    scores = (
        query.double() @ key.double().repeat_interleave(heads // kv_heads, 0).transpose(1, 2)
    ) * dim**-0.5
    want = scores.softmax(-1).unflatten(0, (kv_heads, -1)).sum((1, 2)) / text
    return _off(
        triton_attention_mass.attention_mass(query, key, scores.logsumexp(-1).float(), dim**-0.5),
        want,
    )


def _chunk(device: str, dtype: torch.dtype, size: tuple[int, ...]) -> float:
    heads, kv_heads, text, past, dim = size
    query = torch.randn(1, heads, text, dim, device=device, dtype=dtype)
    before = _segment(device, dtype, 1, kv_heads, past, dim)
    new = _segment(device, dtype, 1, kv_heads, text, dim)
    out, lse = attention.attend_chunk(query, [before], new, dim**-0.5)
    sees = torch.ones(1, text, past + text, dtype=torch.bool, device=device).tril(past)
    joined = Segment(*(torch.cat(pair, dim=2) for pair in zip(before, new, strict=True)))
    want, whole = _dense(query, joined, sees, dim**-0.5)
    return max(_off(out, want), _off(lse, whole))


def _low_bit(
    device: str, dtype: torch.dtype, bits: int, size: tuple[int, int], own: bool = False
) -> float:
    """own: Triton's where PyTorch's would serve."""
    weight, x = (torch.randn(*s, device=device).to(dtype) for s in (size, (8, size[1])))
    levels, scale = quantize(weight, bits)
    want = F.linear(x.double(), dequantize(levels, scale, bits).double())
    if own:
        return _off(
            triton_low_bit.triton_product(x, triton_low_bit.pack_for_triton(levels, scale, bits)),
            want,
        )
    return _off(low_bit_linear(x, pack_weight(weight, bits), None), want)


def _sparse(device: str, dtype: torch.dtype, size: tuple[int, int]) -> float:
    weight, x = (torch.randn(*s, device=device).to(dtype) for s in (size, (2, size[1])))
    want = F.linear((x * (x.abs() > 1)).double(), weight.double())
    return _off(
        triton_sparse_linear.sparse_linear(x, channel_major(weight), None, 1.0),
        want,
    )


def _gather(device: str) -> float:
    cache = torch.randn(4, 900, 128, device=device)
    chosen = torch.randint(0, 900, (4, 300), device=device)
    want = cache.gather(1, chosen[..., None].expand(-1, -1, 128))
    return float((triton_gather.gather_entries(cache, chosen) != want).sum())


def _fixed(device: str, dtype: torch.dtype) -> float:
    """Numbers of a token that change with the company it is in."""
    query = torch.randn(2, 4, 4, 32, device=device, dtype=dtype)
    query[:, :, 1] = query[:, :, 3]
    own = _segment(device, dtype, 2, 2, 1536, 32)

    def attend(order: list[int], before: list[int]) -> torch.Tensor:
        rows = Segment(own.key[order], own.value[order])
        at = torch.tensor(before, device=device)
        return triton_attention.attend_rows(
            query[order], rows, at, None, groups=None, scale=0.2, fixed=True
        )[0]

    return float((attend([0, 1], [700, 0])[0, :, 3] != attend([1, 0], [1500, 702])[1, :, 1]).sum())


# ------------------------------------------------------------------------------------------- tokens


def _against_generate(device: str, draft: Draft, tiny: bool) -> float:
    """Tokens of three ragged rows in float32 that are not `generate`'s."""
    model = small_llama(device, torch.float32)
    tokens = 4 if tiny else 48
    ids, mask = _prompts(device, 70 if tiny else 1200)
    want = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False
    )
    got = sparse_to_dense(model, draft, max_num_seqs=2).generate(
        ids, mask, max_new_tokens=tokens, do_sample=False
    )
    return float((got != want).sum())


def _prompts(device: str, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([longest, longest - 3, longest // 2])
    ids = torch.randint(1, 96, (3, longest), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(longest) >= longest - lengths[:, None]
    return ids.to(device), mask.long().to(device)


def _strict(device: str) -> float:
    """Tokens that a draft changes in bfloat16, rows and width pinned."""
    model, (ids, mask) = small_llama(device, torch.bfloat16), _prompts(device, 1200)
    one, other = (
        sparse_to_dense(model, draft, max_num_seqs=2, strict=8).generate(
            ids, mask, max_new_tokens=48, do_sample=False
        )
        for draft in (Draft("ngram", gamma=1), Draft("std", keep=0.2, gamma=5))
    )
    return float((one != other).sum())
