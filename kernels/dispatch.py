"""Choice of the Triton kernels by device type; each operation's public function calls it once."""

from __future__ import annotations

import torch

# `jobs.suites.shared.triton_interpreter.triton_on_cpu` adds "cpu" for runs without a GPU
TRITON_DEVICES = frozenset({"cuda"})


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether operations on this tensor run in Triton."""
    return tensor.device.type in TRITON_DEVICES
