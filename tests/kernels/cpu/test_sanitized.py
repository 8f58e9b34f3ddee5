"""The C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer, on any CPU.

They are compiled with `emulated/immintrin.h`, which has their AVX-512 intrinsics in plain C++. The
tests of the kernels then run in a child process, where none of them is skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from std_core.kernels.cpu import loader

EMULATED = Path(__file__).parent / "emulated"
TESTS = Path(__file__).parents[1]
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
FLAGS = ("-std=c++17", "-O1", "-fopenmp", "-fPIC", "-ffp-contract=off", "-w", "-Wno-psabi")
# the compiled variants, and of each operation the tests that draw small cases
SELECTED = (
    "compiled and (equals or causal)"
    " or cpp_sampler or linear_and_swiglu or rms_norm or product_equals or sparse"
)


def runtime(name: str) -> str | None:
    """A sanitizer's library; None where it is not installed."""
    if shutil.which("g++") is None:
        return None
    found = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return found if os.path.isabs(found) else None


RUNTIMES = [runtime("libasan.so"), runtime("libubsan.so")]
pytestmark = pytest.mark.skipif(None in RUNTIMES, reason="there is no g++ with sanitizers")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized")
    objects = [folder / f"{name}.o" for name in loader.SOURCES]
    compilers = [
        subprocess.Popen(
            [
                *("g++", *FLAGS, *SANITIZE, "-D__AVX512BF16__", f"-I{EMULATED}"),
                *("-c", str(loader.FOLDER / name), "-o", str(target)),
            ]
        )
        for name, target in zip(loader.SOURCES, objects, strict=True)
    ]
    assert [compiler.wait() for compiler in compilers] == [0] * len(objects)
    path = folder / "kernels.so"
    subprocess.run(["g++", "-shared", *SANITIZE, "-o", str(path), *map(str, objects)], check=True)
    return path


def run_sanitized(library: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(filter(None, RUNTIMES)),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "PYTHONMALLOC": "malloc",  # blocks that the sanitizer sees one by one
        "PYTHONPATH": str(EMULATED),
        "EMULATED_KERNELS": str(library),
        "OMP_NUM_THREADS": "2",
    }
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, timeout=600
    )


def test_the_kernels_tests_pass_without_a_finding(library: Path) -> None:
    files = ["attention", "gumbel_noise", "linear", "projections"]
    done = run_sanitized(
        library,
        *("-m", "pytest", "-p", "emulated_kernels", "-k", SELECTED),
        *(str(TESTS / f"test_{name}.py") for name in files),
    )
    report = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, report
    summary = re.search(r"(\d+) passed.*", done.stdout)
    assert summary is not None, report
    assert int(summary[1]) >= 7, report
    assert "skipped" not in summary[0], report


@pytest.mark.parametrize("too_far", [0, 1])
def test_reading_behind_a_row_is_found(library: Path, too_far: int) -> None:
    """The sanitizers do see the kernels' accesses."""
    preload = loader._openmp_runtime()
    code = f"""
import ctypes
for runtime in {preload!r}:
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
x, weight, y = ((ctypes.c_float * 200)() for _ in range(3))
kernel = ctypes.CDLL({str(library)!r}).rms_norm_float
kernel.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int] * 2 + [ctypes.c_float]
kernel(x, weight, y, 1, 200 + {too_far}, 1e-6)
"""
    done = run_sanitized(library, "-S", "-c", code)
    assert (done.returncode != 0) == bool(too_far), done.stderr
    assert ("heap-buffer-overflow" in done.stderr) == bool(too_far)
