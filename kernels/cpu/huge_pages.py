"""Huge memory pages for large CPU tensors (Linux only)."""

from __future__ import annotations

import ctypes
import functools
import sys

import torch

MADV_HUGEPAGE = 14
PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20


def advise_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Request huge pages for a tensor that has not been written yet; returns the tensor.

    This is advice: systems without transparent huge pages ignore it.
    """
    size = tensor.untyped_storage().nbytes()
    madvise = _madvise()
    if madvise is not None and size >= 2 * HUGE_PAGE_BYTES:
        start = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
        length = tensor.data_ptr() + size - start
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_HUGEPAGE)
    return tensor


@functools.cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
