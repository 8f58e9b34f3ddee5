"""The CPU kernels in C++, built by the machine's own compiler on first use.

    serves(name, tensor) -> whether there is a kernel for the tensor
    call(name, dtype, *arguments)

Without AVX-512, without a compiler, or with STD_CAPTION_CPU_KERNELS=0 there is none, and PyTorch's
operations serve. What is built lies in the user's cache folder under a hash of its sources,
compiler and instruction set. Its threads are PyTorch's: it is linked to no OpenMP runtime of its
own, so it finds the one that PyTorch has brought (two of them would stall each other)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

HERE = Path(__file__).parent
SOURCES = ("attention.cpp", "linear.cpp", "draft_linear.cpp", "gumbel_noise.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-ffp-contract=off", "-w")
KINDS = {torch.float32: "float", torch.bfloat16: "bf16"}
# of each kernel's arguments: p a tensor's address, l 64 bits, i 32 bits, f float
SIGNATURES = {
    "attend_rows": "ppp ll pp ll ppp iiiiii f pp i",
    "attend_chunk": "pp iiiii f pp i",
    "write_rows": "p lll p ll p iiii",
    "linear": "ppppp iii i",
    "rms_norm": "ppp ii f",
    "int8": "pppppp iii i",
    "int4": "pppppp iii i",
    "sparse": "ppp iii f i",
    "draw": "pppp p iii i",
}
TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}


ADVICE, PAGE, LARGE = 14, 4096, 2 << 20  # Linux's MADV_HUGEPAGE; bytes


def large_pages(memory: torch.Tensor) -> torch.Tensor:
    """The same, whose memory the system is asked to make of large pages when it is first written. A
    request, which systems that have none or allow none leave aside."""
    size = memory.untyped_storage().nbytes()
    advise = _advise()
    if advise is not None and size >= 2 * LARGE:
        first = -(-memory.data_ptr() // PAGE) * PAGE
        advise(ctypes.c_void_p(first), ctypes.c_size_t(memory.data_ptr() + size - first), ADVICE)
    return memory


@functools.cache
def _advise() -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def serves(name: str, of: torch.Tensor) -> bool:
    return of.device.type == "cpu" and (name, of.dtype) in _kernels()


def call(name: str, dtype: torch.dtype, *arguments: int | float) -> None:
    """Runs a kernel; tensors are given by their `data_ptr()`, 0 for none."""
    _kernels()[name, dtype](*arguments)


@functools.cache
def _kernels() -> dict[tuple[str, torch.dtype], ctypes._NamedFuncPointer]:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    wanted = os.environ.get("STD_CAPTION_CPU_KERNELS", "1") != "0"
    if not wanted or compiler is None or "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return {}
    try:
        built = _cache() / f"{_digest(compiler)}.so"
        if not built.exists():
            _build(compiler, built)
    except (OSError, subprocess.CalledProcessError) as error:
        logger.warning("the CPU kernels could not be built, PyTorch's operations serve: %s", error)
        return {}
    library = ctypes.CDLL(str(built))
    found = {}
    for name, signature in SIGNATURES.items():
        for dtype, kind in KINDS.items():
            if hasattr(library, f"{name}_{kind}"):  # without AVX512_BF16 there is none for bfloat16
                found[name, dtype] = kernel = getattr(library, f"{name}_{kind}")
                kernel.argtypes = [TYPES[c] for c in signature.replace(" ", "")]
                kernel.restype = None
    return found


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "std-caption"


def _digest(compiler: str) -> str:
    hashed = hashlib.sha256(repr((compiler, FLAGS)).encode())
    for name in ("common.h", *SOURCES):
        hashed.update((HERE / name).read_bytes())
    hashed.update(
        subprocess.run(
            [compiler, *FLAGS, "-Q", "--help=target"], capture_output=True, check=True
        ).stdout
    )
    return hashed.hexdigest()[:16]


def _build(compiler: str, built: Path) -> None:
    """Compiles beside the final place and moves there at once, so that engines which start together
    don't disturb one another."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        objects = [f"{folder}/{name}.o" for name in SOURCES]
        for name, made in zip(SOURCES, objects, strict=True):
            subprocess.run([compiler, *FLAGS, "-c", str(HERE / name), "-o", made], check=True)
        subprocess.run([compiler, "-shared", "-o", f"{folder}/all.so", *objects], check=True)
        os.replace(f"{folder}/all.so", built)
