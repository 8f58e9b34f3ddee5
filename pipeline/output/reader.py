"""Reading an output by its ledger: exact at any time, also while a driver writes."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from pipeline import storage
from pipeline.output.folder import OutputFolder, part_file
from pipeline.output.ledger import Record, read_records, superseded
from pipeline.output.parts import read_part
from pipeline.output.schema import RESULT_SCHEMA
from pipeline.records import RequestError, UsageError

ATTEMPTS = 20  # at a moment in which no part is replaced


def read(uri: str) -> pa.Table:
    """All rows of an output, each request once.

    Raises:
        UsageError: there is no output.
        RequestError: storage fails, or the output keeps changing.
    """
    output = OutputFolder(uri)
    for _ in range(ATTEMPTS):
        if not output.has_ledger():
            raise UsageError(f"{output}: there is no output here")
        names = output.record_names()
        try:
            tables = _read_parts(output, names)
        except RequestError as error:
            if error.code != "not_found":
                raise
            continue  # a part was replaced meanwhile
        # a deleted record may mean that only half of a replacement was read
        if set(names) <= set(output.record_names()):
            return pa.concat_tables(tables) if tables else RESULT_SCHEMA.empty_table()
    raise RequestError("storage_error", f"{output} keeps changing while it is read")


def _read_parts(output: OutputFolder, names: Sequence[str]) -> list[pa.Table]:
    sizes = output.sizes()
    records = [
        record
        for record in read_records(output, names).values()
        if sizes.get(part_file(record.name)) == record.size
    ]
    records.sort(key=lambda record: record.commit)
    old = superseded(records)

    def rows(record: Record) -> pa.Table:
        return read_part(output, record, old.get(record.name, set()))

    return storage.map_concurrently(rows, records)
