"""Rows into Parquet parts, each part with its record in the ledger, every request once (the output
contract).

A part is built in memory and put whole, then its record; what lies there without a record counts
for nothing and is removed by the next driver. Who may write, and what a record is: `ledger.py`."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline import storage
from pipeline.output import ledger, parts
from pipeline.output.ledger import Record
from pipeline.output.parts import read
from pipeline.output.schema import RESULT_SCHEMA, carried_name, output_schema, to_table
from pipeline.records import RequestError, UsageError

__all__ = ["RESULT_SCHEMA", "Output", "carried_name", "open_output", "output_schema", "read"]

ROWS_PER_PART = 512
SECONDS_PER_PART = 60.0
_SUMMED = ("num_prompt_tokens", "num_visual_tokens", "num_generated_tokens", "frames_lost", "kv_keep",
           "rounds", "proposed", "accepted", "vision_s", "prefill_s", "decode_s")  # fmt: skip


class Output:
    """An output that this driver holds: rows go in by `add`. Made by `open_output`; a context
    manager.

    Attributes: done: fingerprints (16 bytes) of the requests that have a row; with `retry_failed`
        not of those that failed. failed: fingerprints of the requests that had an error row when
        the output was opened.
    """

    def __init__(
        self,
        uri: str,
        schema: pa.Schema,
        lease: ledger.Lease,
        clock: Callable[[], float],
        rows_per_part: int,
    ):
        self._uri = uri
        self._schema = schema
        self._lease = lease
        self._clock = clock
        self._rows_per_part = rows_per_part
        self.done: set[bytes] = set()
        self.failed: set[bytes] = set()
        self._records: dict[str, Record] = {}
        self._holder: dict[
            bytes, str
        ] = {}  # id → record of its error row, which a new row replaces
        self._held: Counter[str] = Counter()  # record → error rows in it that count
        self._unsure: set[str] = set()  # parts whose commit failed half-way
        self._buffers: dict[bool, list[dict[str, Any]]] = {False: [], True: []}  # error rows apart
        self._since: dict[bool, float] = {}
        self._sequence = self._new = 0

    def start(self, contents: parts.Contents, retry_failed: bool) -> None:
        """Takes over what is there: removes leftovers, finishes half-done replacements."""
        self._records = dict(contents.records)
        self._clean(contents)
        for name, old in ledger.superseded(self._records.values()).items():
            self._rewrite(name, old)
        for record in self._records.values():
            ids = ledger.split(record.ids)
            self.done.update(ids)
            if record.errors:
                self.failed.update(ids)
                self._holder.update(dict.fromkeys(ids, record.name))
                self._held[record.name] = record.rows
        if retry_failed:
            self.done -= self.failed

    @property
    def new(self) -> int:
        """Rows of this run that are committed."""
        return self._new

    @property
    def totals(self) -> dict[str, float]:
        """`requests` and `errors` with a committed row, earlier runs' included; `new` ones of this
        run; and the sums over all rows of the counts, times (s) and `kv_keep`."""
        records = self._records.values()
        sums = {name: sum(r.sums.get(name, 0) for r in records) for name in _SUMMED}
        counts = {
            "requests": sum(r.rows for r in records),
            "new": self._new,
            "errors": sum(r.errors for r in records),
        }
        return counts | sums

    def add(self, row: Mapping[str, Any]) -> None:
        """Takes one request's row; missing columns are null, `created_at` is now. Raises ValueError
        for an unknown column or a request that has its row already, LeaseLost, RequestError."""
        if unknown := row.keys() - set(self._schema.names):
            raise ValueError(f"the output has no column {', '.join(sorted(unknown))}")
        fingerprint = bytes.fromhex(row["request_id"])
        now = self._clock()
        if fingerprint in self.done:
            raise ValueError(f"request {row['request_id']} has its row already")
        self.done.add(fingerprint)
        failed = row["status"] == "error"
        self._since.setdefault(failed, now)
        self._buffers[failed].append(
            {"created_at": datetime.fromtimestamp(now, timezone.utc), **row}
        )
        self.flush_due()

    def flush_due(self) -> None:
        """Commits the rows that fill a part or have waited for 60 s. Raises LeaseLost,
        RequestError."""
        for kind, since in list(self._since.items()):
            if (
                len(self._buffers[kind]) >= self._rows_per_part
                or self._clock() - since >= SECONDS_PER_PART
            ):
                self._flush(kind)

    def flush(self) -> None:
        """Commits the rows that wait. Raises LeaseLost, RequestError; rows that were not committed
        wait on."""
        for kind in (False, True):
            self._flush(kind)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `_summary.json`. Raises LeaseLost, RequestError."""
        self._lease.check()
        storage.put(
            storage.join(self._uri, "_summary.json"), json.dumps(summary, indent=2).encode()
        )

    def stop(self) -> None:
        """Lets go without writing anything more, as a crash would."""
        self._lease.stop()

    def close(self) -> None:
        """Commits what waits, checks that every part is there, and gives the output back.

        Raises LeaseLost, RequestError; then a later driver puts in order what lies there."""
        try:
            self.flush()
            for name, rows in self._held.items():
                if 0 < rows < self._records[name].rows:
                    self._rewrite(
                        name, set(ledger.split(self._records[name].ids)) - self._holder.keys()
                    )
            for name in self._unsure:
                self._remove(name)
            self._check_parts()
        except BaseException:
            self._lease.stop()
            raise
        self._lease.release()

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, ledger.LeaseLost | RequestError):
            self.stop()
        else:
            self.close()

    def _flush(self, kind: bool) -> None:
        rows = self._buffers[kind]
        if rows:
            ids = [bytes.fromhex(row["request_id"]) for row in rows]
            again = [i for i in ids if i in self._holder]
            self._commit(to_table(rows, self._schema), ids, again)
            self._forget(again)
            self._new += len(rows)
            self._buffers[kind] = []
        self._since.pop(kind, None)

    def _commit(self, table: pa.Table, ids: Sequence[bytes], replaces: Sequence[bytes]) -> None:
        """Part, then record."""
        self._sequence += 1
        epoch = self._lease.epoch
        data = parts.to_parquet(table, self._lease.epoch)
        record = Record(
            name=ledger.part_name(ids, f"{epoch}.{self._sequence}" if replaces else ""),
            epoch=epoch,
            sequence=self._sequence,
            size=len(data),
            checksum=hashlib.sha256(data).hexdigest(),
            ids=b"".join(ids),
            replaces=b"".join(replaces),
            errors=pc.sum(pc.equal(table["status"], "error")).as_py(),
            sums={column: pc.sum(table[column]).as_py() or 0 for column in _SUMMED},
        )
        self._unsure.add(record.name)
        self._place(ledger.part_uri(self._uri, record.name), data)
        self._place(ledger.record_uri(self._uri, record.name), record.to_json())
        self._unsure.remove(record.name)
        self._records[record.name] = record

    def _forget(self, replaced: Sequence[bytes]) -> None:
        """Removes the parts of which no row counts any longer."""
        for i in replaced:
            name = self._holder.pop(i)
            self._held[name] -= 1
            if not self._held[name]:
                self._remove(name)

    def _place(self, uri: str, data: bytes) -> None:
        """Writes a new file while the lease holds. What is there already was placed by an older
        driver that woke up after this one had cleaned up, and counts for nothing."""
        self._lease.check()
        if not storage.put_if_absent(uri, data):
            self._lease.check()
            storage.put(uri, data)

    def _rewrite(self, name: str, old: set[bytes]) -> None:
        """Finishes a replacement: the rows of a part that still count move to a part of their own,
        the part goes."""
        rest = [i for i in ledger.split(self._records[name].ids) if i not in old]
        if rest:
            self._commit(parts.read_part(self._uri, self._records[name], old), rest, rest)
        self._remove(name)

    def _remove(self, name: str) -> None:
        """Record first: a part without one counts for nothing."""
        self._lease.check()
        storage.delete(ledger.record_uri(self._uri, name))
        storage.delete(ledger.part_uri(self._uri, name))
        self._records.pop(name, None)

    def _clean(self, contents: parts.Contents) -> None:
        """Removes what older drivers left half-done."""
        self._lease.check()
        for name in contents.void:
            storage.delete(ledger.record_uri(self._uri, name))
        for file, epoch in contents.orphans.items():
            if epoch < self._lease.epoch:
                storage.delete(storage.join(self._uri, file))
        for file in contents.drafts:
            storage.delete(storage.join(self._uri, file))

    def _check_parts(self) -> None:
        """Raises RequestError, LeaseLost; a last look before the run says that every request has
        its row."""
        self._lease.check()
        sizes = storage.list_sizes(self._uri)
        for name, record in self._records.items():
            if sizes.get(f"part-{name}.parquet") != record.size:
                part = storage.redact(ledger.part_uri(self._uri, name))
                raise RequestError(
                    "storage_error", f"{part} is gone or was changed by someone else: run again"
                )


def await_output(
    uri: str, clock: Callable[[], float] = time.time, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Waits until `open_output` would not have to wait for a dead driver's lease; nothing is
    touched. Raises UsageError if another driver is at work or the output cannot be looked at."""
    try:
        ledger.wait_until_free(storage.normalize(uri).rstrip("/"), clock, sleep)
    except RequestError as error:
        raise UsageError(f"the output cannot be used: {error.message}") from error


def open_output(
    uri: str,
    input_schema: pa.Schema,
    *,
    retry_failed: bool = False,
    rows_per_part: int = ROWS_PER_PART,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Output:
    """Takes an output over, new or begun earlier.

    Raises UsageError, with nothing touched, if files lie there that are not ours, if its columns
    differ, if another driver is at work or if it cannot be written; RequestError if storage fails
    later."""
    uri = storage.normalize(uri).rstrip("/")
    schema = output_schema(input_schema.remove_metadata())
    try:
        contents = parts.look(uri)
        parts.check_schema(uri, contents.records, schema)
        lease = ledger.acquire(uri, contents.newest_epoch, clock, sleep)
        storage.make_folder(storage.join(uri, "_ledger"))
    except RequestError as error:
        raise UsageError(f"the output cannot be used: {error.message}") from error
    output = Output(uri, schema=schema, lease=lease, clock=clock, rows_per_part=rows_per_part)
    try:
        output.start(parts.look(uri, contents.records), retry_failed)
    except BaseException:
        lease.stop()
        raise
    return output
