from __future__ import annotations

import csv
import io
import json
import re
import tempfile
from collections.abc import Iterator
from datetime import datetime, timezone
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import storage
from pipeline.config import Job
from pipeline.intake import manifest, table_formats
from pipeline.intake.manifest import open_manifest
from pipeline.output import rows
from pipeline.output.schema import output_schema, to_table
from pipeline.records import (
    FailedRequest,
    InputRow,
    PendingRequest,
    RequestError,
    UsageError,
)

ROWS = [
    {"video": "a.mp4", "question": "Who?", "score": 1.5, "n": 1},
    {"video": "sub/b.mp4", "question": "Where?", "score": None, "n": 2},
    {"video": "/abs/c.mp4", "question": "When?\nAnd, why?", "score": 2.5, "n": 3},
    {"video": "s3://other/d.mp4", "question": "Who?", "score": 0.5, "n": 4},
]
FORMATS = ["parquet", "csv", "jsonl"]


def write(folder: str, format_: str, rows: list[dict[str, Any]], name: str = "m") -> str:
    uri = storage.join(folder, f"{name}.{format_}")
    if format_ == "parquet":
        stream = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows), stream)
        storage.put(uri, stream.getvalue().to_pybytes())
    elif format_ == "jsonl":
        storage.put(uri, "".join(json.dumps(row) + "\n" for row in rows).encode())
    else:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        storage.put(uri, text.getvalue().encode())
    return uri


def read_rows(uri: str, *prompts: str, **columns: str) -> list[InputRow]:
    return list(open_manifest(uri, prompts, **columns).rows())


def usage_error(uri: str, *prompts: str, **columns: str) -> str:
    with pytest.raises(UsageError) as caught:
        open_manifest(uri, prompts, **columns)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def touch(folder: str, *names: str) -> None:
    for name in names:
        storage.put(storage.join(folder, name), b"x")


# ------------------------------------------------------------------------- folders, globs and lists


def test_a_folder_gives_a_row_per_video_and_prompt(folder: str) -> None:
    touch(folder, "b.mp4", "a.MKV", "sub/c.webm", "notes.txt", ".h.mp4")
    found = read_rows(folder, "What?", "Who?")
    uris = [storage.join(folder, name) for name in ("a.MKV", "b.mp4", "sub/c.webm")]
    assert [(item.video_uri, item.prompt) for item in found] == [
        (u, p) for u in uris for p in ("What?", "Who?")
    ]
    assert all(
        item.columns == {} and item.given_id is None and item.occurrence == 0 for item in found
    )
    assert open_manifest(folder, ["x"]).input_schema == pa.schema([])


def test_a_glob_and_a_single_video(folder: str) -> None:
    touch(folder, "a.mp4", "b.mov", "c.txt", "x/d.bin", "odd [1], {2}.mp4")
    assert len(read_rows(storage.join(folder, "?.{mp4,mov}"), "p")) == 2
    assert len(read_rows(storage.join(folder, "**"), "p")) == 3
    assert len(read_rows(storage.join(folder, "x/*.bin"), "p")) == 1
    assert [i.video_uri for i in read_rows(storage.join(folder, "x/d.bin"), "p")] == [
        storage.join(folder, "x/d.bin")
    ]
    assert len(read_rows(storage.join(folder, "odd [1], {2}.mp4"), "p")) == 1


def test_the_same_prompt_twice_is_two_requests(folder: str) -> None:
    touch(folder, "a.mp4")
    assert [item.occurrence for item in read_rows(folder, "p", "q", "p")] == [0, 0, 1]


def test_a_text_file_names_one_video_per_line(folder: str) -> None:
    storage.put(
        storage.join(folder, "l/list.txt"),
        "\ufeffa b.mp4\r\n\n../#1.mp4\ns3://o/c.mp4\n/d.mp4".encode(),
    )
    found = [item.video_uri for item in read_rows(storage.join(folder, "l/list.txt"), "p")]
    assert found == [
        storage.join(folder, "l/a b.mp4"),
        storage.join(folder, "#1.mp4"),
        "s3://o/c.mp4",
        "/d.mp4",
    ]


def test_missing_or_empty_inputs_are_usage_errors(folder: str) -> None:
    gone = storage.join(folder, "nobody")
    assert usage_error(gone, "p") == f"{gone}: there is no such file or folder"
    assert usage_error(gone + ".csv", "p") == f"{gone}.csv: there is no such file"
    assert "no file matches" in usage_error(storage.join(folder, "*.mp4"), "p")
    touch(folder, "notes.md", ".x.mp4", "empty.txt")
    storage.put(storage.join(folder, "blank.txt"), b"\n\n")
    assert "no video" in usage_error(folder, "p")
    assert "no video" in usage_error(storage.join(folder, "blank.txt"), "p")
    assert "prompt" in usage_error(folder)


def test_an_empty_folder_is_a_usage_error(tmp_path: Path) -> None:
    assert "no video" in usage_error(str(tmp_path), "p")


# ------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("format_", FORMATS)
def test_a_question_column_replaces_the_prompts(folder: str, format_: str) -> None:
    opened = open_manifest(write(folder, format_, ROWS), ["not used"])
    found = list(opened.rows())
    assert [item.prompt for item in found] == [row["question"] for row in ROWS]
    assert [item.video_uri for item in found] == [
        storage.join(folder, "a.mp4"), storage.join(folder, "sub/b.mp4"), "/abs/c.mp4", "s3://other/d.mp4",
    ]  # fmt: skip
    assert opened.input_schema == pa.schema(
        {"video": pa.string(), "question": pa.string(), "score": pa.float64(), "n": pa.int64()}
    )
    assert [item.columns for item in found] == ROWS
    assert list(opened.rows()) == found


@pytest.mark.parametrize("format_", FORMATS)
def test_tables_without_questions_use_the_prompts(folder: str, format_: str) -> None:
    uri = write(folder, format_, [{"path": "a.mp4", "tag": "x"}, {"path": "b.mp4", "tag": "y"}])
    assert [(i.columns["tag"], i.prompt) for i in read_rows(uri, "p", "q")] == [
        ("x", "p"),
        ("x", "q"),
        ("y", "p"),
        ("y", "q"),
    ]
    assert "question column" in usage_error(uri)


def test_columns_are_found_by_default_order_or_by_name(tmp_path: Path) -> None:
    uri = write(
        str(tmp_path),
        "csv",
        [{"url": "/u", "video": "/v", "clip": "/c", "prompt": "p", "question": "q", "ask": "a"}],
    )
    assert [(i.video_uri, i.prompt) for i in read_rows(uri)] == [("/v", "q")]
    assert [
        (i.video_uri, i.prompt) for i in read_rows(uri, video_column="clip", question_column="ask")
    ] == [("/c", "a")]
    assert set(read_rows(uri)[0].columns) == {
        "url",
        "video",
        "clip",
        "input_prompt",
        "question",
        "ask",
    }


def test_an_error_about_a_missing_column_lists_the_existing_ones(tmp_path: Path) -> None:
    uri = write(str(tmp_path), "csv", [{"video_file": "/u", "questions": "q"}])
    text = usage_error(uri, video_column="video_fil")
    assert "'video_fil'" in text
    assert "it has video_file, questions" in text
    assert "nearest is 'video_file'" in text
    assert "video_file, questions" in usage_error(uri, "p")
    assert "nearest is 'questions'" in usage_error(
        uri, video_column="video_file", question_column="question"
    )


@pytest.mark.parametrize("format_", FORMATS)
def test_given_ids_are_kept_and_equal_rows_are_numbered(folder: str, format_: str) -> None:
    rows = [{"video": "a", "question": "q", "request_id": own} for own in ("007", "1", "007")]
    found = read_rows(write(folder, format_, rows))
    assert [(i.given_id, i.occurrence) for i in found] == [("007", 0), ("1", 0), ("007", 1)]
    assert [i.columns["input_request_id"] for i in found] == ["007", "1", "007"]
    equal = read_rows(
        write(folder, format_, [{"video": "a", "question": q} for q in "qqpq"], "equal")
    )
    assert [(i.prompt, i.occurrence) for i in equal] == [("q", 0), ("q", 1), ("p", 0), ("q", 2)]


def test_rows_that_differ_in_a_signature_alone_are_numbered_as_equal(tmp_path: Path) -> None:
    url = "https://{}host/a.mp4?author=1&sv=1&sig={}"
    names = [url.format("", 1), url.format("", 2), url.format("u:p@", 1), "https://host/b.mp4"]
    (tmp_path / "m.txt").write_text("\n".join(names))
    found = read_rows(str(tmp_path / "m.txt"), "q")
    assert [item.occurrence for item in found] == [0, 1, 2, 0]


def test_names_that_look_like_numbers_and_dates_stay_text(tmp_path: Path) -> None:
    rows = [
        {"video": "0012", "question": "2024-01-01"},
        {"video": "0013", "question": "2024-01-02"},
    ]
    for format_ in FORMATS:
        found = read_rows(write(str(tmp_path), format_, rows))
        assert [Path(i.video_uri).name for i in found] == ["0012", "0013"]
        assert [i.prompt for i in found] == ["2024-01-01", "2024-01-02"]


def test_numeric_ids_become_text(tmp_path: Path) -> None:
    rows = [{"video": "a", "question": "q", "request_id": 7}]
    assert [read_rows(write(str(tmp_path), f, rows))[0].given_id for f in FORMATS] == [
        "7",
        "7",
        "7",
    ]


def test_rows_on_one_video_come_together(tmp_path: Path) -> None:
    rows = [{"video": f"{i % 3}.mp4", "question": f"q{i}"} for i in range(9)]
    found = read_rows(write(str(tmp_path), "parquet", rows))
    assert [item.prompt for item in found] == [f"q{i}" for i in (0, 3, 6, 1, 4, 7, 2, 5, 8)]


def test_empty_cells_give_rows_with_empty_fields(tmp_path: Path) -> None:
    rows = [
        {"video": None, "question": "q"},
        {"video": "a", "question": None},
        {"video": "a", "question": "q"},
    ]
    for format_ in ("parquet", "jsonl"):
        found = read_rows(write(str(tmp_path), format_, rows))
        assert [(i.video_uri, i.prompt) for i in found] == [
            ("", "q"),
            (str(tmp_path / "a"), ""),
            (str(tmp_path / "a"), "q"),
        ]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("m.parquet", b"not parquet", "cannot be read"),
        ("m.parquet", b"", "cannot be read"),
        ("m.jsonl", b'{"video": "a"}\n{"video', "cannot be read"),
        ("m.jsonl", b'{"video": 1}\n{"video": "a"}\n', "cannot be read"),
        ("m.jsonl", b"", "cannot be read"),
        ("m.jsonl", b'{"video": ["a"]}\n', "holds list<item: string>, not text"),
        ("m.csv", b"", "cannot be read"),
        ("m.csv", b"video,question\n", "no rows"),
        ("m.csv", b"video,question\na\n", "cannot be read"),
        ("m.csv", b"video,video\na,b\n", "more than one column video"),
        ("m.csv", b"video\n\xff\xfe\n", "holds binary, not text"),
        ("m.txt", b"\xff\xfe\n", "cannot be read"),
    ],
)
def test_unreadable_manifests_are_usage_errors_of_one_line(
    folder: str, name: str, data: bytes, message: str
) -> None:
    uri = storage.join(folder, name)
    storage.put(uri, data)
    text = usage_error(uri, "p")
    assert uri in text
    assert message in text


def test_columns_of_all_types_reach_the_output_unchanged(tmp_path: Path) -> None:
    late = datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
    columns = {
        "video": pa.array(["a", "b"], pa.large_string()),
        "words": pa.array(["x", None], pa.string()),
        "kind": pa.array(["u", "v"]).dictionary_encode(),
        "nothing": pa.nulls(2),
        "flag": pa.array([True, None]),
        "tiny": pa.array([1, None], pa.uint8()),
        "half": pa.array([1.5, None], pa.float32()),
        "money": pa.array([Decimal("1.10"), None], pa.decimal128(10, 2)),
        "bytes": pa.array([b"\0\xff", None], pa.binary()),
        "day": pa.array([late.date(), None], pa.date32()),
        "at": pa.array([late, None], pa.timestamp("us", "Europe/Berlin")),
        "at_ns": pa.array([1_714_979_289_123_456_789, None], pa.timestamp("ns", "UTC")),
        "took_ns": pa.array([123, None], pa.duration("ns")),
        "tags": pa.array([["x", None], None], pa.list_(pa.string())),
        "box": pa.array(
            [{"x": 1, "y": [1.5]}, None], pa.struct({"x": pa.int16(), "y": pa.list_(pa.float32())})
        ),
        "pairs": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
        "status": pa.array([1, 2], pa.int8()),
    }
    table = pa.table(columns, metadata={"pandas": "{}"})
    pq.write_table(table, tmp_path / "m.parquet")
    opened = open_manifest(str(tmp_path / "m.parquet"), ["p"])
    rows = [item.columns for item in opened.rows()]
    carried = to_table(rows, output_schema(opened.input_schema)).select(opened.input_schema.names)
    assert carried.equals(table.rename_columns([*table.column_names[:-1], "input_status"]))


def test_column_types_are_inferred_from_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        table_formats, "MAX_ROW_BYTES", 200
    )  # several blocks: the first does not show the last one's types
    rows = [
        {"video": "a", "question": "q", "x": i if i < 99 else 1.5, "y": None if i < 99 else "z"}
        for i in range(100)
    ]
    for format_ in ("csv", "jsonl"):
        opened = open_manifest(write(str(tmp_path), format_, rows))
        found = list(opened.rows())
        assert opened.input_schema.field("x").type == pa.float64()
        assert opened.input_schema.field("y").type == pa.string()
        assert (found[0].columns["x"], found[99].columns["x"], found[99].columns["y"]) == (
            0.0,
            1.5,
            "z",
        )


def test_long_manifests_are_read_lazily(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"video": [f"{i}.mp4" for i in range(50_000)], "question": ["q"] * 50_000})
    pq.write_table(table, tmp_path / "m.parquet", row_group_size=5000)
    batch_sizes = []
    rows_of_batch = manifest._TableReader.rows_of_batch

    def counting(reader: manifest._TableReader, batch: pa.RecordBatch) -> Iterator[InputRow]:
        batch_sizes.append(batch.num_rows)
        return rows_of_batch(reader, batch)

    monkeypatch.setattr(manifest._TableReader, "rows_of_batch", counting)
    stream = open_manifest(str(tmp_path / "m.parquet")).rows()
    assert len(list(islice(stream, 100))) == 100
    assert sum(batch_sizes) <= 8192
    assert 100 + sum(1 for _ in stream) == 50_000


_NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)


@given(st.lists(st.tuples(_NAMES, _NAMES), min_size=1, max_size=20))
def test_each_row_appears_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    folder = str(tmp_path_factory.mktemp("m"))
    table = [
        {"video": "/v" + video, "question": question, "row": i}
        for i, (video, question) in enumerate(rows)
    ]
    for format_ in FORMATS:
        found = read_rows(write(folder, format_, table))
        assert sorted(item.columns["row"] for item in found) == list(range(len(rows)))
        keys = [(item.video_uri, item.prompt, item.occurrence) for item in found]
        assert len(set(keys)) == len(rows)
        for item in found:
            assert item.prompt == rows[item.columns["row"]][1]


def test_credentials_reach_storage_but_not_the_output(tmp_path: Path) -> None:
    signed = "https://who:secret@host/a.mp4?id=2&X-Amz-Signature=secret"
    (tmp_path / "m.csv").write_text(f"url,question\n{signed},What?\n")
    [item] = open_manifest(str(tmp_path / "m.csv")).rows()
    assert item.video_uri == signed
    shown = item.columns["url"]
    assert re.fullmatch(
        "https://redacted-[0-9a-f]{8}@host/a.mp4[?]id=2&redacted-[0-9a-f]{8}", str(shown)
    )
    error = RequestError("storage_error", f"GET {signed}: 500")
    failure = FailedRequest(PendingRequest("1", item), error)
    row = rows.failed_row(rows.Provenance(Job(), "r", None), failure)
    assert row["video_uri"] == shown
    assert "secret" not in str(row)


# -------------------------------------------------------------------------- cells that are hard

LEAVES = [
    pa.string(),
    pa.int64(),
    pa.date32(),
    pa.time32("ms"),
    pa.time64("ns"),
    *(pa.timestamp(unit, zone) for unit in ("s", "us", "ns") for zone in (None, "UTC", "No/Where")),
    *(pa.duration(unit) for unit in ("s", "ms", "ns")),
]
TYPES = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.map(lambda type_: pa.list_(type_, 2)),
        inner.map(lambda type_: pa.map_(pa.string(), type_)),
        st.tuples(inner, inner).map(lambda pair: pa.struct(dict(zip("ab", pair, strict=True)))),
    ),
    max_leaves=3,
)


def cell(type_: pa.DataType) -> st.SearchStrategy[Any]:
    """A cell of a type; dates and times as integers, far ones included."""
    if pa.types.is_string(type_):
        value = st.text(max_size=3)
    elif pa.types.is_struct(type_):
        value = st.fixed_dictionaries({field.name: cell(field.type) for field in type_})
    elif pa.types.is_map(type_):
        value = st.lists(st.tuples(st.text(max_size=2), cell(type_.item_type)), max_size=2)
    elif pa.types.is_fixed_size_list(type_):
        value = st.lists(cell(type_.value_type), min_size=2, max_size=2)
    elif pa.types.is_nested(type_):
        value = st.lists(cell(type_.value_type), max_size=2)
    elif type_.bit_width == 32:
        value = st.integers(0, 86_399_999)
    else:
        value = st.integers(0, 86_399_999_999_999) | st.just(2**62)
        value = value if pa.types.is_time64(type_) is False else st.integers(0, 86_399_999_999_999)
    return st.none() | value


@settings(deadline=None)
@given(TYPES.flatmap(lambda type_: st.tuples(st.just(type_), st.lists(cell(type_), max_size=4))))
def test_cells_of_every_type_are_carried_unchanged(column: tuple[pa.DataType, list[Any]]) -> None:
    type_, cells = column
    array = pa.array(cells, type_)
    carried = manifest._python_values(array)
    assert to_table([{"x": cell} for cell in carried], pa.schema({"x": type_}))["x"].equals(
        pa.chunked_array([array], type_)
    )


def test_far_times_in_lists_and_structs_come_back(tmp_path: Path) -> None:
    when = pa.timestamp("us", "UTC")
    table = pa.table(
        {
            "video": ["a.mp4"],
            "question": ["?"],
            "at": pa.array([2**60], when),
            "cuts": pa.array([[1, 2**60]], pa.list_(when)),
            "shot": pa.array([{"from": 2**60}], pa.struct({"from": when})),
        }
    )
    pq.write_table(table, tmp_path / "m.parquet")
    opened = open_manifest(str(tmp_path / "m.parquet"))
    [row] = opened.rows()
    written = to_table([row.columns], output_schema(opened.input_schema))
    for name in ("at", "cuts", "shot"):
        assert written[name].equals(table[name])


def test_a_column_that_cannot_be_carried_is_named() -> None:
    schema = pa.schema({"video": pa.string(), "x": pa.dense_union([pa.field("a", pa.int32())])})
    with pytest.raises(UsageError, match="m: the column 'x' of dense_union"):
        manifest._check_columns("m", schema)


@pytest.mark.parametrize("column", ["video_start", "video_end"])
def test_columns_named_like_a_part_are_not_ignored_in_silence(
    column: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri = write(str(tmp_path), "csv", [{"video": "a.mp4", "question": "?", column: 3}])
    [row] = read_rows(uri)
    assert row.columns[f"input_{column}"] == 3
    assert column in caplog.text and "--video-start" in caplog.text


# --------------------------------------------------------------------------------- quotes in CSV

CELLS = st.text(alphabet='ab,"\n\r \u00e9', max_size=4)


def quoted_csv(rows: list[list[str]], quoting: int = csv.QUOTE_ALL) -> bytes:
    text = io.StringIO()
    csv.writer(text, quoting=quoting, lineterminator="\n").writerows(rows)  # type: ignore[arg-type]
    return text.getvalue().encode()


@given(
    st.lists(st.lists(CELLS, min_size=2, max_size=2), max_size=5),
    st.integers(1, 7),
    st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    st.booleans(),
)
def test_closed_quotes_are_accepted_however_the_file_is_read(
    rows: list[list[str]], chunk: int, quoting: int, crlf: bool
) -> None:
    data = quoted_csv([["video", "question"], *rows], quoting)
    data = data.replace(b"\n", b"\r\n") if crlf else data
    scanner = table_formats._QuoteScanner()
    for start in range(0, len(data), chunk):
        scanner.feed(data[start : start + chunk])
    assert scanner.opened is None
    assert scanner.line == 1 + data.count(b"\n")


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 30), st.booleans(), st.integers(1, 9))
def test_a_quote_that_is_never_closed_is_a_usage_error_with_its_line(
    before: int, after: int, others_quoted: bool, chunk: int
) -> None:
    quoting = csv.QUOTE_ALL if others_quoted else csv.QUOTE_MINIMAL
    rows = [["video", "question"], *[[f"v{n}.mp4", "q"] for n in range(before + after)]]
    lines = quoted_csv(rows, quoting).splitlines(keepends=True)
    lines.insert(1 + before, b'v.mp4,"never closed\n')
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.csv")
        path.write_bytes(b"\xef\xbb\xbf" + b"".join(lines))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(table_formats, "READ_BYTES", chunk)
            error = usage_error(str(path), "p")
    assert error.endswith(f"the quote that opens a cell in line {2 + before} is never closed")


def test_a_header_that_is_not_utf8_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_bytes(b"video,quest\xffion\na.mp4,x\n")
    assert "cannot be read as a manifest" in usage_error(str(tmp_path / "m.csv"), "p")
