from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import storage
from pipeline.output import lease
from pipeline.output.folder import OutputFolder, part_file, record_file
from pipeline.output.lease import LeaseLost
from pipeline.output.ledger import part_name
from pipeline.output.schema import RESULT_SCHEMA
from pipeline.output.writer import OutputWriter, open_output, wait_for_output
from pipeline.records import RequestError, UsageError

EMPTY = pa.schema([])


class Clock:
    """Time that passes by `sleep`, or by assignment."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


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


def plain(uri: str) -> list[int]:
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


# --- an output that is not empty


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
    assert ids(pipeline.read(uri)) == plain(uri) == [1, 2]


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
        assert plain(uri) == [1]


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
    assert ids(pipeline.read(uri)) == plain(uri) == [0, 1, 2, 3]
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
    assert plain(uri) == [0, 0, 1, 1, 2, 3]
    with opened(uri, clock, retry_failed=again) as resumed:
        assert plain(uri) == [0, 1, 2, 3]
        assert {int.from_bytes(i, "big") for i in resumed.done} == (
            {0, 1} if again else {0, 1, 2, 3}
        )
        if again:
            resumed.add(row(2))
            resumed.add(row(3, "error"))
    assert ids(pipeline.read(uri)) == plain(uri) == [0, 1, 2, 3]


# --- one driver at a time


def test_a_second_driver_is_refused(tmp_path: Path, clock: Clock) -> None:
    uri = str(tmp_path)
    with opened(uri, clock) as output:
        file = tmp_path / "_lease" / "1.json"

        def renew(seconds: float) -> None:
            clock.sleep(seconds)
            file.write_text(json.dumps(json.loads(file.read_text()) | {"renewed": clock()}))

        with pytest.raises(UsageError, match="another driver"):
            open_output(OutputFolder(uri), EMPTY, clock=clock, sleep=renew)
        output.add(row(1))
    assert ids(pipeline.read(uri)) == [1]


def test_opening_waits_until_a_dead_drivers_lease_expires(folder: str, clock: Clock) -> None:
    output = opened(folder, clock)
    output.stop()
    start = clock.now
    opened(folder, clock).close()
    assert lease.EXPIRE_S < clock.now - start <= lease.EXPIRE_S + 2


def test_a_dead_driver_whose_clock_is_ahead_is_not_waited_for_longer(
    tmp_path: Path, clock: Clock
) -> None:
    clock.now += 5000
    opened(str(tmp_path), clock).stop()
    clock.now -= 5000
    opened(str(tmp_path), clock).close()
    assert clock.now <= 1000 + lease.EXPIRE_S + 2


def test_waiting_for_a_lease_changes_nothing(folder: str, clock: Clock) -> None:
    """Opening the output afterwards waits for nothing. A new output is free at once."""
    uri = storage.join(folder, "out")
    start = clock.now
    wait_for_output(OutputFolder(uri), clock, clock.sleep)
    opened(uri, clock).stop()
    before = files(uri)
    wait_for_output(OutputFolder(uri), clock, clock.sleep)
    waited = clock.now
    assert lease.EXPIRE_S < waited - start <= lease.EXPIRE_S + 2 and files(uri) == before
    opened(uri, clock).close()
    assert clock.now == waited


def test_a_lease_is_renewed(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed = threading.Event()
    put = storage.put
    monkeypatch.setattr(lease, "RENEW_S", 0.01)

    def seen(uri: str, data: bytes) -> None:
        put(uri, data)
        if json.loads(data).get("renewed") == 1003.0:
            renewed.set()

    monkeypatch.setattr(storage, "put", seen)
    output = opened(str(tmp_path), clock)
    clock.now += 3
    assert renewed.wait(30)
    output.close()


@pytest.mark.parametrize("where", ["before the part", "before the record"])
@pytest.mark.parametrize("grouping", ["same parts", "other parts"])
def test_a_driver_suspended_until_another_has_finished_changes_nothing(
    folder: str, clock: Clock, where: str, grouping: str
) -> None:
    a = opened(folder, clock)
    for i in range(4):
        a.add(row(i, text="by a"))
    put = storage.put_if_absent

    def everything_by_b(uri: str, data: bytes) -> bool:
        """A is suspended here, right after it checked its lease."""
        if ("/part-" in uri) != (where == "before the part"):
            return put(uri, data)
        patch.undo()
        crash(a, clock)
        with opened(folder, clock, rows_per_part=4 if grouping == "same parts" else 3) as b:
            for i in range(4):
                b.add(row(i, text="by b"))
        return put(uri, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "put_if_absent", everything_by_b)
        if where == "before the record" and grouping == "other parts":
            a.flush()  # too late to notice: the record names a part that B removed
        else:
            with pytest.raises(LeaseLost):
                a.flush()
    a.add(row(9))
    with pytest.raises(LeaseLost):
        a.flush()
    table = pipeline.read(folder)
    assert ids(table) == [0, 1, 2, 3]
    assert set(table["text"].to_pylist()) == {"by b"}
    with opened(folder, clock) as c:
        assert len(c.done) == 4
    if not folder.startswith("s3"):
        assert plain(folder) == [0, 1, 2, 3]


def test_a_driver_suspended_after_its_part_loses_its_lease(folder: str, clock: Clock) -> None:
    a = opened(folder, clock)
    a.add(row(1, text="by a"))
    put = storage.put_if_absent

    def pause(uri: str, data: bytes) -> bool:
        placed = put(uri, data)
        if "/part-" in uri:
            patch.undo()
            crash(a, clock)
            with opened(folder, clock) as b:
                assert b.done == set()
                b.add(row(1, text="by b"))
        return placed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "put_if_absent", pause)
        with pytest.raises(LeaseLost):
            a.flush()
    assert pipeline.read(folder)["text"].to_pylist() == ["by b"]


def test_late_files_of_an_older_driver_are_replaced(tmp_path: Path, clock: Clock) -> None:
    """A writes files of the same names after B has removed leftovers."""
    uri = str(tmp_path)
    a = opened(uri, clock)
    a.add(row(1, text="by a"))
    a.flush()
    late = {
        path: path.read_bytes() for path in [*tmp_path.glob("part-*"), *tmp_path.glob("_ledger/*")]
    }
    for path in late:
        path.unlink()
    crash(a, clock)
    with opened(uri, clock) as b:
        for path, data in late.items():
            path.write_bytes(data)
        b.add(row(1, text="by b"))
    assert pipeline.read(uri)["text"].to_pylist() == ["by b"]
    assert plain(uri) == [1]


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


# --- any sequence of steps

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 11), st.booleans()),
        st.tuples(
            st.sampled_from(
                ["flush", "close", "retry", "crash", "crash in commit", "crash in clean-up"]
            )
        ),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(STEPS, st.integers(1, 4))
def test_after_any_sequence_of_steps_every_row_is_there_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, ...]], rows_per_part: int
) -> None:
    """Rows are added, committed and retried; drivers end between any two writes.

    The model: `kept` are the committed rows, each with its last committed status. Rows that were
    only added may be there or not."""
    uri = str(tmp_path_factory.mktemp("out") / "o")
    clock = Clock()
    output = opened(uri, clock, rows_per_part=rows_per_part)
    added: dict[int, str] = {}

    def reopen(**options: bool) -> OutputWriter:
        return opened(uri, clock, rows_per_part=rows_per_part, **options)

    def committed() -> dict[int, str]:
        table = pipeline.read(uri)
        assert len(set(ids(table))) == len(table)
        return {
            int(i, 16): s
            for i, s in zip(
                table["request_id"].to_pylist(), table["status"].to_pylist(), strict=True
            )
        }

    for step, *arguments in steps:
        kept = committed()
        if step == "add":
            i = arguments[0]
            status = "error" if arguments[1] else "success"
            if bytes.fromhex(hex_id(i)) not in output.done:
                output.add(row(i, status))
                added[i] = status
        elif step == "flush":
            output.flush()
            kept |= added
            assert committed() == kept
        elif step in ("close", "retry"):
            output.close()
            kept |= added
            assert committed() == kept
            assert plain(uri) == sorted(kept)
            output = reopen(retry_failed=step == "retry")
            added = {}
        else:
            with pytest.MonkeyPatch.context() as patch:
                if step == "crash in commit":
                    fail_records(patch)
                elif step == "crash in clean-up":
                    patch.setattr(storage, "delete", _raise)
                try:
                    if step != "crash":
                        output.flush()
                except RequestError:
                    pass
                crash(output, clock)
            now = committed()
            assert kept.items() - {(i, s) for i, s in kept.items() if i in added} <= now.items()
            assert set(now) <= set(kept) | set(added)
            output = reopen()
            added = {}
            assert committed() == now
            assert plain(uri) == sorted(now)
            assert {int.from_bytes(i, "big") for i in output.done} == set(now)
            assert output.totals["requests"] == len(now)
    final = committed() | added
    output.close()
    assert committed() == final
    assert plain(uri) == sorted(final)
    assert output.totals["requests"] == len(final)
    assert output.totals["errors"] == sum(status == "error" for status in final.values())


def _raise(uri: str) -> None:
    raise RequestError("storage_error", f"{uri}: the machine is gone")
