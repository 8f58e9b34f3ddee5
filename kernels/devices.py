"""Which devices the Triton kernels serve: asked once per operation, in its public function."""

from __future__ import annotations

TRITON = {"cuda"}  # a rehearsal without a GPU, in Triton's interpreter, adds "cpu"
