"""Arguments of the C++ kernels. Importable without PyTorch and without this package."""

from __future__ import annotations

import ctypes
from typing import Any

_C_TYPES: dict[str, Any] = {
    "pointer": ctypes.c_void_p,
    "int64": ctypes.c_int64,
    "int": ctypes.c_int,
    "float": ctypes.c_float,
}


def _signature(*declarations: str) -> dict[str, Any]:
    """C types by argument name, in the kernel's order, from lines such as "pointer x y"."""
    types = {}
    for declaration in declarations:
        type_name, *names = declaration.split()
        types.update(dict.fromkeys(names, _C_TYPES[type_name]))
    return types


_LOW_BIT_LINEAR = _signature(
    "pointer x weight scale offset bias y", "int rows in_channels out_channels threads"
)

SIGNATURES: dict[str, dict[str, Any]] = {
    "attend_rows": _signature(
        "pointer query key value",
        "int64 row_stride head_stride",
        "pointer prefix_key prefix_value",
        "int64 prefix_stride prefix_head_stride",
        "pointer lengths prefix_of_row prefix_lengths",
        "int rows heads kv_heads width dim prefixes",
        "float scale",
        "pointer output logsumexp",
        "int threads",
    ),
    "attend_chunk": _signature(
        "pointer query segments",
        "int num_segments heads kv_heads width dim",
        "float scale",
        "pointer output logsumexp",
        "int threads",
    ),
    "write_rows": _signature(
        "pointer new",
        "int64 row_stride head_stride token_stride",
        "pointer cache",
        "int64 cache_row_stride cache_head_stride",
        "pointer lengths",
        "int rows kv_heads width dim",
    ),
    "linear": _signature("pointer x weight up bias y", "int rows in_channels out_channels threads"),
    "rms_norm": _signature("pointer x weight y", "int rows width", "float eps"),
    "int8": _LOW_BIT_LINEAR,
    "int4": _LOW_BIT_LINEAR,
    "sparse": _signature(
        "pointer x weight y", "int rows in_channels out_channels", "float threshold", "int threads"
    ),
    "draw": _signature(
        "pointer scores seeds seeded positions tokens", "int rows width vocabulary threads"
    ),
}
