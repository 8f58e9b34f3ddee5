"""Opens a job's input: a folder, glob, video or manifest becomes a stream of `InputRow`s, one per
question.

Whatever can be wrong with an input raises UsageError before the first row. Rows are made as they
are taken, so a manifest of a million rows is never held as Python objects. No video is opened here.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import logging
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from pipeline import storage
from pipeline.intake.table_formats import (
    BATCH_ROWS,
    READ_BYTES,
    TABLE_FORMATS,
    TableFormat,
    read_errors,
)
from pipeline.output.schema import carried_name
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
ID_COLUMN = "request_id"
PART_COLUMNS = ("video_start", "video_end")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest:
    """A valid input.

    Attributes:
        input_schema: the manifest's columns under their names in the output, which are also the
            keys of `InputRow.columns`: `input_<name>` where the output has a column of that name.
            Empty for anything but a table.
        rows: starts a new pass over the input. A cell without a video or question gives a row with
            an empty `video_uri` or `prompt`, which fails as one request.
    """

    input_schema: pa.Schema
    rows: Callable[[], Iterator[InputRow]]


def open_manifest(
    uri: str,
    prompts: Sequence[str] = (),
    video_column: str | None = None,
    question_column: str | None = None,
) -> Manifest:
    """Checks an input and makes its rows available.

    Args:
        uri: a folder or bucket prefix, a glob, one video, or a manifest (.parquet, .jsonl, .csv,
            .txt).
        prompts: questions for each video; not used for tables with a question column.
        video_column: of a table; by default the first of `VIDEO_COLUMNS` that it has. Its values
            may be relative to the manifest's folder.
        question_column: of a table; by default the first of `QUESTION_COLUMNS` that it has, if
            any.

    Raises:
        UsageError: the input is missing, empty or unreadable, lacks a column, or has no question.
    """
    suffix = posixpath.splitext(uri)[1].lower()
    try:
        if suffix not in TABLE_FORMATS and suffix != ".txt":
            return _manifest_of_videos(uri, lambda: _find_videos(uri), prompts)
        if not storage.is_file(uri):
            raise UsageError(f"{storage.display_uri(uri)}: there is no such file")
        if suffix == ".txt":
            return _manifest_of_videos(uri, lambda: _read_list(uri), prompts)
        return _manifest_of_table(
            uri, TABLE_FORMATS[suffix], prompts, video_column, question_column=question_column
        )
    except RequestError as error:
        raise UsageError(f"the input cannot be read: {error.message}") from error


class _OccurrenceCounter:
    """Numbers equal rows from 0. Rows are equal that give the same request id without the number.

    Keeps an 8-byte hash per row. Different rows whose hashes collide are numbered as if they were
    equal, in the same way on every run.
    """

    def __init__(self) -> None:
        self._first: set[int] = set()  # hashes of the rows so far
        self._repeats: dict[int, int] = {}

    def number(self, row: InputRow) -> InputRow:
        """The row with its `occurrence`."""
        text = json.dumps([storage.canonical(row.video_uri), row.prompt, row.given_id]).encode(
            "ascii"
        )
        key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        if key not in self._first:
            self._first.add(key)
            return row
        self._repeats[key] = self._repeats.get(key, 0) + 1
        return replace(row, occurrence=self._repeats[key])


# ------------------------------------------------------------------------- folders, globs and lists


def _manifest_of_videos(
    uri: str, videos: Callable[[], Iterator[str]], prompts: Sequence[str]
) -> Manifest:
    if not prompts:
        raise UsageError(
            f"{storage.display_uri(uri)} holds videos without questions: give a prompt"
        )
    if next(videos(), None) is None:
        suffixes = ", ".join(sorted(VIDEO_SUFFIXES))
        raise UsageError(
            f"{storage.display_uri(uri)}: there is no video in it (looked for {suffixes})"
        )

    def rows() -> Iterator[InputRow]:
        counter = _OccurrenceCounter()
        for video in videos():
            for prompt in prompts:
                yield counter.number(InputRow(video, prompt))

    return Manifest(pa.schema([]), rows)


def _find_videos(uri: str) -> Iterator[str]:
    """The videos of a folder or a glob, or the one video of this name."""
    if storage.is_folder(uri):
        yield from storage.list_files(uri, VIDEO_SUFFIXES)
        return
    matches = storage.expand_glob(uri)
    first = next(matches, None)
    if first is None:
        raise UsageError(f"{storage.display_uri(uri)}: no file matches")
    if first == storage.normalize(uri) and not storage.is_file(first):
        raise UsageError(f"{storage.display_uri(uri)}: there is no such file or folder")
    selects_suffix = not uri.endswith(("*", "/"))  # the glob itself chooses kinds of files
    for video in (first, *matches):
        if selects_suffix or posixpath.splitext(video)[1].lower() in VIDEO_SUFFIXES:
            yield video


def _read_list(uri: str) -> Iterator[str]:
    """The videos that a text file names, one per line; every character but the line's end belongs
    to the name."""
    folder = storage.parent(uri)
    with storage.open_read(uri, READ_BYTES) as raw, read_errors(uri):
        for line in io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8-sig", newline="\n"):
            if name := line.rstrip("\r\n"):
                yield storage.resolve(name, folder)


# ------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class _ColumnRoles:
    """The columns of a table that this program interprets."""

    video: str
    question: str | None
    given_id: str | None


def _manifest_of_table(
    uri: str,
    table_format: TableFormat,
    prompts: Sequence[str],
    video_column: str | None,
    question_column: str | None,
) -> Manifest:
    name = storage.display_uri(uri)
    with read_errors(uri):
        schema, has_rows = table_format.read_schema(uri)
        _ = schema.names  # decodes them
        _check_columns(name, schema)
        pa.default_memory_pool().release_unused()  # a .csv or .jsonl was read whole for its types
    if not has_rows:
        raise UsageError(f"{name}: there are no rows in it")
    repeated = sorted({column for column in schema.names if schema.names.count(column) > 1})
    if repeated:
        raise UsageError(f"{name} has more than one column {', '.join(repeated)}")
    roles = _find_roles(name, schema, video_column, question_column)
    if roles.question is None and not prompts:
        raise UsageError(
            f"{name} has no question column (it has {', '.join(schema.names)}): "
            f"name one, or give a prompt"
        )
    _warn_of_parts(name, schema)
    schema = table_format.as_text(schema, (roles.video, roles.question, roles.given_id))
    input_schema = pa.schema(
        [
            column.with_name(carried_name(column.name, schema.names))
            for column in schema.remove_metadata()
        ]
    )
    reader = _TableReader(uri, table_format, schema, input_schema.names, roles, prompts)
    return Manifest(input_schema, reader.rows)


def _check_columns(name: str, schema: pa.Schema) -> None:
    """Raises UsageError for a column whose cells cannot be carried to the output."""
    for column in schema:
        try:
            _python_values(pa.array([], column.type))
            pa.array([None], column.type)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise UsageError(
                f"{name}: the column {column.name!r} of {column.type} cannot be carried to the "
                "output: leave it out, or convert it"
            ) from error


def _warn_of_parts(name: str, schema: pa.Schema) -> None:
    """Says of columns named like options that they are carried and choose nothing."""
    parts = [column for column in PART_COLUMNS if column in schema.names]
    if parts:
        logger.warning(
            "%s: the columns %s are carried to the output and do not choose the part of a video; "
            "--video-start and --video-end do, for all of them",
            name,
            ", ".join(parts),
        )


def _find_roles(
    name: str, schema: pa.Schema, video_column: str | None, question_column: str | None
) -> _ColumnRoles:
    video = _find_column(name, schema, video_column, VIDEO_COLUMNS, role="video")
    if video is None:
        raise UsageError(
            f"{name} has no column {', '.join(VIDEO_COLUMNS)}; "
            f"it has {', '.join(schema.names)}: name the one that holds the videos"
        )
    question = _find_column(name, schema, question_column, QUESTION_COLUMNS, role="question")
    return _ColumnRoles(video, question, ID_COLUMN if ID_COLUMN in schema.names else None)


def _find_column(
    name: str, schema: pa.Schema, given: str | None, defaults: Iterable[str], *, role: str
) -> str | None:
    """The column with a role: the given one, else the first of the defaults, else None. Raises
    UsageError if the given one is missing, or the column does not hold text.

    Args:
        name: of the manifest, for messages.
    """
    if given is not None and given not in schema.names:
        nearest = difflib.get_close_matches(given, schema.names, n=1, cutoff=0.0)
        raise UsageError(
            f"{name} has no {role} column {given!r}; "
            f"it has {', '.join(schema.names)}: the nearest is {nearest[0]!r}"
        )
    column = given or next((column for column in defaults if column in schema.names), None)
    if column is not None and not _is_readable_as_text(schema.field(column).type):
        raise UsageError(
            f"{name}: the {role} column {column!r} holds {schema.field(column).type}, not text"
        )
    return column


def _is_readable_as_text(type_: pa.DataType) -> bool:
    if pa.types.is_dictionary(type_):
        return _is_readable_as_text(type_.value_type)
    unreadable = (pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary)
    return not any(check(type_) for check in unreadable)


@dataclass(frozen=True)
class _TableReader:
    """Makes rows of a table.

    Attributes:
        schema: of the columns as they are read.
        output_names: of the same columns in the output.
    """

    uri: str
    table_format: TableFormat
    schema: pa.Schema
    output_names: Sequence[str]
    roles: _ColumnRoles
    prompts: Sequence[str]

    def rows(self) -> Iterator[InputRow]:
        """All rows. Within a batch, rows on one video come together, in the order of the videos'
        first rows, so that its frames are decoded once."""
        counter = _OccurrenceCounter()
        with read_errors(self.uri):
            for table_batch in self.table_format.read_batches(self.uri, self.schema):
                for start in range(0, table_batch.num_rows, BATCH_ROWS):
                    batch = table_batch.slice(start, BATCH_ROWS)
                    for row in _sort_by_video(self.rows_of_batch(batch)):
                        yield counter.number(row)

    def rows_of_batch(self, batch: pa.RecordBatch) -> Iterator[InputRow]:
        """The rows of a batch in its order, without `occurrence`."""
        folder = storage.parent(self.uri)
        videos = self._texts(batch, self.roles.video)
        questions = self._texts(batch, self.roles.question)
        given_ids = self._texts(batch, self.roles.given_id)
        values = [_python_values(column) for column in batch.columns]
        video_output_name = self.output_names[batch.schema.names.index(self.roles.video)]
        for i, video in enumerate(videos):
            columns = {
                name: column[i] for name, column in zip(self.output_names, values, strict=True)
            }
            uri = columns[video_output_name]
            if isinstance(uri, str):
                columns[video_output_name] = storage.redact_utf8(uri)
            has_question = self.roles.question is not None
            for prompt in [questions[i] or ""] if has_question else self.prompts:
                yield InputRow(storage.resolve(video or "", folder), prompt, columns, given_ids[i])

    def _texts(self, batch: pa.RecordBatch, column: str | None) -> list[str | None]:
        """A column's cells as text; Nones without a column."""
        if column is None:
            return [None] * batch.num_rows
        return batch.column(column).cast(pa.string()).to_pylist()


def _sort_by_video(rows: Iterable[InputRow]) -> list[InputRow]:
    """Videos in the order of their first rows; the sort is stable."""
    rank: dict[str, int] = {}
    return sorted(rows, key=lambda row: rank.setdefault(row.video_uri, len(rank)))


def _python_values(column: pa.Array) -> list[Any]:
    """Python values that Arrow converts back unchanged: dates and times are integers, since
    Python has none in ns, before the year 1 or after 9999. So are those in lists and structs."""
    return column.cast(_without_times(column.type)).to_pylist()


def _without_times(type_: pa.DataType) -> pa.DataType:
    """The type with integers in place of dates, times and durations."""
    if pa.types.is_temporal(type_) and not pa.types.is_interval(type_):
        return pa.int32() if type_.bit_width == 32 else pa.int64()
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_without_times(field.type)) for field in type_])
    if pa.types.is_map(type_):
        return pa.map_(_without_times(type_.key_type), _without_times(type_.item_type))
    if pa.types.is_dictionary(type_):
        return _without_times(type_.value_type)
    for is_list, make in _LISTS:
        if is_list(type_):
            field = type_.value_field
            return make(field.with_type(_without_times(field.type)))
    if pa.types.is_fixed_size_list(type_):
        field = type_.value_field
        return pa.list_(field.with_type(_without_times(field.type)), type_.list_size)
    return type_


_LISTS = ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list))
