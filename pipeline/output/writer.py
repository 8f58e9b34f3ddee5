"""Writes rows as Parquet parts, each part with its record in the ledger, each request once.

A part is built in memory and written as a whole, then its record. A part without a record does not
count and is removed by the next driver. README.md describes the protocol.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.output import lease as leases
from pipeline.output import parts
from pipeline.output.folder import SUMMARY_FILE, OutputFolder, part_file, record_file
from pipeline.output.lease import Lease, LeaseLost
from pipeline.output.ledger import Record, part_name, superseded
from pipeline.output.schema import output_schema, to_table
from pipeline.records import RequestError, UsageError

ROWS_PER_PART = 512
SECONDS_PER_PART = 60.0
SUMMED_COLUMNS = (
    "num_prompt_tokens",
    "num_visual_tokens",
    "num_generated_tokens",
    "frames_lost",
    "kv_keep",
    "rounds",
    "proposed",
    "accepted",
    "vision_s",
    "prefill_s",
    "decode_s",
)


@dataclass
class _Buffer:
    """Rows that wait for a part, and when the oldest of them came."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    since: float = 0.0

    def add(self, row: dict[str, Any], now: float) -> None:
        if not self.rows:
            self.since = now
        self.rows.append(row)


class OutputWriter:
    """An output that this driver holds the lease of. Made by `open_output`; a context manager.

    Attributes:
        done: fingerprints (16 bytes) of the requests that have a row; with `retry_failed`, without
            those that failed.
        failed: fingerprints of the requests that had an error row when the output was opened.
    """

    def __init__(
        self,
        output: OutputFolder,
        schema: pa.Schema,
        lease: Lease,
        clock: Callable[[], float],
        rows_per_part: int,
    ):
        self._output = output
        self._schema = schema
        self._lease = lease
        self._clock = clock
        self._rows_per_part = rows_per_part
        self.done: set[bytes] = set()
        self.failed: set[bytes] = set()
        self._records: dict[str, Record] = {}
        # fingerprint → record of its error row, which a new row replaces
        self._error_records: dict[bytes, str] = {}
        # record of error rows → how many of its rows still count
        self._current_errors: Counter[str] = Counter()
        self._half_committed: set[str] = set()  # parts whose commit failed half-way
        self._results = _Buffer()
        self._errors = _Buffer()  # error rows have parts of their own
        self._sequence = 0
        self._new = 0

    def resume(self, contents: parts.Contents, retry_failed: bool) -> None:
        """Takes over what earlier drivers wrote: removes what does not count, finishes half-done
        replacements."""
        self._records = dict(contents.records)
        self._remove_leftovers(contents)
        for name, fingerprints in superseded(self._records.values()).items():
            self._drop_rows(name, fingerprints)
        for record in self._records.values():
            self.done.update(record.fingerprints)
            if record.errors:
                self.failed.update(record.fingerprints)
                self._error_records.update(dict.fromkeys(record.fingerprints, record.name))
                self._current_errors[record.name] = record.rows
        if retry_failed:
            self.done -= self.failed

    @property
    def new(self) -> int:
        """Rows of this run that are committed."""
        return self._new

    @property
    def totals(self) -> dict[str, float]:
        """`requests` and `errors` with a committed row, earlier runs included; `new` ones of this
        run; and the sums over all rows of the counts, times (s) and `kv_keep`."""
        records = self._records.values()
        sums = {
            name: sum(record.sums.get(name, 0) for record in records) for name in SUMMED_COLUMNS
        }
        counts = {
            "requests": sum(record.rows for record in records),
            "new": self._new,
            "errors": sum(record.errors for record in records),
        }
        return counts | sums

    def add(self, row: Mapping[str, Any]) -> None:
        """Accepts one request's row. Missing columns are null; `created_at` is now.

        Raises:
            ValueError: a column is unknown, or the request has its row already.
            LeaseLost, RequestError: as `flush`.
        """
        if unknown := row.keys() - set(self._schema.names):
            raise ValueError(f"the output has no column {', '.join(sorted(unknown))}")
        fingerprint = bytes.fromhex(row["request_id"])
        if fingerprint in self.done:
            raise ValueError(f"request {row['request_id']} has its row already")
        self.done.add(fingerprint)
        now = self._clock()
        buffer = self._errors if row["status"] == "error" else self._results
        buffer.add({"created_at": datetime.fromtimestamp(now, timezone.utc), **row}, now)
        self.flush_due()

    def flush_due(self) -> None:
        """Commits the rows that fill a part or have waited for 60 s. Raises as `flush`."""
        for buffer in (self._results, self._errors):
            full = len(buffer.rows) >= self._rows_per_part
            old = self._clock() - buffer.since >= SECONDS_PER_PART
            if buffer.rows and (full or old):
                self._flush(buffer)

    def flush(self) -> None:
        """Commits all rows that wait.

        Raises:
            LeaseLost: another driver holds the output.
            RequestError: storage fails. Rows that were not committed keep waiting.
        """
        self._flush(self._results)
        self._flush(self._errors)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `_summary.json`. Raises LeaseLost, RequestError."""
        self._lease.check()
        self._output.put(SUMMARY_FILE, json.dumps(summary, indent=2).encode())

    def stop(self) -> None:
        """Ends without writing anything more, as a crash would."""
        self._lease.stop()

    def close(self) -> None:
        """Commits what waits, checks that every part exists, and releases the lease.

        Raises LeaseLost, RequestError; the next driver then repairs the output."""
        try:
            self.flush()
            for name, current in self._current_errors.items():
                if 0 < current < self._records[name].rows:
                    replaced = set(self._records[name].fingerprints) - self._error_records.keys()
                    self._drop_rows(name, replaced)
            for name in self._half_committed:
                self._remove(name)
            self._check_parts()
        except BaseException:
            self._lease.stop()
            raise
        self._lease.release()

    def __enter__(self) -> OutputWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, LeaseLost | RequestError):
            self.stop()
        else:
            self.close()

    # --- commits ---------------------------------------------------------------------------------

    def _flush(self, buffer: _Buffer) -> None:
        if not buffer.rows:
            return
        fingerprints = [bytes.fromhex(row["request_id"]) for row in buffer.rows]
        replaces = [f for f in fingerprints if f in self._error_records]
        self._commit(to_table(buffer.rows, self._schema), fingerprints, replaces)
        self._remove_replaced(replaces)
        self._new += len(buffer.rows)
        buffer.rows = []

    def _commit(
        self, table: pa.Table, fingerprints: Sequence[bytes], replaces: Sequence[bytes]
    ) -> None:
        """Writes a part, then its record."""
        self._sequence += 1
        epoch = self._lease.epoch
        data = parts.to_parquet(table, epoch)
        record = Record(
            name=part_name(fingerprints, f"{epoch}.{self._sequence}" if replaces else ""),
            epoch=epoch,
            sequence=self._sequence,
            size=len(data),
            checksum=hashlib.sha256(data).hexdigest(),
            ids=b"".join(fingerprints),
            replaces=b"".join(replaces),
            errors=pc.sum(pc.equal(table["status"], "error")).as_py(),
            sums={column: pc.sum(table[column]).as_py() or 0 for column in SUMMED_COLUMNS},
        )
        self._half_committed.add(record.name)
        self._write(part_file(record.name), data)
        self._write(record_file(record.name), record.to_json())
        self._half_committed.remove(record.name)
        self._records[record.name] = record

    def _write(self, file: str, data: bytes) -> None:
        """Writes a new file while the lease holds. A file of that name can only come from an older
        driver that was suspended while this one removed leftovers; it does not count and is
        replaced."""
        self._lease.check()
        if not self._output.put_if_absent(file, data):
            self._lease.check()
            self._output.put(file, data)

    # --- removals --------------------------------------------------------------------------------

    def _remove_replaced(self, replaces: Sequence[bytes]) -> None:
        """Removes the parts of which no row counts any longer."""
        for fingerprint in replaces:
            name = self._error_records.pop(fingerprint)
            self._current_errors[name] -= 1
            if not self._current_errors[name]:
                self._remove(name)

    def _drop_rows(self, name: str, replaced: set[bytes]) -> None:
        """Finishes a replacement: moves the rows of a part that still count to a new part, and
        removes the old one."""
        record = self._records[name]
        rest = [fingerprint for fingerprint in record.fingerprints if fingerprint not in replaced]
        if rest:
            self._commit(parts.read_part(self._output, record, replaced), rest, rest)
        self._remove(name)

    def _remove(self, name: str) -> None:
        """Removes the record first: a part without one does not count."""
        self._lease.check()
        self._output.delete(record_file(name))
        self._output.delete(part_file(name))
        self._records.pop(name, None)

    def _remove_leftovers(self, contents: parts.Contents) -> None:
        """Removes what older drivers left half-done."""
        self._lease.check()
        for name in contents.invalid_records:
            self._output.delete(record_file(name))
        for file, epoch in contents.orphans.items():
            if epoch < self._lease.epoch:
                self._output.delete(file)
        for file in contents.unfinished:
            self._output.delete(file)

    def _check_parts(self) -> None:
        """Raises RequestError if a committed part is missing or has another size; LeaseLost."""
        self._lease.check()
        sizes = self._output.sizes()
        for name, record in self._records.items():
            file = part_file(name)
            if sizes.get(file) != record.size:
                raise RequestError(
                    "storage_error",
                    f"{self._output.describe(file)} is gone or was changed by someone else: "
                    "run again",
                )


def wait_for_output(
    output: OutputFolder,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Waits until `open_output` would not have to wait for a dead driver's lease; writes nothing.

    Raises:
        UsageError: another driver is writing to the output, or it cannot be read.
    """
    try:
        leases.wait_until_free(output, clock, sleep)
    except RequestError as error:
        raise UsageError(f"the output cannot be used: {error.message}") from error


def open_output(
    output: OutputFolder,
    input_schema: pa.Schema,
    *,
    retry_failed: bool = False,
    rows_per_part: int = ROWS_PER_PART,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> OutputWriter:
    """Takes over an output, new or begun by an earlier run.

    Raises:
        UsageError: the output holds files that are not ours, has other columns, is written by
            another driver, or cannot be written. Nothing was changed.
        RequestError: storage fails later.
    """
    schema = output_schema(input_schema.remove_metadata())
    try:
        contents = parts.inspect(output)
        parts.check_schema(output, contents.records, schema)
        lease = leases.acquire(output, contents.newest_epoch, clock, sleep)
        output.make_ledger()
    except RequestError as error:
        raise UsageError(f"the output cannot be used: {error.message}") from error
    writer = OutputWriter(
        output, schema=schema, lease=lease, clock=clock, rows_per_part=rows_per_part
    )
    try:
        writer.resume(parts.inspect(output, contents.records), retry_failed)
    except BaseException:
        lease.stop()
        raise
    return writer
