"""The parts of an output as they lie there: which are ours, which count, and what is in them.
Writes nothing.

A part counts if its record parses and names its size; of several rows of one request the latest
commit's counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.output import ledger
from pipeline.output.ledger import PART, Record
from pipeline.output.schema import RESULT_SCHEMA
from pipeline.records import RequestError, UsageError

_FOOTER = b"std-caption"  # key of our id in a part's footer


def to_parquet(table: pa.Table, epoch: int) -> bytes:
    """A part's bytes, with our id in the footer."""
    stream = pa.BufferOutputStream()
    marked = table.replace_schema_metadata({_FOOTER: json.dumps({"format": 1, "epoch": epoch})})
    pq.write_table(marked, stream, compression="zstd")
    return stream.getvalue().to_pybytes()


@dataclass(frozen=True)
class Contents:
    """What a look at an output found: valid records, leftover parts (name → epoch) and leftover
    record files."""

    records: Mapping[str, Record]
    orphans: Mapping[str, int]
    void: frozenset[str]
    drafts: tuple[str, ...]  # dot-names of parts that were being written

    @property
    def newest_epoch(self) -> int:
        return max(
            [*self.orphans.values(), *(record.epoch for record in self.records.values())], default=0
        )


def look(output: str, known: Mapping[str, Record] | None = None) -> Contents:
    """Reads an output's ledger and files; records in `known` are not read again. Raises UsageError
    where something lies there that is not ours, RequestError."""
    names = frozenset(ledger.record_names(output))
    known = {name: record for name, record in (known or {}).items() if name in names}
    loaded = {**known, **ledger.load_records(output, sorted(names - known.keys()))}
    sizes = storage.list_sizes(output)
    valid = {n: r for n, r in loaded.items() if sizes.get(f"part-{n}.parquet") == r.size}
    orphans = {}
    for file in sizes:
        match = PART.fullmatch(file)
        if file.startswith("part-") and not (match and match[1] in valid):
            record = loaded.get(match[1]) if match else None
            orphans[file] = record.epoch if record else _epoch_in_footer(output, file)
    if any(PART.fullmatch(file) for file in sizes) and not storage.is_folder(
        storage.join(output, "_ledger")
    ):
        raise UsageError(
            f"{storage.redact(output)} holds parts but no _ledger/, so nobody can say which of them count"
        )
    drafts = tuple(
        file for file in sizes if file[0] == "." and PART.fullmatch(file[1:].rpartition(".")[0])
    )
    return Contents(valid, orphans, names - valid.keys(), drafts)


def _epoch_in_footer(output: str, file: str) -> int:
    """The epoch that a part of ours names in its footer. Raises UsageError for a file that is not
    ours."""
    metadata = None
    if PART.fullmatch(file):
        try:
            with storage.open_read(storage.join(output, file)) as opened:
                metadata = (pq.read_schema(opened).metadata or {}).get(_FOOTER)
        except (pa.ArrowException, OSError):  # OSError: what pyarrow says of some broken files
            metadata = None
    if metadata is None:
        raise UsageError(
            f"{storage.redact(storage.join(output, file))} was not written by this program: choose another output"
        )
    return int(json.loads(metadata)["epoch"])


def check_schema(output: str, records: Mapping[str, Record], schema: pa.Schema) -> None:
    """Raises UsageError if the parts that are there have other columns than the ones to come."""
    if not records:
        return
    with storage.open_read(ledger.part_uri(output, min(records))) as opened:
        there = pq.read_schema(opened).remove_metadata()
    if there.equals(schema):
        return
    names = sorted({*there.names, *schema.names})
    differ = [
        n
        for n in names
        if n not in there.names or n not in schema.names or there.field(n) != schema.field(n)
    ]
    named = f"columns {', '.join(differ)} differ" if differ else "the order of the columns differs"
    raise UsageError(
        f"{storage.redact(output)} was written for an input with other columns ({named}): choose another output"
    )


def read(output: str) -> pa.Table:
    """All rows of an output, each request once, also while a driver writes: follows the ledger.
    Raises UsageError if there is no output, RequestError."""
    output = storage.normalize(output).rstrip("/")
    for _ in range(20):
        if not storage.is_folder(storage.join(output, "_ledger")):
            raise UsageError(f"{storage.redact(output)}: there is no output here")
        names = ledger.record_names(output)
        try:
            tables = _read_parts(output, names)
        except RequestError as error:
            if error.code != "not_found":
                raise
            continue  # a part was replaced meanwhile
        if set(names) <= set(
            ledger.record_names(output)
        ):  # else a replacement may have been seen half
            return pa.concat_tables(tables) if tables else RESULT_SCHEMA.empty_table()
    raise RequestError("storage_error", f"{storage.redact(output)} keeps changing while it is read")


def _read_parts(output: str, names: Iterable[str]) -> list[pa.Table]:
    sizes = storage.list_sizes(output)
    loaded = ledger.load_records(output, names).values()
    records = sorted(
        (r for r in loaded if sizes.get(f"part-{r.name}.parquet") == r.size), key=lambda r: r.key
    )
    old = ledger.superseded(records)
    return storage.map_concurrently(
        lambda record: read_part(output, record, old.get(record.name, set())), records
    )


def read_part(output: str, record: Record, old: set[bytes]) -> pa.Table:
    """A part's rows but for those that a later commit replaced. Raises RequestError."""
    uri = ledger.part_uri(output, record.name)
    data = storage.read_bytes(uri)
    if hashlib.sha256(data).hexdigest() != record.checksum:
        raise RequestError(
            "storage_error",
            f"{storage.redact(uri)} is not what its record says: its checksum differs",
        )
    table = pq.read_table(pa.BufferReader(data)).replace_schema_metadata(None)
    keep = [i not in old for i in ledger.split(record.ids)]
    return table if all(keep) else table.filter(pa.array(keep))
