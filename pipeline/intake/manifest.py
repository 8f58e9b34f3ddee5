"""What a run is asked: a folder, a glob, one video or a manifest becomes a stream of `InputRow`s, one
per question.

Everything that can be wrong with an input is found, and said, before the first item; items are made
as they are taken, so that a manifest of a million rows is never held as Python objects. No video is
opened here."""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.output.schema import (
    carried_name,
)
from pipeline.records import InputRow, RequestError, UsageError

VIDEO_SUFFIXES = frozenset(
    (
        ".mp4",
        ".mov",
        ".mkv",
        ".webm",
        ".avi",
        ".ts",
        ".m4v",
        ".gif",
        ".mpg",
        ".mpeg",
        ".wmv",
        ".flv",
    )
)
VIDEO_COLUMNS = ("video", "video_uri", "url", "path")
QUESTION_COLUMNS = ("question", "prompt")
_ID_COLUMN = "request_id"
_WINDOW = 8192  # rows within which the questions on one video are brought together
_BLOCK = 1 << 20  # bytes per read
_ROW_BYTES = 4 << 20  # a row of a .csv or .jsonl may be this long


@dataclass(frozen=True)
class Manifest:
    """An input that was found to be in order.

    Attributes: input_schema: the manifest's columns as the output carries them (there under
        `input_<name>` where the result
            has a column of that name); `InputRow.columns` has these names. Empty for anything but a
            table.
        items: starts a new pass over the items. A cell without a video or question gives an item
            with an empty `video_uri` or `prompt`: that request fails, not the run.
    """

    input_schema: pa.Schema
    items: Callable[[], Iterator[InputRow]]


def open_manifest(
    uri: str,
    prompts: Sequence[str] = (),
    video_column: str | None = None,
    question_column: str | None = None,
) -> Manifest:
    """Looks at an input and makes its items ready.

    Args: uri: a folder or bucket prefix, a glob, one video, or a manifest (.parquet, .jsonl, .csv,
        .txt). prompts: every video answers each; not used for rows that bring their own question.
        video_column: of a manifest; by default the first there is of `VIDEO_COLUMNS`; values
        relative to its folder. question_column: by default the first there is of
        `QUESTION_COLUMNS`, if any.

    Raises: UsageError: no such input, nothing in it, unreadable, a column that is not there, or no
        question at all.
    """
    try:
        suffix = posixpath.splitext(uri)[1].lower()
        if suffix not in _TABLES and suffix != ".txt":
            return _of_videos(lambda: _videos(uri), prompts, uri)
        if not storage.is_file(uri):
            raise UsageError(f"{storage.display_uri(uri)}: there is no such file")
        if suffix == ".txt":
            return _of_videos(lambda: _lines(uri), prompts, uri)
        return _of_table(
            uri, _TABLES[suffix], prompts, video_column, question_column=question_column
        )
    except RequestError as error:
        raise UsageError(f"the input cannot be read: {error.message}") from error


# --- videos without columns ----------------------------------------------------------------------------------------


def _of_videos(videos: Callable[[], Iterator[str]], prompts: Sequence[str], uri: str) -> Manifest:
    if not prompts:
        raise UsageError(
            f"{storage.display_uri(uri)} holds videos without questions: give a prompt"
        )
    if next(videos(), None) is None:
        raise UsageError(
            f"{storage.display_uri(uri)}: there is no video in it (looked for {_suffixes()})"
        )

    def items() -> Iterator[InputRow]:
        count = _occurrences()
        return (InputRow(v, p, occurrence=count(v, p, None)) for v in videos() for p in prompts)

    return Manifest(pa.schema([]), items)


def _suffixes() -> str:
    return ", ".join(sorted(VIDEO_SUFFIXES))


def _videos(uri: str) -> Iterator[str]:
    """The videos of a folder, of a glob, or the one that is named."""
    if storage.is_folder(uri):
        yield from storage.list_files(uri, VIDEO_SUFFIXES)
        return
    found = storage.expand_glob(uri)
    if (first := next(found, None)) is None:
        raise UsageError(f"{storage.display_uri(uri)}: no file matches")
    if first == storage.normalize(uri) and not storage.is_file(first):
        raise UsageError(f"{storage.display_uri(uri)}: there is no such file or folder")
    open_ended = uri.endswith(("*", "/"))  # then the glob says nothing about the kind of file
    for video in (first, *found):
        if not open_ended or posixpath.splitext(video)[1].lower() in VIDEO_SUFFIXES:
            yield video


def _lines(uri: str) -> Iterator[str]:
    """The videos that a text file lists, one a line; every character of a line but its end is the
    name's."""
    folder = storage.parent(uri)
    with storage.open_read(uri, _BLOCK) as raw, _readable(uri):
        for line in io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8-sig", newline="\n"):
            if name := line.rstrip("\r\n"):
                yield storage.resolve(name, folder)


# --- tables --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Roles:
    """Which columns mean something to this program."""

    video: str
    question: str | None
    given_id: str | None


def _of_table(
    uri: str,
    table: _Table,
    prompts: Sequence[str],
    video_column: str | None,
    question_column: str | None,
) -> Manifest:
    with _readable(uri):
        schema, rows = table.schema(uri)
        pa.default_memory_pool().release_unused()  # of a .csv or .jsonl that was read for its types
    if not rows:
        raise UsageError(f"{storage.display_uri(uri)}: there are no rows in it")
    if twice := sorted({name for name in schema.names if schema.names.count(name) > 1}):
        raise UsageError(f"{storage.display_uri(uri)} has more than one column {', '.join(twice)}")
    roles = _roles(uri, schema, video_column, question_column)
    if roles.question is None and not prompts:
        raise UsageError(
            f"{storage.display_uri(uri)} has no question column (it has {_listed(schema)}): name one, or give a prompt"
        )
    schema = table.literal(schema, roles)
    carried = pa.schema(
        [f.with_name(carried_name(f.name, schema.names)) for f in schema.remove_metadata()]
    )

    def items() -> Iterator[InputRow]:
        with _readable(uri):
            yield from _items(
                table.batches(uri, schema),
                roles,
                carried.names,
                prompts,
                folder=storage.parent(uri),
            )

    return Manifest(carried, items)


def _roles(
    uri: str, schema: pa.Schema, video_column: str | None, question_column: str | None
) -> _Roles:
    video = _column(uri, schema, video_column, VIDEO_COLUMNS, what="video")
    if video is None:
        raise UsageError(
            f"{storage.display_uri(uri)} has no column {', '.join(VIDEO_COLUMNS)}; "
            f"it has {_listed(schema)}: name the one that holds the videos"
        )
    question = _column(uri, schema, question_column, QUESTION_COLUMNS, what="question")
    return _Roles(video, question, _ID_COLUMN if _ID_COLUMN in schema.names else None)


def _column(
    uri: str, schema: pa.Schema, wanted: str | None, usual: Iterable[str], what: str
) -> str | None:
    """The column of a role, by its given or a usual name; holds text, or nothing at all."""
    if wanted is not None and wanted not in schema.names:
        near = difflib.get_close_matches(wanted, schema.names, 1, 0.0)
        raise UsageError(
            f"{storage.display_uri(uri)} has no {what} column {wanted!r}; "
            f"it has {_listed(schema)}: the nearest is {near[0]!r}"
        )
    name = wanted or next((n for n in usual if n in schema.names), None)
    if name is not None and not _castable(schema.field(name).type):
        raise UsageError(
            f"{storage.display_uri(uri)}: the {what} column {name!r} holds {schema.field(name).type}, not text"
        )
    return name


def _castable(type_: pa.DataType) -> bool:
    """Whether values can be read as text."""
    if pa.types.is_dictionary(type_):
        return _castable(type_.value_type)
    nested = (
        pa.types.is_nested(type_) or pa.types.is_binary(type_) or pa.types.is_large_binary(type_)
    )
    return not nested


def _listed(schema: pa.Schema) -> str:
    return ", ".join(schema.names)


def _items(
    batches: Iterable[pa.RecordBatch],
    roles: _Roles,
    carried: Sequence[str],
    prompts: Sequence[str],
    folder: str,
) -> Iterator[InputRow]:
    """Rows as items, those of one video together as far as a window of the manifest shows them."""
    count = _occurrences()
    for batch in batches:
        for start in range(0, batch.num_rows, _WINDOW):
            for row in _by_video(
                _rows(batch.slice(start, _WINDOW), roles, carried, prompts, folder=folder)
            ):
                yield replace(row, occurrence=count(row.video_uri, row.prompt, row.given_id))


def _by_video(items: Iterable[InputRow]) -> list[InputRow]:
    """Stable: videos in the order of their first row."""
    rank: dict[str, int] = {}
    return sorted(items, key=lambda item: rank.setdefault(item.video_uri, len(rank)))


def _rows(
    batch: pa.RecordBatch,
    roles: _Roles,
    carried: Sequence[str],
    prompts: Sequence[str],
    folder: str,
) -> Iterator[InputRow]:
    videos = _text(batch, roles.video)
    questions = _text(batch, roles.question) if roles.question else None
    given = _text(batch, roles.given_id) if roles.given_id else None
    columns = [_values(column) for column in batch.columns]
    at = batch.schema.names.index(roles.video)
    for i, video in enumerate(videos):
        row = {name: values[i] for name, values in zip(carried, columns, strict=True)}
        if isinstance(value := row[carried[at]], str):
            row[carried[at]] = storage.redact_utf8(value)  # no credentials in the output
        own = given[i] if given else None
        for prompt in prompts if questions is None else [questions[i] or ""]:
            yield InputRow(storage.resolve(video or "", folder), prompt, row, own)


def _text(batch: pa.RecordBatch, name: str) -> list[str | None]:
    return batch.column(name).cast(pa.string()).to_pylist()


def _values(column: pa.Array) -> list[Any]:
    """Python values that Arrow takes back unchanged; ns times as integers, for which Python has no
    type."""
    if getattr(column.type, "unit", None) == "ns":
        return column.cast(pa.int64()).to_pylist()
    return column.to_pylist()


def _occurrences() -> Callable[[str, str, str | None], int]:
    """Counts equal (video, question, own id) from 0. Holds 8 bytes of hash each: two different rows
    that collide would only be numbered as if they were equal, and the same way in every run."""
    seen: set[int] = set()
    again: dict[int, int] = {}

    def count(video: str, prompt: str, own: str | None) -> int:
        text = json.dumps([video, prompt, own]).encode("ascii")
        key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        if key not in seen:
            seen.add(key)
            return 0
        again[key] = again.get(key, 0) + 1
        return again[key]

    return count


# --- formats -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """One format. `schema` reads the whole file if it must, and also says if there are rows;
    `literal` is the schema for the second pass, with the columns that have a role as the text that
    the file holds."""

    schema: Callable[[str], tuple[pa.Schema, bool]]
    literal: Callable[[pa.Schema, _Roles], pa.Schema]
    batches: Callable[[str, pa.Schema], Iterator[pa.RecordBatch]]


@contextmanager
def _readable(uri: str) -> Iterator[None]:
    try:
        yield
    except (
        pa.ArrowException,
        OSError,
        UnicodeDecodeError,
    ) as error:  # pyarrow raises OSError for some broken files
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"{storage.display_uri(uri)} cannot be read as a manifest: {reason}"
        ) from error


def _parquet_schema(uri: str) -> tuple[pa.Schema, bool]:
    with storage.open_read(uri, _BLOCK) as file:
        parquet = pq.ParquetFile(file)
        return parquet.schema_arrow, parquet.metadata.num_rows > 0


def _parquet_batches(uri: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with storage.open_read(uri, _BLOCK) as file:
        yield from pq.ParquetFile(file).iter_batches(_WINDOW)


_CSV = pyarrow.csv.ParseOptions(newlines_in_values=True)


def _csv_schema(uri: str) -> tuple[pa.Schema, bool]:
    """Types hold for the whole file, so all of it is read once, as columns, and let go."""
    with storage.open_read(uri, _BLOCK) as file:
        options = pyarrow.csv.ReadOptions(block_size=_ROW_BYTES)
        table = pyarrow.csv.read_csv(file, options, _CSV)
    return table.schema, table.num_rows > 0


def _csv_batches(uri: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with storage.open_read(uri, _BLOCK) as file:
        types = pyarrow.csv.ConvertOptions(column_types=schema)
        yield from pyarrow.csv.open_csv(
            file, pyarrow.csv.ReadOptions(block_size=_ROW_BYTES), _CSV, types
        )


def _csv_literal(schema: pa.Schema, roles: _Roles) -> pa.Schema:
    """`007` is a name, not a number."""
    names = {roles.video, roles.question, roles.given_id}
    return pa.schema([f.with_type(pa.string()) if f.name in names else f for f in schema])


def _json_schema(uri: str) -> tuple[pa.Schema, bool]:
    with storage.open_read(uri, _BLOCK) as file:
        table = pyarrow.json.read_json(file, pyarrow.json.ReadOptions(block_size=_ROW_BYTES))
    return table.schema, table.num_rows > 0


def _json_batches(uri: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with storage.open_read(uri, _BLOCK) as file:
        types = pyarrow.json.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="ignore"
        )
        yield from pyarrow.json.open_json(
            file, pyarrow.json.ReadOptions(block_size=_ROW_BYTES), types
        )


def _json_literal(schema: pa.Schema, roles: _Roles) -> pa.Schema:
    """A text that looks like a date is a text; a number stays one, as it cannot be parsed as
    text."""
    names = {roles.video, roles.question, roles.given_id}
    return pa.schema(
        [
            f.with_type(pa.string()) if f.name in names and pa.types.is_temporal(f.type) else f
            for f in schema
        ]
    )


_TABLES = {
    ".parquet": _Table(_parquet_schema, lambda schema, roles: schema, _parquet_batches),
    ".csv": _Table(_csv_schema, _csv_literal, _csv_batches),
    ".jsonl": _Table(_json_schema, _json_literal, _json_batches),
}
