"""Where the Triton kernels are tested: on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", autouse=True)
def bfloat16_products() -> Iterator[None]:
    """The interpreter of Triton 3.8 keeps bfloat16 as 16 bits without a type, and multiplies these as whole numbers."""
    theirs = interpreter.InterpreterBuilder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return theirs(self, widened(a), widened(b), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield
