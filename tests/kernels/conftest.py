"""Where the Triton kernels are tested: on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from jobs.suites.shared import triton_interpreter


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", autouse=True)
def bfloat16_products() -> Iterator[None]:
    with triton_interpreter.bfloat16_products():
        yield


@pytest.fixture
def row_independent_products() -> Iterator[None]:
    with triton_interpreter.row_independent_products():
        yield
