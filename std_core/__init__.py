"""The decoding method: models, KV caches, selection of what a draft sees, acceptance, the decode
loop, the engine.

Knows nothing of Ray, files, URLs, Parquet or video codecs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from std_core.generate import sparse_to_dense as sparse_to_dense


def __getattr__(name: str) -> Any:
    """`sparse_to_dense`, when it is asked for: processes that only decode video import this package
    without torch."""
    if name == "sparse_to_dense":
        from std_core.generate import sparse_to_dense

        return sparse_to_dense
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
