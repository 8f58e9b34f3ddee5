"""Bulk captioning of video archives: manifest → probe → plan → frames → engines → Parquet parts and
ledger. README.md in this folder describes the way of a request and lists the files."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.output.reader import read
    from pipeline.video.load import load_video

__all__ = ["load_video", "read"]

# imported on first use, since most of the package does without pyarrow and PyAV
_MODULES = {"load_video": "pipeline.video.load", "read": "pipeline.output.reader"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
