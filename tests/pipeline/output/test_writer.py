from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pipeline
from pipeline import storage
from pipeline.output.ledger import part_name
from pipeline.output.schema import RESULT_SCHEMA
from pipeline.records import RequestError
from tests.pipeline.output.stub_output import (
    Clock,
    crash,
    fail_records,
    hex_id,
    ids,
    opened,
    plain_read,
    row,
)

# --- parts and records


def test_rows_come_back_with_one_schema(folder: str, clock: Clock) -> None:
    carried = pa.schema({"tag": pa.string(), "input_text": pa.int8()})
    with opened(folder, clock, carried) as output:
        output.add(
            row(
                1, tag="x", input_text=3, frame_pts=[0.0, 0.5], num_generated_tokens=7, kv_keep=0.25
            )
        )
        output.add(row(2, "error", tag=None))
        output.add(row(3, "truncated", num_generated_tokens=5))
    table = pipeline.read(folder)
    assert table.schema == pa.schema([*RESULT_SCHEMA, *carried])
    one, three, two = sorted(table.to_pylist(), key=lambda r: r["status"] == "error")[:3]
    assert (one["tag"], one["input_text"], one["frame_pts"], one["text"]) == (
        "x",
        3,
        [0.0, 0.5],
        "text 1",
    )
    assert (two["status"], two["error_code"], two["tag"], two["num_generated_tokens"]) == (
        "error",
        "not_found",
        None,
        None,
    )
    assert three["created_at"].timestamp() == 1000.0
    assert output.totals["requests"] == 3
    assert (
        output.totals["new"],
        output.totals["errors"],
        output.totals["num_generated_tokens"],
    ) == (3, 1, 12)


def test_parts_are_named_by_their_ids_and_recorded(folder: str, clock: Clock) -> None:
    with opened(folder, clock, rows_per_part=3) as output:
        for i in range(7):
            output.add(row(i))
        output.add(row(7, "error"))
    names = [name for name in storage.list_names(folder) if name.startswith("part-")]
    assert len(names) == 4
    for name in names:
        whole = storage.read_bytes(storage.join(folder, name))
        record = json.loads(
            storage.read_bytes(storage.join(folder, "_ledger", name[5:-8] + ".json"))
        )
        table = pq.read_table(pa.BufferReader(whole))
        assert record["ids"] == table["request_id"].to_pylist()
        assert (record["rows"], record["size"], record["epoch"]) == (len(table), len(whole), 1)
        assert (
            name == f"part-{part_name([bytes.fromhex(i) for i in reversed(record['ids'])])}.parquet"
        )
        assert len(set(table["status"].to_pylist())) == 1  # error rows have parts of their own
        assert b"std-caption" in table.schema.metadata
    assert {n for n in storage.list_names(folder) if not n.startswith("part-")} == set()


def test_many_parts(folder: str, clock: Clock) -> None:
    with opened(folder, clock, rows_per_part=1) as output:
        for i in range(33):
            output.add(row(i))
    assert ids(pipeline.read(folder)) == list(range(33))
    with opened(folder, clock) as again:
        assert len(again.done) == again.totals["requests"] == 33


def test_a_part_is_written_when_its_oldest_row_is_a_minute_old(
    tmp_path: Path, clock: Clock
) -> None:
    output = opened(str(tmp_path), clock)
    output.add(row(1))
    clock.now += 59
    output.add(row(2, "error"))
    output.flush_due()
    assert len(pipeline.read(str(tmp_path))) == 0
    clock.now += 1
    output.flush_due()
    assert ids(pipeline.read(str(tmp_path))) == [1]
    clock.now += 59
    output.add(row(3))
    assert ids(pipeline.read(str(tmp_path))) == [1, 2]
    output.close()
    assert ids(pipeline.read(str(tmp_path))) == [1, 2, 3]


def test_all_failed_and_all_succeeded_have_one_schema(tmp_path: Path, clock: Clock) -> None:
    for name, status in (("a", "error"), ("b", "success")):
        with opened(str(tmp_path / name), clock) as output:
            output.add(row(1, status))
    assert pipeline.read(str(tmp_path / "a")).schema == pipeline.read(str(tmp_path / "b")).schema


def test_unknown_columns_and_repeated_requests_are_refused(tmp_path: Path, clock: Clock) -> None:
    with opened(str(tmp_path), clock) as output:
        output.add(row(1))
        with pytest.raises(ValueError, match="has its row already"):
            output.add(row(1))
        with pytest.raises(ValueError, match="no column txet"):
            output.add(row(2, txet=""))
    assert ids(pipeline.read(str(tmp_path))) == [1]


def test_file_names_that_are_not_unicode_are_escaped(tmp_path: Path, clock: Clock) -> None:
    with opened(str(tmp_path), clock) as output:
        output.add(row(1, video_uri="/v/\udcff"))
    assert pipeline.read(str(tmp_path))["video_uri"].to_pylist() == ["/v/\\udcff"]


def test_a_second_run_knows_which_requests_have_a_row(folder: str, clock: Clock) -> None:
    with opened(folder, clock) as output:
        output.add(row(1))
        output.add(row(2, "error"))
        output.write_summary({"requests": 2})
    before = clock.now
    with opened(folder, clock) as again:
        assert again.done == {bytes.fromhex(hex_id(i)) for i in (1, 2)}
        assert again.failed == {bytes.fromhex(hex_id(2))}
        assert again.totals["requests"] == 2
        assert again.totals["new"] == 0
    assert clock.now == before  # a released lease needs no waiting
    assert json.loads(storage.read_bytes(storage.join(folder, "_summary.json"))) == {"requests": 2}
    assert storage.list_names(storage.join(folder, "_lease")) == ["2.json"]


def test_a_commit_that_is_repeated_after_a_failure_is_there_once(
    tmp_path: Path, clock: Clock
) -> None:
    uri = str(tmp_path)
    output = opened(uri, clock)
    output.add(row(1))
    with pytest.MonkeyPatch.context() as patch:
        fail_records(patch)
        with pytest.raises(RequestError):
            output.flush()
    output.add(row(2))
    output.close()
    assert ids(pipeline.read(uri)) == plain_read(uri) == [1, 2]


def test_closing_fails_if_a_part_is_missing(tmp_path: Path, clock: Clock) -> None:
    output = opened(str(tmp_path), clock)
    output.add(row(1))
    output.flush()
    for part in tmp_path.glob("part-*"):
        part.unlink()
    with pytest.raises(RequestError, match="run again"):
        output.close()


# --- retries


def test_retried_rows_replace_error_rows(folder: str, clock: Clock) -> None:
    with opened(folder, clock) as output:
        output.add(row(1))
        for i in (2, 3):
            output.add(row(i, "error"))
    with opened(folder, clock, retry_failed=True) as retry:
        assert {int.from_bytes(i, "big") for i in retry.done} == {1}
        retry.add(row(2))
        retry.add(row(3, "error", error_message="again"))
        retry.flush()
    table = pipeline.read(folder).sort_by("request_id")
    assert table["status"].to_pylist() == ["success", "success", "error"]
    assert table["error_message"].to_pylist()[2] == "again"
    assert len([n for n in storage.list_names(folder) if n.startswith("part-")]) == 3
    totals = retry.totals
    assert (totals["requests"], totals["new"], totals["errors"]) == (3, 2, 1)


def test_a_retry_that_fails_again_replaces_its_error_row(tmp_path: Path, clock: Clock) -> None:
    uri = str(tmp_path)
    with opened(uri, clock) as output:
        output.add(row(1, "error"))
    for attempt in ("second", "third"):
        with opened(uri, clock, retry_failed=True) as retry:
            retry.add(row(1, "error", error_message=attempt))
        assert pipeline.read(uri)["error_message"].to_pylist() == [attempt]
        assert plain_read(uri) == [1]


def test_a_retry_of_some_error_rows_keeps_the_others(tmp_path: Path, clock: Clock) -> None:
    uri = str(tmp_path)
    with opened(uri, clock) as output:
        for i in range(4):
            output.add(row(i, "error"))
    retry = opened(uri, clock, retry_failed=True)
    retry.add(row(1))
    retry.flush()
    assert ids(pipeline.read(uri)) == [0, 1, 2, 3]  # also while the old part is still there
    retry.close()
    assert ids(pipeline.read(uri)) == plain_read(uri) == [0, 1, 2, 3]
    assert retry.totals["errors"] == 3


@pytest.mark.parametrize("again", [False, True])
def test_half_done_replacements_are_finished(tmp_path: Path, clock: Clock, again: bool) -> None:
    uri = str(tmp_path)
    with opened(uri, clock) as output:
        for i in range(4):
            output.add(row(i, "error"))
    retry = opened(uri, clock, retry_failed=True)
    for i in (0, 1):
        retry.add(row(i))
    retry.flush()
    crash(retry, clock)
    assert plain_read(uri) == [0, 0, 1, 1, 2, 3]
    with opened(uri, clock, retry_failed=again) as resumed:
        assert plain_read(uri) == [0, 1, 2, 3]
        assert {int.from_bytes(i, "big") for i in resumed.done} == (
            {0, 1} if again else {0, 1, 2, 3}
        )
        if again:
            resumed.add(row(2))
            resumed.add(row(3, "error"))
    assert ids(pipeline.read(uri)) == plain_read(uri) == [0, 1, 2, 3]
