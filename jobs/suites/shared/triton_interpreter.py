"""Triton's interpreter in place of a GPU, for tests and for the rehearsal of the suite `gpu`.

`triton_on_cpu` sends CPU tensors to the Triton kernels; the interpreter runs them if
TRITON_INTERPRET=1 was set before Triton was imported. The other two functions replace the
interpreter's `tl.dot`, which calls `numpy.matmul` and differs from a GPU's in two properties:

- it keeps bfloat16 as untyped 16-bit integers and multiplies these as integers (Triton 3.8);
- it calls the BLAS library, whose kernels sum a row of the product in an order that may depend on
  the row's index in the tile (OpenBLAS on Haswell and Zen cores does this). A tensor core sums
  every row of a tile in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from std_core.kernels import dispatch


@contextmanager
def triton_on_cpu() -> Iterator[None]:
    """CPU tensors are computed by the Triton kernels."""
    devices = dispatch.TRITON_DEVICES | {"cpu"}
    with mock.patch.object(dispatch, "TRITON_DEVICES", devices):
        yield


@contextmanager
def bfloat16_products() -> Iterator[None]:
    """`tl.dot` of bfloat16 operands multiplies their values."""
    original = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, _widened(a), _widened(b), *rest)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield


@contextmanager
def row_independent_products() -> Iterator[None]:
    """`tl.dot` sums each element of the product over k = 0, 1, … in this order, whatever its row.

    For tests that compare bits; slower than the BLAS library's product.
    """

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left = _widened(a).data
        right = _widened(b).data
        product = np.zeros_like(d.data)
        for k in range(left.shape[1]):
            product += left[:, k, None].astype(product.dtype) * right[None, k].astype(product.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield


def _widened(x: Any) -> Any:
    """bfloat16 as float32, which holds all its values; other types unchanged."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
