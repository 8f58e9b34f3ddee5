"""The decoding method: models, KV caches, draft views, acceptance, decode rounds, the engine.

Knows nothing of Ray, files, URLs, Parquet or video codecs. See `README.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from std_core.generate import sparse_to_dense as sparse_to_dense


def __getattr__(name: str) -> Any:
    """Import `sparse_to_dense` on first access.

    Processes that only decode video import this package, and must not load torch.
    """
    if name == "sparse_to_dense":
        from std_core.generate import sparse_to_dense

        return sparse_to_dense
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
