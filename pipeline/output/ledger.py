"""The ledger of an output: one record for each committed part.

A part counts once its record exists. If several parts hold a row of the same request, the row of
the latest commit counts, so an output can be read at any moment of a replacement.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from pipeline import storage
from pipeline.output.folder import OutputFolder, record_file
from pipeline.records import RequestError

FINGERPRINT_BYTES = 16  # of a request id


@dataclass(frozen=True)
class Record:
    """What was committed with one part.

    Args:
        name: 32 hex digits, of the part and of the record.
        epoch: of the driver's lease.
        sequence: number of the commit within the epoch.
        size: of the part, in bytes.
        checksum: SHA-256 of the part.
        ids: fingerprints of the rows, joined, in the part's order.
        replaces: fingerprints of the rows that replace one of an earlier part, joined.
        errors: number of error rows.
        sums: column → sum over the rows.
    """

    name: str
    epoch: int
    sequence: int
    size: int
    checksum: str
    ids: bytes
    replaces: bytes = b""
    errors: int = 0
    sums: Mapping[str, float] = field(default_factory=dict)

    @property
    def commit(self) -> tuple[int, int]:
        """Orders commits."""
        return self.epoch, self.sequence

    @property
    def rows(self) -> int:
        return len(self.ids) // FINGERPRINT_BYTES

    @property
    def fingerprints(self) -> list[bytes]:
        return split_fingerprints(self.ids)

    def to_json(self) -> bytes:
        content = asdict(self) | {"rows": self.rows}
        for name in ("ids", "replaces"):
            content[name] = [fingerprint.hex() for fingerprint in split_fingerprints(content[name])]
        return json.dumps(content).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Record | None:
        """None for anything that is not a whole record."""
        try:
            content = json.loads(data)
            for name in ("ids", "replaces"):
                content[name] = b"".join(map(bytes.fromhex, content[name]))
            rows = content.pop("rows")
            record = cls(**content)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        return record if record.rows == rows else None


def split_fingerprints(joined: bytes) -> list[bytes]:
    return [
        joined[start : start + FINGERPRINT_BYTES]
        for start in range(0, len(joined), FINGERPRINT_BYTES)
    ]


def part_name(fingerprints: Iterable[bytes], commit: str = "") -> str:
    """The name of a part: a hash of its fingerprints in any order.

    Args:
        commit: given if the part replaces rows, since the part it replaces may hold the same
            fingerprints.
    """
    joined = b"".join(sorted(fingerprints))
    return hashlib.blake2b(joined, digest_size=16, salt=commit.encode()[:16]).hexdigest()


def read_records(output: OutputFolder, names: Iterable[str]) -> dict[str, Record]:
    """Records by name, without those that do not parse or were deleted meanwhile. Raises
    RequestError."""
    records = storage.map_concurrently(lambda name: _read_record(output, name), list(names))
    return {record.name: record for record in records if record is not None}


def _read_record(output: OutputFolder, name: str) -> Record | None:
    try:
        record = Record.from_json(output.read(record_file(name)))
    except RequestError as error:
        if error.code == "not_found":
            return None
        raise
    return record if record is not None and record.name == name else None


def superseded(records: Iterable[Record]) -> dict[str, set[bytes]]:
    """Name → fingerprints of which a later commit holds the row; only records that have any."""
    newer: set[bytes] = set()
    found: dict[str, set[bytes]] = {}
    for record in sorted(records, key=lambda record: record.commit, reverse=True):
        replaced = newer.intersection(record.fingerprints)
        if replaced:
            found[record.name] = replaced
        newer.update(record.fingerprints)
    return found
