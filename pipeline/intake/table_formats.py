"""Reads manifests in table formats: Parquet, CSV and JSON lines, as Arrow record batches."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.records import UsageError

BATCH_ROWS = 8192
READ_BYTES = 1 << 20  # per read from storage
MAX_ROW_BYTES = 4 << 20  # of .csv and .jsonl: pyarrow's block size, which has to hold a row


@dataclass(frozen=True)
class TableFormat:
    """How one file format is read, in two passes.

    Attributes:
        read_schema: returns the schema of the file at a URI, and whether the file has rows. Reads
            the whole file if column types depend on all rows.
        as_text: returns the schema for the second pass, in which the named columns hold text as
            the file spells it.
        read_batches: yields the rows of the file at a URI under a schema.
    """

    read_schema: Callable[[str], tuple[pa.Schema, bool]]
    as_text: Callable[[pa.Schema, Collection[str | None]], pa.Schema]
    read_batches: Callable[[str, pa.Schema], Iterator[pa.RecordBatch]]


@contextmanager
def read_errors(uri: str) -> Iterator[None]:
    """Turns errors of reading a manifest into a UsageError that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:  # pyarrow raises OSError too
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"{storage.display_uri(uri)} cannot be read as a manifest: {first_line}"
        ) from error


def _parquet_schema(uri: str) -> tuple[pa.Schema, bool]:
    with storage.open_read(uri, READ_BYTES) as file:
        parquet = pq.ParquetFile(file)
        return parquet.schema_arrow, parquet.metadata.num_rows > 0


def _parquet_batches(uri: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with storage.open_read(uri, READ_BYTES) as file:
        yield from pq.ParquetFile(file).iter_batches(BATCH_ROWS)


def _parquet_as_text(schema: pa.Schema, columns: Collection[str | None]) -> pa.Schema:
    """Parquet stores types, so text columns are text already."""
    return schema


_CSV_PARSING = pyarrow.csv.ParseOptions(newlines_in_values=True)


class _QuoteScanner:
    """Follows the quotes of a CSV as pyarrow does, to notice one that is never closed: what comes
    after it would be one cell, and its rows would be missing."""

    def __init__(self) -> None:
        self.line = 1
        self.opened: int | None = None  # the line in which the open quote is
        self._closed: int | None = None  # if the last byte closed a quote: the line of the opening
        self._at_field = True  # whether a quote in the next byte opens

    def feed(self, chunk: bytes) -> None:
        """Reads on. Raises ValueError where text follows a closing quote lines after the opening
        one: then that one was never meant to be closed there."""
        at = 0
        while at < len(chunk):
            at = self._unquoted(chunk, at) if self.opened is None else self._quoted(chunk, at)

    def _quoted(self, chunk: bytes, at: int) -> int:
        end = chunk.find(b'"', at)
        following = len(chunk) if end < 0 else end + 1
        self.line += chunk.count(b"\n", at, following)
        if end >= 0:
            self._closed = self.opened
            self.opened = None
        return following

    def _unquoted(self, chunk: bytes, at: int) -> int:
        closed = self._closed
        self._closed = None
        if closed is not None:
            if chunk[at] == ord('"'):  # a quote within the cell
                self.opened = closed
                return at + 1
            if chunk[at] not in b",\r\n" and closed < self.line:
                raise ValueError(_never_closed(closed))
        elif self._at_field and chunk[at] == ord('"'):
            self.opened = self.line
            return at + 1
        field = _OPENING_QUOTE.search(chunk, at)
        following = field.end() if field else len(chunk)
        self.line += chunk.count(b"\n", at, following)
        self._at_field = field is None and chunk[-1] in b",\r\n"
        if field:
            self.opened = self.line
        return following


_OPENING_QUOTE = re.compile(rb'[,\r\n]"')


def _never_closed(line: int) -> str:
    return f"the quote that opens a cell in line {line} is never closed"


def _check_quotes(read: Callable[[int], bytes]) -> None:
    """Raises ValueError that names the line of a quote that is never closed."""
    scanner = _QuoteScanner()
    start = read(len(codecs.BOM_UTF8))
    if start != codecs.BOM_UTF8:
        scanner.feed(start)
    while chunk := read(READ_BYTES):
        scanner.feed(chunk)
    if scanner.opened is not None:
        raise ValueError(_never_closed(scanner.opened))


def _csv_schema(uri: str) -> tuple[pa.Schema, bool]:
    with storage.open_read(uri, READ_BYTES) as file:
        _check_quotes(file.read)
    with storage.open_read(uri, READ_BYTES) as file:
        reading = pyarrow.csv.ReadOptions(block_size=MAX_ROW_BYTES)
        table = pyarrow.csv.read_csv(file, reading, _CSV_PARSING)
    return table.schema, table.num_rows > 0


def _csv_batches(uri: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with storage.open_read(uri, READ_BYTES) as file:
        reading = pyarrow.csv.ReadOptions(block_size=MAX_ROW_BYTES)
        conversion = pyarrow.csv.ConvertOptions(column_types=schema)
        yield from pyarrow.csv.open_csv(file, reading, _CSV_PARSING, conversion)


def _csv_as_text(schema: pa.Schema, columns: Collection[str | None]) -> pa.Schema:
    """Names such as `007` keep their zeros."""
    return pa.schema([f.with_type(pa.string()) if f.name in columns else f for f in schema])


def _json_schema(uri: str) -> tuple[pa.Schema, bool]:
    with storage.open_read(uri, READ_BYTES) as file:
        table = pyarrow.json.read_json(file, pyarrow.json.ReadOptions(block_size=MAX_ROW_BYTES))
    return table.schema, table.num_rows > 0


def _json_batches(uri: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with storage.open_read(uri, READ_BYTES) as file:
        reading = pyarrow.json.ReadOptions(block_size=MAX_ROW_BYTES)
        parsing = pyarrow.json.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="ignore"
        )
        yield from pyarrow.json.open_json(file, reading, parsing)


def _json_as_text(schema: pa.Schema, columns: Collection[str | None]) -> pa.Schema:
    """Strings that look like dates stay strings. Numbers stay numbers: pyarrow cannot parse a JSON
    number as a string."""
    fields = []
    for column in schema:
        if column.name in columns and pa.types.is_temporal(column.type):
            column = column.with_type(pa.string())
        fields.append(column)
    return pa.schema(fields)


TABLE_FORMATS = {  # by the suffix of the file's name
    ".parquet": TableFormat(_parquet_schema, _parquet_as_text, _parquet_batches),
    ".csv": TableFormat(_csv_schema, _csv_as_text, _csv_batches),
    ".jsonl": TableFormat(_json_schema, _json_as_text, _json_batches),
}
