"""Bulk captioning of video archives: manifest → probe → plan → frames → engines → Parquet parts and
ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.output.writer import read

__all__ = ["read"]


def __getattr__(name: str) -> object:
    """`pipeline.read(output)`, imported when first used: most parts of the package need no
    Parquet."""
    if name != "read":
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    from pipeline.output.writer import read

    return read
