"""Bulk captioning of video archives: manifest → probe → plan → frames → engines → Parquet parts and
ledger. README.md in this folder describes the way of a request and lists the files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.output.reader import read

__all__ = ["read"]


def __getattr__(name: str) -> object:
    """Imports `pipeline.read` on first use, since most of the package does without pyarrow."""
    if name != "read":
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    from pipeline.output.reader import read

    return read
