"""pytest plugin: the library of `EMULATED_KERNELS` in place of the machine's own C++ kernels."""

from __future__ import annotations

import os
from pathlib import Path

from std_core.kernels.cpu import loader


def pytest_configure() -> None:
    kernels = loader._load(Path(os.environ["EMULATED_KERNELS"]))
    loader._kernels = lambda: kernels  # type: ignore[assignment]
