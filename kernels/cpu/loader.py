"""Build and load the C++ kernels.

    supports(name, tensor) -> whether a kernel exists for the tensor's device and dtype
    kernel(name, dtype) -> the C function; `SIGNATURES` lists its arguments

The machine's own compiler builds the kernels on first use. The library lies in the user's cache
folder, named by a hash of its sources, compiler and instruction set. Without AVX-512, without a
compiler, or with STD_CAPTION_CPU_KERNELS=0 there are no kernels, and PyTorch's operations are used.

The library is not linked to an OpenMP runtime: it uses the one that PyTorch has loaded. Two
runtimes in one process would slow each other down.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = ("attention.cpp", "linear.cpp", "draft_linear.cpp", "gumbel_noise.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-ffp-contract=off", "-w")
DTYPE_SUFFIXES = {torch.float32: "float", torch.bfloat16: "bf16"}

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


def supports(name: str, tensor: torch.Tensor) -> bool:
    """Whether there is a C++ kernel of this name for the tensor's device and dtype."""
    return tensor.device.type == "cpu" and (name, tensor.dtype) in _kernels()


def kernel(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """The kernel of this name for a dtype.

    Its arguments are those of `SIGNATURES[name]`, by position: keyword arguments cost 1 to 5 µs per
    call, and a decode step makes hundreds of calls. Tensors are passed as their `data_ptr()`, 0 for
    none.
    """
    return _kernels()[name, dtype]


@functools.cache
def _kernels() -> dict[tuple[str, torch.dtype], Callable[..., None]]:
    """The library's kernels by name and dtype; empty where it cannot be built."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    enabled = os.environ.get("STD_CAPTION_CPU_KERNELS", "1") != "0"
    has_avx512 = "AVX512" in torch.backends.cpu.get_cpu_capability()
    if not enabled or compiler is None or not has_avx512:
        return {}
    try:
        library = _cache_folder() / f"{_build_hash(compiler)}.so"
        if not library.exists():
            _build(compiler, library)
    except (OSError, subprocess.CalledProcessError) as error:
        logger.warning(
            "cannot build the C++ kernels, PyTorch's operations are used instead: %s", error
        )
        return {}
    return _load(library)


def _load(path: Path) -> dict[tuple[str, torch.dtype], Callable[..., None]]:
    library = ctypes.CDLL(str(path))
    kernels: dict[tuple[str, torch.dtype], Callable[..., None]] = {}
    for name, signature in SIGNATURES.items():
        for dtype, suffix in DTYPE_SUFFIXES.items():
            symbol = f"{name}_{suffix}"
            if hasattr(library, symbol):  # bfloat16 kernels need AVX512_BF16
                function = getattr(library, symbol)
                function.argtypes = list(signature.values())
                function.restype = None
                kernels[name, dtype] = function
    return kernels


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "std-caption"


def _build_hash(compiler: str) -> str:
    """Hash of everything that the library depends on."""
    digest = hashlib.sha256(repr((compiler, FLAGS)).encode())
    for name in ("common.h", *SOURCES):
        digest.update((FOLDER / name).read_bytes())
    command = [compiler, *FLAGS, "-Q", "--help=target"]  # what -march=native means here
    digest.update(subprocess.run(command, capture_output=True, check=True).stdout)
    return digest.hexdigest()[:16]


def _build(compiler: str, library: Path) -> None:
    """Compile in a temporary folder and move the result into place.

    The move is atomic, so that engines which start at the same time do not disturb one another.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = [f"{folder}/{name}.o" for name in SOURCES]
        for name, target in zip(SOURCES, objects, strict=True):
            subprocess.run([compiler, *FLAGS, "-c", str(FOLDER / name), "-o", target], check=True)
        linked = f"{folder}/kernels.so"
        subprocess.run([compiler, "-shared", "-o", linked, *objects], check=True)
        os.replace(linked, library)
