"""The parts of an output: Parquet files, and which of them count.

A part counts if its record parses and names its size.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.output.folder import OutputFolder, is_unfinished_part, part_file, part_name_of
from pipeline.output.ledger import Record, read_records
from pipeline.records import RequestError, UsageError

logger = logging.getLogger(__name__)

_FOOTER_KEY = b"std-caption"  # marks a Parquet file as ours


def to_parquet(table: pa.Table, epoch: int) -> bytes:
    """The bytes of a part, with our mark and the driver's epoch in the footer."""
    stream = pa.BufferOutputStream()
    footer = {_FOOTER_KEY: json.dumps({"format": 1, "epoch": epoch})}
    pq.write_table(table.replace_schema_metadata(footer), stream, compression="zstd")
    return stream.getvalue().to_pybytes()


def read_part(output: OutputFolder, record: Record, superseded: set[bytes]) -> pa.Table:
    """The rows of a part without those that a later commit replaced. Raises RequestError."""
    file = part_file(record.name)
    data = output.read(file)
    if hashlib.sha256(data).hexdigest() != record.checksum:
        raise RequestError(
            "storage_error",
            f"{output.describe(file)} is not what its record says: its checksum differs",
        )
    table = pq.read_table(pa.BufferReader(data)).replace_schema_metadata(None)
    if not superseded:
        return table
    return table.filter(pa.array([id_ not in superseded for id_ in record.fingerprints]))


@dataclass(frozen=True)
class Contents:
    """The files of an output.

    Args:
        records: of the parts that count, by name.
        orphans: file name → epoch of the parts of ours that do not count.
        invalid_records: names of the records whose part is missing or that do not parse.
        unfinished: names of local files that a crash left while a part was being written.
    """

    records: Mapping[str, Record]
    orphans: Mapping[str, int]
    invalid_records: frozenset[str]
    unfinished: tuple[str, ...]

    @property
    def newest_epoch(self) -> int:
        record_epochs = (record.epoch for record in self.records.values())
        return max([*self.orphans.values(), *record_epochs], default=0)


def inspect(output: OutputFolder, known: Mapping[str, Record] | None = None) -> Contents:
    """Lists an output and reads its ledger.

    Args:
        known: records that need not be read again.

    Raises:
        UsageError: the output holds files that are not ours, or parts without a ledger.
        RequestError: storage fails.
    """
    names = frozenset(output.record_names())
    records = {name: record for name, record in (known or {}).items() if name in names}
    records |= read_records(output, sorted(names - records.keys()))
    sizes = output.sizes()
    valid = {
        name: record
        for name, record in records.items()
        if sizes.get(part_file(name)) == record.size
    }
    orphans: dict[str, int] = {}
    for file in sizes:
        name = part_name_of(file)
        if file.startswith("part-") and name not in valid:
            record = records.get(name) if name else None
            orphans[file] = record.epoch if record else _epoch_in_footer(output, file)
    if known is None:
        _warn_of_foreign(output, sizes)
    if any(map(part_name_of, sizes)) and not output.has_ledger():
        raise UsageError(
            f"{output} holds parts but no _ledger/, so nobody can say which of them count"
        )
    return Contents(
        valid,
        orphans,
        invalid_records=names - valid.keys(),
        unfinished=tuple(filter(is_unfinished_part, sizes)),
    )


def _warn_of_foreign(output: OutputFolder, files: Iterable[str]) -> None:
    """Names Parquet files that are not ours and that a reader of the folder would read."""
    foreign = [
        file
        for file in files
        if file.endswith(".parquet") and not file.startswith((".", "_", "part-"))
    ]
    if foreign:
        logger.warning(
            "%s holds %s, not written by this program: readers of the whole folder read it too",
            output,
            ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if foreign[3:] else ""),
        )


def _epoch_in_footer(output: OutputFolder, file: str) -> int:
    """The epoch in the footer of a part of ours. Raises UsageError for a file that is not ours."""
    footer = None
    if part_name_of(file):
        try:
            with output.open(file) as opened:
                footer = (pq.read_schema(opened).metadata or {}).get(_FOOTER_KEY)
        except (pa.ArrowException, OSError):  # pyarrow raises OSError for some broken files
            footer = None
    if footer is None:
        raise UsageError(
            f"{output.describe(file)} was not written by this program: choose another output"
        )
    return int(json.loads(footer)["epoch"])


def check_schema(output: OutputFolder, records: Mapping[str, Record], schema: pa.Schema) -> None:
    """Raises UsageError if the output's parts have other columns than this run writes."""
    if not records:
        return
    with output.open(part_file(min(records))) as opened:
        present = pq.read_schema(opened).remove_metadata()
    if present.equals(schema):
        return
    differing = [
        name
        for name in sorted({*present.names, *schema.names})
        if name not in present.names
        or name not in schema.names
        or present.field(name) != schema.field(name)
    ]
    difference = "the order of the columns differs"
    if differing:
        difference = f"columns {', '.join(differing)} differ"
    raise UsageError(
        f"{output} was written for an input with other columns ({difference}): "
        "choose another output"
    )
