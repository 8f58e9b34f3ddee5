"""Fixtures of the kernels' tests. The Triton kernels run on the GPU if there is one, otherwise in
Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from jobs.suites.shared import triton_interpreter
from std_core.kernels.shared.segments import Attention, PrefixGroups, Segment


@pytest.fixture(scope="session")
def device() -> str:
    """Where the Triton kernels run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", autouse=True)
def bfloat16_products() -> Iterator[None]:
    with triton_interpreter.bfloat16_products():
        yield


@pytest.fixture
def row_independent_products() -> Iterator[None]:
    with triton_interpreter.row_independent_products():
        yield


@pytest.fixture(scope="session")
def reference_rows() -> Callable[..., Attention]:
    """The definition of `attend_rows`."""
    return _reference_rows


def _reference_rows(
    query: torch.Tensor,
    own: Segment,
    lengths: torch.Tensor,
    prefix: Segment | None,
    groups: PrefixGroups | None,
    scale: float,
) -> Attention:
    """One softmax per row, head and token, in float64 on the CPU."""
    query = query.cpu().double()
    output = torch.empty_like(query)
    logsumexp = torch.empty(query.shape[:3], dtype=torch.float64)
    rows, heads, width, _ = query.shape
    heads_per_kv = heads // own.key.shape[1]
    for row, head, t in torch.cartesian_prod(*map(torch.arange, (rows, heads, width))).tolist():
        kv_head = head // heads_per_kv
        visible = int(lengths[row]) + t + 1
        key, value = (x[row, kv_head, :visible].cpu().double() for x in own)
        if prefix is not None and groups is not None and groups.prefix_of_row[row] >= 0:
            index = int(groups.prefix_of_row[row])
            shared = int(groups.prefix_lengths[index])
            key = torch.cat([prefix.key[index, kv_head, :shared].cpu().double(), key])
            value = torch.cat([prefix.value[index, kv_head, :shared].cpu().double(), value])
        scores = key @ query[row, head, t] * scale
        output[row, head, t] = scores.softmax(0) @ value
        logsumexp[row, head, t] = scores.logsumexp(0)
    return Attention(output, logsumexp)
