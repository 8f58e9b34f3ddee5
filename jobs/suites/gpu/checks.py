"""Checks with a known answer, on a GPU: kernels against plain products in float64, captured rounds
against Hugging Face's `generate`, `strict` against the dense loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
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

LIMIT_16_BIT = 2e-2  # relative error of 16-bit results, whose own rounding is 4e-3
LIMIT_32_BIT = 1e-4
SPLIT = 1536  # entries of a cache that fixed splits divide
DRAFTS = {
    "dense": Draft("full", gamma=1),
    "std": Draft("std", keep=0.2, gamma=4),
    "int4": Draft("std", keep=0.3, gamma=3, weights="int4"),
    "ngram": Draft("ngram", gamma=5),
}


@dataclass(frozen=True)
class Check:
    """`error` runs the check and returns its largest error, or the number of wrong values.

    Args:
        row_independent: in Triton's interpreter, products must not depend on a row's index.
    """

    name: str
    error: Callable[[], float]
    limit: float
    row_independent: bool = False


@dataclass
class CheckResults:
    """Results of all checks.

    Args:
        outcomes: by a check's name, its `error` and whether that is within the limit (`ok`).
        skipped: names of the checks for which no time was left.
    """

    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        return [name for name, outcome in self.outcomes.items() if not outcome["ok"]]


@dataclass(frozen=True)
class Heads:
    """Heads of an attention layer and their size."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True)
class RowsCase:
    """A case of the attention kernel over rows of slots; `width`: tokens per row."""

    heads: Heads
    dtype: torch.dtype
    width: int
    fixed: bool = False

    def __str__(self) -> str:
        heads = f"{self.heads.query}/{self.heads.kv} heads of {self.heads.dim}"
        return f"{heads}, T={self.width}, {_short(self.dtype)}, fixed={self.fixed}"


@dataclass(frozen=True)
class KernelSizes:
    """Sizes of the kernels' inputs.

    Args:
        own, prefix: entries of a row and of a shared prefix.
        text, past: tokens of a chunk and entries before it, which are visual ones in
            `attention_mass`.
        weight: out and in features of a projection.
    """

    own: int
    prefix: int
    heads: Heads
    text: int
    past: int
    weight: tuple[int, int]


FULL_SIZES = KernelSizes(
    own=1300, prefix=9000, heads=Heads(28, 4, 128), text=40, past=4096, weight=(3584, 18944)
)
TINY_SIZES = KernelSizes(own=70, prefix=90, heads=Heads(2, 1, 32), text=9, past=64, weight=(32, 64))


def run(device: str, *, tiny: bool, deadline: float) -> CheckResults:
    """Run all checks.

    Args:
        tiny: small sizes, for Triton's interpreter.
        deadline: of `time.monotonic`; no check is begun after it.
    """
    results = CheckResults()
    for check in (*_kernel_checks(device, tiny), *_token_checks(device, tiny)):
        if time.monotonic() > deadline:
            results.skipped.append(check.name)
        else:
            results.outcomes[check.name] = _outcome(check, tiny)
    return results


def _outcome(check: Check, tiny: bool) -> dict[str, Any]:
    fixed_order = tiny and check.row_independent
    try:
        with triton_interpreter.row_independent_products() if fixed_order else nullcontext():
            error = check.error()
    except (RuntimeError, TritonError) as failure:
        # one GPU or compiler cannot run it: the other checks are still of use
        return {"error": str(failure).splitlines()[0], "ok": False}
    return {"error": error, "ok": error <= check.limit}


def _kernel_checks(device: str, tiny: bool) -> Iterator[Check]:
    sizes = TINY_SIZES if tiny else FULL_SIZES
    # Triton's interpreter multiplies bfloat16 as integers
    dtypes = [torch.float32] if tiny else [torch.bfloat16, torch.float16, torch.float32]
    for case in _rows_cases(tiny):
        error = partial(_rows_error, device, sizes, case)
        yield Check(f"rows {case}", error, _limit(case.dtype))
    for dtype in dtypes:
        short = _short(dtype)
        limit = _limit(dtype)
        yield Check(f"mass {short}", partial(_mass_error, device, sizes, dtype), limit)
        yield Check(f"chunk {short}", partial(_chunk_error, device, sizes, dtype), limit)
        for bits in (8, 4):
            low_bit = partial(_low_bit_error, device, sizes, dtype, bits)
            triton = partial(_triton_low_bit_error, device, sizes, dtype, bits)
            yield Check(f"int{bits} product, {short}", low_bit, limit)
            yield Check(f"int{bits} Triton product, {short}", triton, limit)
        sparse = partial(_sparse_error, device, sizes, dtype)
        yield Check(f"sparse product, {short}", sparse, limit)
    yield Check("gather", partial(_wrong_gathered, device), 0.0)
    yield Check(
        "fixed splits: bits differ",
        partial(_unequal_bits, device, dtypes[0]),
        0.0,
        row_independent=True,
    )


def _rows_cases(tiny: bool) -> list[RowsCase]:
    """Few: each is compiled anew, which takes seconds."""
    if tiny:
        heads = Heads(4, 2, 32)
        return [
            RowsCase(heads, torch.float32, width=1),
            RowsCase(heads, torch.float32, width=3, fixed=True),
        ]
    all_heads = (Heads(28, 4, 128), Heads(32, 8, 128), Heads(16, 2, 64), Heads(10, 2, 80))
    first = all_heads[0]
    cases = [RowsCase(heads, torch.bfloat16, width) for heads in all_heads for width in (1, 8)]
    for dtype in (torch.float16, torch.float32):
        cases += [RowsCase(first, dtype, width=8, fixed=fixed) for fixed in (False, True)]
    cases.append(RowsCase(first, torch.bfloat16, width=32))
    cases.append(RowsCase(first, torch.bfloat16, width=8, fixed=True))
    return cases


def _token_checks(device: str, tiny: bool) -> Iterator[Check]:
    drafts = {"std": DRAFTS["std"]} if tiny else DRAFTS
    for name, draft in drafts.items():
        error = partial(_tokens_unlike_generate, device, draft, tiny)
        yield Check(f"tokens, {name} against generate", error, 0.0)
    if not tiny:
        error = partial(_tokens_unlike_strict_dense, device)
        yield Check("tokens, strict bfloat16 against its dense loop", error, 0.0)


def _limit(dtype: torch.dtype) -> float:
    return LIMIT_32_BIT if dtype == torch.float32 else LIMIT_16_BIT


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------ kernels


def _rows_error(device: str, sizes: KernelSizes, case: RowsCase) -> float:
    """Three rows, two of them with one prefix; no length is a multiple of a large power of two."""
    heads = case.heads
    width = case.width
    scale = heads.dim**-0.5
    query = torch.randn(3, heads.query, width, heads.dim, device=device, dtype=case.dtype)
    own = _random_segment(device, case.dtype, 3, heads.kv, sizes.own + width, heads.dim)
    prefix = _random_segment(device, case.dtype, 2, heads.kv, sizes.prefix, heads.dim)
    lengths = torch.tensor([sizes.own, 5, sizes.own // 2], device=device)
    groups = PrefixGroups.from_lists([1, -1, 1], [3, sizes.prefix - 7], device)
    out, lse = triton_attention.attend_rows(
        query, own, lengths, prefix, groups=groups, scale=scale, fixed=case.fixed
    )
    entry = torch.arange(sizes.own + width, device=device)
    newest = lengths[:, None] + torch.arange(width, device=device)
    own_part = _reference_attention(query, own, entry <= newest[..., None], scale)
    index = groups.prefix_of_row.clamp(min=0)
    prefix_of_row = Segment(prefix.key[index], prefix.value[index])
    prefix_length = torch.where(groups.prefix_of_row >= 0, groups.prefix_lengths[index], 0)
    visible = torch.arange(sizes.prefix, device=device) < prefix_length[:, None, None]
    prefix_part = _reference_attention(query, prefix_of_row, visible.expand(-1, width, -1), scale)
    expected, expected_lse = attention.merge_partials(own_part, prefix_part)
    return max(_relative_error(out, expected), _relative_error(lse, expected_lse))


def _mass_error(device: str, sizes: KernelSizes, dtype: torch.dtype) -> float:
    heads = sizes.heads
    scale = heads.dim**-0.5
    query = torch.randn(heads.query, sizes.text, heads.dim, device=device).to(dtype)
    key = torch.randn(heads.kv, sizes.past, heads.dim, device=device).to(dtype)
    group = heads.query // heads.kv
    repeated_key = key.double().repeat_interleave(group, 0)
    scores = (query.double() @ repeated_key.transpose(1, 2)) * scale
    expected = scores.softmax(-1).unflatten(0, (heads.kv, -1)).sum((1, 2)) / sizes.text
    mass = triton_attention_mass.attention_mass(query, key, scores.logsumexp(-1).float(), scale)
    return _relative_error(mass, expected)


def _chunk_error(device: str, sizes: KernelSizes, dtype: torch.dtype) -> float:
    heads = sizes.heads
    scale = heads.dim**-0.5
    query = torch.randn(1, heads.query, sizes.text, heads.dim, device=device, dtype=dtype)
    past = _random_segment(device, dtype, 1, heads.kv, sizes.past, heads.dim)
    new = _random_segment(device, dtype, 1, heads.kv, sizes.text, heads.dim)
    out, lse = attention.attend_chunk(query, [past], new, scale)
    visible = torch.ones(1, sizes.text, sizes.past + sizes.text, dtype=torch.bool, device=device)
    joined = Segment(
        torch.cat((past.key, new.key), dim=2), torch.cat((past.value, new.value), dim=2)
    )
    expected, expected_lse = _reference_attention(query, joined, visible.tril(sizes.past), scale)
    return max(_relative_error(out, expected), _relative_error(lse, expected_lse))


def _low_bit_error(device: str, sizes: KernelSizes, dtype: torch.dtype, bits: int) -> float:
    """The product that the engine uses, PyTorch's where there is one."""
    weight, x = _random_projection(device, sizes, dtype, rows=8)
    product = low_bit_linear(x, pack_weight(weight, bits), None)
    return _relative_error(product, _reference_low_bit(weight, x, bits))


def _triton_low_bit_error(device: str, sizes: KernelSizes, dtype: torch.dtype, bits: int) -> float:
    weight, x = _random_projection(device, sizes, dtype, rows=8)
    levels, scale = quantize(weight, bits)
    product = triton_low_bit.triton_product(x, triton_low_bit.pack_for_triton(levels, scale, bits))
    return _relative_error(product, _reference_low_bit(weight, x, bits))


def _sparse_error(device: str, sizes: KernelSizes, dtype: torch.dtype) -> float:
    threshold = 1.0
    weight, x = _random_projection(device, sizes, dtype, rows=2)
    expected = F.linear((x * (x.abs() > threshold)).double(), weight.double())
    product = triton_sparse_linear.sparse_linear(x, channel_major(weight), None, threshold)
    return _relative_error(product, expected)


def _wrong_gathered(device: str) -> float:
    cache = torch.randn(4, 900, 128, device=device)
    indices = torch.randint(0, 900, (4, 300), device=device)
    expected = cache.gather(1, indices[..., None].expand(-1, -1, 128))
    return float((triton_gather.gather_entries(cache, indices) != expected).sum())


def _unequal_bits(device: str, dtype: torch.dtype) -> float:
    """Values of one token's output that change with its row, its place in the step and the length
    of the other row; with fixed splits none may."""
    query = torch.randn(2, 4, 4, 32, device=device, dtype=dtype)
    query[:, :, 1] = query[:, :, 3]
    own = _random_segment(device, dtype, 2, 2, SPLIT, 32)

    def attend(row_order: list[int], lengths: list[int]) -> torch.Tensor:
        rows = Segment(own.key[row_order], own.value[row_order])
        out, _ = triton_attention.attend_rows(
            query[row_order],
            rows,
            torch.tensor(lengths, device=device),
            None,
            groups=None,
            scale=0.2,
            fixed=True,
        )
        return out

    first = attend([0, 1], [700, 0])[0, :, 3]
    second = attend([1, 0], [1500, 702])[1, :, 1]
    return float((first != second).sum())


def _random_segment(device: str, dtype: torch.dtype, *shape: int) -> Segment:
    key = torch.randn(*shape, device=device, dtype=dtype)
    value = torch.randn(*shape, device=device, dtype=dtype)
    return Segment(key, value)


def _random_projection(
    device: str, sizes: KernelSizes, dtype: torch.dtype, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight (out, in) and activations (rows, in)."""
    weight = torch.randn(*sizes.weight, device=device).to(dtype)
    x = torch.randn(rows, sizes.weight[1], device=device).to(dtype)
    return weight, x


def _reference_attention(
    query: torch.Tensor, segment: Segment, visible: torch.Tensor, scale: float
) -> Attention:
    """Output and log-sum-exp in float64: query (B, heads, T, d), visible (B, T, entries)."""
    group = query.shape[1] // segment.key.shape[1]
    key = segment.key.double().repeat_interleave(group, 1)
    value = segment.value.double().repeat_interleave(group, 1)
    scores = query.double() @ key.transpose(2, 3) * scale
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    return Attention((scores - lse[..., None]).exp().nan_to_num(0.0) @ value, lse)


def _reference_low_bit(weight: torch.Tensor, x: torch.Tensor, bits: int) -> torch.Tensor:
    levels, scale = quantize(weight, bits)
    return F.linear(x.double(), dequantize(levels, scale, bits).double())


def _relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest expected value."""
    return float((value.double() - expected).abs().max() / expected.abs().max())


# ------------------------------------------------------------------------------------------- tokens


def _tokens_unlike_generate(device: str, draft: Draft, tiny: bool) -> float:
    """Tokens of three ragged rows in float32 that differ from `generate`'s."""
    model = small_llama(device, torch.float32)
    ids, mask = _ragged_prompts(device, 70 if tiny else 1200)
    options: dict[str, Any] = {"max_new_tokens": 4 if tiny else 48, "do_sample": False}
    expected = model.generate(input_ids=ids, attention_mask=mask, **options)
    drafted = sparse_to_dense(model, draft, max_num_seqs=2).generate(
        ids, attention_mask=mask, **options
    )
    return float((drafted != expected).sum())


def _tokens_unlike_strict_dense(device: str) -> float:
    """Tokens that a draft changes in bfloat16 under `strict`."""
    model = small_llama(device, torch.bfloat16)
    ids, mask = _ragged_prompts(device, 1200)

    def generate(draft: Draft) -> torch.Tensor:
        engine = sparse_to_dense(model, draft, max_num_seqs=2, strict=8)
        return engine.generate(ids, attention_mask=mask, max_new_tokens=48, do_sample=False)

    lookup = generate(Draft("ngram", gamma=1))
    sparse = generate(Draft("std", keep=0.2, gamma=5))
    return float((lookup != sparse).sum())


def _ragged_prompts(device: str, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, padded on the left."""
    lengths = torch.tensor([longest, longest - 3, longest // 2])
    ids = torch.randint(1, 96, (3, longest), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(longest) >= longest - lengths[:, None]
    return ids.to(device), mask.long().to(device)
