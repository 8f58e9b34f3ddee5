"""Outputs of tests: a clock that the test moves, rows, and failures of storage."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pytest

from pipeline import storage
from pipeline.output import lease
from pipeline.output.folder import OutputFolder
from pipeline.output.schema import RESULT_SCHEMA
from pipeline.output.writer import OutputWriter, open_output
from pipeline.records import RequestError

EMPTY = pa.schema([])


class Clock:
    """Time that passes by `sleep`, or by assignment."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def opened(uri: str, clock: Clock, schema: pa.Schema = EMPTY, **options: Any) -> OutputWriter:
    return open_output(OutputFolder(uri), schema, clock=clock, sleep=clock.sleep, **options)


def hex_id(i: int) -> str:
    return f"{i:032x}"


def row(i: int, status: str = "success", **more: Any) -> dict[str, Any]:
    error = (
        {"error_code": "not_found", "error_message": "gone"}
        if status == "error"
        else {"text": f"text {i}"}
    )
    return (
        {"request_id": hex_id(i), "video_uri": f"/v/{i}", "prompt": "p", "status": status}
        | error
        | more
    )


def ids(table: pa.Table) -> list[int]:
    return sorted(int(i, 16) for i in table["request_id"].to_pylist())


def plain_read(uri: str) -> list[int]:
    """What a reader sees that does not follow the ledger (on a local disk)."""
    files = [str(path) for path in Path(uri).glob("part-*.parquet")]
    return ids(pyarrow.dataset.dataset(files, schema=RESULT_SCHEMA).to_table()) if files else []


def files(uri: str) -> set[str]:
    return {*storage.list_files(uri)}


def crash(output: OutputWriter, clock: Clock) -> None:
    """The process ends: nothing more is written, and the lease expires."""
    output.stop()
    clock.now += lease.EXPIRE_S + 1


def fail_records(patch: pytest.MonkeyPatch, after: int = 0) -> None:
    """Writing records fails after the first few: a crash between a part and its record."""
    put = storage.put_if_absent
    left = itertools.count(after, -1)

    def failing(uri: str, data: bytes) -> bool:
        if "/_ledger/" in uri and next(left) <= 0:
            raise RequestError("storage_error", f"{uri}: the machine is gone")
        return put(uri, data)

    patch.setattr(storage, "put_if_absent", failing)
