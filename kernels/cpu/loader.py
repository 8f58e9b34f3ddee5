"""Load the C++ kernels.

    supports(name, tensor) -> whether a kernel exists for the tensor's device and dtype
    kernel(name, dtype) -> the C function; `SIGNATURES` lists its arguments

The machine's own compiler builds the kernels on first use (`library.py`). Without AVX-512, without
a compiler or a library from an earlier run, or with STD_CAPTION_CPU_KERNELS=0 there are no kernels,
and PyTorch's operations are used.

The library is not linked to an OpenMP runtime: it uses the one that PyTorch has loaded. Two
runtimes in one process would slow each other down.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch

from std_core.kernels.cpu.library import Library, LibraryUnavailable, find_or_build
from std_core.kernels.cpu.signatures import SIGNATURES

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = ("attention.cpp", "linear.cpp", "draft_linear.cpp", "gumbel_noise.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-ffp-contract=off", "-w")
DTYPE_SUFFIXES = {torch.float32: "float", torch.bfloat16: "bf16"}


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
    """The library's kernels by name and dtype; empty where there is none."""
    enabled = os.environ.get("STD_CAPTION_CPU_KERNELS", "1") != "0"
    has_avx512 = "AVX512" in torch.backends.cpu.get_cpu_capability()
    if not enabled or not has_avx512:
        return {}
    try:
        return _load(find_or_build(_library()))
    except (LibraryUnavailable, OSError) as error:
        logger.warning("no C++ kernels, PyTorch's operations are used instead: %s", error)
        return {}


def _library() -> Library:
    """The kernels' library."""
    return Library(
        sources=tuple(FOLDER / name for name in SOURCES),
        headers=(FOLDER / "common.h",),
        flags=FLAGS,
        self_test=FOLDER / "self_test.py",
        preload=_openmp_runtime(),
    )


def _openmp_runtime() -> tuple[str, ...]:
    """Files of the OpenMP runtime that PyTorch has loaded into this process."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return ()
    fields = [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
    files = [line[5] for line in fields if len(line) == 6]
    runtimes = [file for file in files if re.match(r"lib(gomp|iomp5|omp)\b", Path(file).name)]
    return tuple(dict.fromkeys(runtimes))


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
