from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pipeline
from pipeline import storage
from pipeline.output.folder import OutputFolder, part_file, record_file
from pipeline.output.ledger import part_name
from pipeline.records import RequestError, UsageError
from tests.pipeline.output.stub_output import (
    EMPTY,
    Clock,
    crash,
    fail_records,
    hex_id,
    ids,
    opened,
    row,
)


def assert_refused(folder: str, clock: Clock, message: str, schema: pa.Schema = EMPTY) -> None:
    before = {uri: storage.read_bytes(uri) for uri in storage.list_files(folder)}
    with pytest.raises(UsageError, match=message):
        opened(folder, clock, schema)
    assert {uri: storage.read_bytes(uri) for uri in storage.list_files(folder)} == before


@pytest.mark.parametrize("name", ["part-0.parquet", "part-" + "0" * 32 + ".parquet", "part-x.csv"])
def test_parts_of_another_program_are_refused_and_untouched(
    folder: str, clock: Clock, name: str
) -> None:
    stream = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1]}), stream)
    storage.put(storage.join(folder, name), stream.getvalue().to_pybytes())
    assert_refused(folder, clock, "not written by this program")
    storage.put(storage.join(folder, name), b"no parquet")
    assert_refused(folder, clock, "not written by this program")


def test_files_with_other_names_are_ignored(folder: str, clock: Clock) -> None:
    storage.put(storage.join(folder, "README.md"), b"mine")
    with opened(folder, clock) as output:
        output.add(row(1))
    assert storage.read_bytes(storage.join(folder, "README.md")) == b"mine"


def test_parts_without_a_ledger_are_refused_and_untouched(folder: str, clock: Clock) -> None:
    with opened(folder, clock) as output:
        output.add(row(1))
    for uri in [
        *storage.list_files(storage.join(folder, "_ledger")),
        storage.join(folder, "_ledger") + "/",
    ]:
        if uri.startswith("/") and uri.endswith("/"):
            Path(uri).rmdir()
        else:
            _delete_exactly(uri)
    assert_refused(folder, clock, "no _ledger/")


def _delete_exactly(uri: str) -> None:
    """Folder markers included."""
    if uri.endswith("/"):
        fs, name = storage._remote(uri)
        bucket, _, key = name.partition("/")
        fs.call_s3("delete_object", Bucket=bucket, Key=key)
    else:
        storage.delete(uri)


def test_other_columns_are_refused(folder: str, clock: Clock) -> None:
    with opened(folder, clock, pa.schema({"a": pa.int64(), "b": pa.string()})) as output:
        output.add(row(1, a=1))
    assert_refused(
        folder, clock, r"columns a differ", pa.schema({"a": pa.string(), "b": pa.string()})
    )
    assert_refused(folder, clock, r"columns a, b differ")
    assert_refused(folder, clock, "order", pa.schema({"b": pa.string(), "a": pa.int64()}))
    opened(folder, clock, pa.schema({"a": pa.int64(), "b": pa.string()}, {"pandas": "x"})).close()


@pytest.mark.parametrize(
    "damage",
    ["record is half", "record is gone", "part is gone", "part is short", "record has no rows"],
)
def test_damaged_commits_count_as_absent(folder: str, clock: Clock, damage: str) -> None:
    with opened(folder, clock, rows_per_part=2) as output:
        for i in range(4):
            output.add(row(i))
    name = part_name([bytes.fromhex(hex_id(i)) for i in (0, 1)])
    part = storage.join(folder, part_file(name))
    record = storage.join(folder, record_file(name))
    data = storage.read_bytes(part)
    text = storage.read_bytes(record)
    if damage == "record is half":
        storage.put(record, text[: len(text) // 2])
    elif damage == "record has no rows":
        storage.put(record, b"{}")
    elif damage == "record is gone":
        storage.delete(record)
    elif damage == "part is gone":
        storage.delete(part)
    else:
        storage.put(part, data[:-9])
    assert ids(pipeline.read(folder)) == [2, 3]
    with opened(folder, clock) as again:
        assert {int.from_bytes(i, "big") for i in again.done} == {2, 3}
        assert not storage.is_file(part)
        assert not storage.is_file(record)
        again.add(row(0))
        again.add(row(1))
    assert ids(pipeline.read(folder)) == [0, 1, 2, 3]


def test_a_crash_before_the_very_first_record(folder: str, clock: Clock) -> None:
    output = opened(folder, clock)
    output.add(row(1))
    with pytest.MonkeyPatch.context() as patch:
        fail_records(patch)
        with pytest.raises(RequestError):
            output.flush()
    crash(output, clock)
    assert [n for n in storage.list_names(folder) if n.startswith("part-")]
    with opened(folder, clock) as again:
        assert not [n for n in storage.list_names(folder) if n.startswith("part-")]
        assert again.done == set()
        again.add(row(1))
    assert ids(pipeline.read(folder)) == [1]


def test_an_unfinished_local_part_is_removed(tmp_path: Path, clock: Clock) -> None:
    opened(str(tmp_path), clock).close()
    half = tmp_path / f".part-{'0' * 32}.parquet.{'1' * 32}"
    half.write_bytes(b"PAR1")
    opened(str(tmp_path), clock).close()
    assert not half.exists()


def test_an_output_that_can_be_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    for below in ("file", "file/out", "file/a/b"):
        with pytest.raises(UsageError, match="file is a file"):
            OutputFolder(str(tmp_path / below)).check()
    for uri in ("http://host/out", "https://user:secret@host/out"):
        with pytest.raises(UsageError, match="only read") as caught:
            OutputFolder(uri).check()
        assert "secret" not in str(caught.value)
    for uri in (str(tmp_path), str(tmp_path / "new/out"), "s3://bucket/out"):
        OutputFolder(uri).check()


def test_foreign_parquet_beside_ours_is_named(
    folder: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("mine.parquet", "_mine.parquet", "notes.txt"):
        storage.put(storage.join(folder, name), b"mine")
    with opened(folder, clock) as output:
        output.add(row(1))
    assert [r.getMessage() for r in caplog.records if r.name == "pipeline.output.parts"] == [
        f"{storage.normalize(folder)} holds mine.parquet, not written by this program: "
        "readers of the whole folder read it too"
    ]
