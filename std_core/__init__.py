"""The decoding method: models, KV caches, selection of what a draft sees, acceptance, the decode loop, the engine.

Knows nothing of Ray, files, URLs, Parquet or video codecs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from std_core.generate import sparse_to_dense as sparse_to_dense

# `kernels/` lies beside this package and must not be importable as top-level `kernels`, which is Hugging Face's; in a
# checkout it is reached as `std_core.kernels` through this line, in a wheel through pyproject's package-dir.
__path__.append(str(Path(__file__).resolve().parent.parent))


def __getattr__(name: str) -> Any:
    """`sparse_to_dense`, when it is asked for: processes that only decode video import this package without torch."""
    if name == "sparse_to_dense":
        from std_core.generate import sparse_to_dense

        return sparse_to_dense
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
