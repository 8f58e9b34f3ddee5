from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pipeline
from pipeline.output.folder import OutputFolder
from pipeline.records import RequestError, UsageError
from tests.pipeline.output.stub_output import (
    Clock,
    opened,
    row,
)


def test_readers_are_exact_while_rows_are_replaced(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement happens after a reader has listed the ledger and before it reads parts."""
    uri = str(tmp_path)
    with opened(uri, clock) as output:
        output.add(row(1, "error"))
    record_names = OutputFolder.record_names
    retry = opened(uri, clock, retry_failed=True)
    retry.add(row(1))

    def names_before_the_replacement(output: OutputFolder) -> list[str]:
        names = record_names(output)
        monkeypatch.undo()
        retry.flush()
        return names

    monkeypatch.setattr(OutputFolder, "record_names", names_before_the_replacement)
    assert pipeline.read(uri)["status"].to_pylist() == ["success"]
    retry.close()


def test_reading_needs_no_ray(tmp_path: Path, clock: Clock) -> None:
    with opened(str(tmp_path), clock) as output:
        output.add(row(1))
    script = "import sys, pipeline; print(len(pipeline.read(sys.argv[1])), 'ray' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["1", "False"]


def test_reading_a_folder_that_is_no_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no output"):
        pipeline.read(str(tmp_path))


def test_a_part_whose_checksum_differs_is_not_read(tmp_path: Path, clock: Clock) -> None:
    with opened(str(tmp_path), clock) as output:
        output.add(row(1))
    (part,) = tmp_path.glob("part-*")
    data = bytearray(part.read_bytes())
    data[20] ^= 1
    part.write_bytes(data)
    with pytest.raises(RequestError, match="checksum"):
        pipeline.read(str(tmp_path))
