"""Test the C++ library in a process of its own: `self_test.py <library> <OpenMP runtime>...`.

Runs without PyTorch. A library that is broken may end the process, and that is what the exit code
then says.
"""

from __future__ import annotations

import ctypes
import math
import random
import resource
import sys
from typing import Any

from signatures import SIGNATURES  # this file's folder is where Python looks first

ROWS = 3
WIDTH = 70  # no multiple of a vector register
OUT = 5
EPS = 1e-6


def main(path: str, *preload: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer, not an accident
    for runtime in preload:
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(path)
    for name, signature in SIGNATURES.items():
        symbol = f"{name}_float"
        if hasattr(library, symbol):
            getattr(library, symbol).argtypes = list(signature.values())
            getattr(library, symbol).restype = None
    check_rms_norm(library.rms_norm_float)
    check_linear(library.linear_float)


def check_rms_norm(kernel: Any) -> None:
    x = numbers(ROWS * WIDTH)
    weight = numbers(WIDTH)
    y = (ctypes.c_float * (ROWS * WIDTH))()
    kernel(x, weight, y, ROWS, WIDTH, EPS)
    for row in range(ROWS):
        values = x[row * WIDTH : (row + 1) * WIDTH]
        norm = math.sqrt(sum(v * v for v in values) / WIDTH + EPS)
        for i, value in enumerate(values):
            check("rms_norm", y[row * WIDTH + i], value / norm * weight[i])


def check_linear(kernel: Any) -> None:
    x = numbers(ROWS * WIDTH)
    weight = numbers(OUT * WIDTH)
    bias = numbers(OUT)
    y = (ctypes.c_float * (ROWS * OUT))()
    kernel(x, weight, None, bias, y, ROWS, WIDTH, OUT, 2)
    for row in range(ROWS):
        for out in range(OUT):
            products = (x[row * WIDTH + i] * weight[out * WIDTH + i] for i in range(WIDTH))
            check("linear", y[row * OUT + out], sum(products) + bias[out])


def numbers(count: int) -> Any:
    rng = random.Random(count)
    return (ctypes.c_float * count)(*(rng.uniform(-1, 1) for _ in range(count)))


def check(name: str, got: float, want: float) -> None:
    if not abs(got - want) < 1e-4:
        raise ValueError(f"{name} gave {got} for {want}")


if __name__ == "__main__":
    main(*sys.argv[1:])
