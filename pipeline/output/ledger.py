"""Who may write to an output, and which of its parts count: leases and records (the output
contract).

A driver holds an output by the highest epoch in `_lease/`. A part counts once its record is there;
of several rows of one request the one of the latest commit counts, so an output can be read at any
moment of a replacement."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field

from pipeline import storage
from pipeline.records import RequestError, RunError, UsageError

PART = re.compile(r"part-([0-9a-f]{32})\.parquet")
RENEW_S = 3.0
EXPIRE_S = 10.0
_ID = 16  # bytes of a request id


class LeaseLost(RunError):
    """Another driver has taken this output over; nothing more may be written to it."""


# --- records -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """What was committed with one part. `key` orders commits; `ids` are the rows' fingerprints, 16
    bytes each, in the part's order; `replaces` those of them that had a row before; `errors` counts
    error rows; `sums` adds up columns."""

    name: str  # 32 hex digits, of the part and of the record
    epoch: int
    sequence: int  # of the driver's commits
    size: int  # bytes of the part
    checksum: str  # SHA-256 of the part
    ids: bytes
    replaces: bytes = b""
    errors: int = 0
    sums: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, int]:
        return self.epoch, self.sequence

    @property
    def rows(self) -> int:
        return len(self.ids) // _ID

    def to_json(self) -> bytes:
        content = asdict(self) | {"rows": self.rows}
        content |= {name: [i.hex() for i in split(content[name])] for name in ("ids", "replaces")}
        return json.dumps(content).encode()


def split(ids: bytes) -> list[bytes]:
    """Fingerprints that were joined."""
    return [ids[i : i + _ID] for i in range(0, len(ids), _ID)]


def part_name(ids: Iterable[bytes], replacing: str = "") -> str:
    """A part's name: the hash of the ids in it, in any order. A part that replaces rows also hashes
    its commit, since the part it replaces may hold the same ids."""
    return hashlib.blake2b(
        b"".join(sorted(ids)), digest_size=16, salt=replacing.encode()[:16]
    ).hexdigest()


def part_uri(output: str, name: str) -> str:
    return storage.join(output, f"part-{name}.parquet")


def record_uri(output: str, name: str) -> str:
    return storage.join(output, "_ledger", f"{name}.json")


def parse_record(data: bytes) -> Record | None:
    """None for anything that is not a whole record."""
    try:
        content = json.loads(data)
        content |= {
            name: b"".join(map(bytes.fromhex, content[name])) for name in ("ids", "replaces")
        }
        rows = content.pop("rows")
        record = Record(**content)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return record if record.rows == rows else None


def record_names(output: str) -> list[str]:
    """The names for which the ledger has a file, whatever is in it."""
    names = storage.list_names(storage.join(output, "_ledger"))
    return [name[:-5] for name in names if re.fullmatch(r"[0-9a-f]{32}\.json", name)]


def load_records(output: str, names: Iterable[str]) -> dict[str, Record]:
    """The records that parse, by name; those that vanish meanwhile are left out. Raises
    RequestError."""
    loaded = storage.map_concurrently(lambda name: _load(output, name), list(names))
    return {record.name: record for record in loaded if record is not None}


def _load(output: str, name: str) -> Record | None:
    try:
        record = parse_record(storage.read_bytes(record_uri(output, name)))
    except RequestError as error:
        if error.code == "not_found":
            return None
        raise
    return record if record is not None and record.name == name else None


def superseded(records: Iterable[Record]) -> dict[str, set[bytes]]:
    """Name → the ids of which a later commit holds the row, for the records that have any."""
    seen: set[bytes] = set()
    old: dict[str, set[bytes]] = {}
    for record in sorted(records, key=lambda r: r.key, reverse=True):
        ids = split(record.ids)
        if again := seen.intersection(ids):
            old[record.name] = again
        seen.update(ids)
    return old


# --- lease ---------------------------------------------------------------------------------------------------------


class Lease:
    """A driver's hold on an output: the highest epoch in `_lease/`, renewed every 3 s in a thread
    of its own."""

    def __init__(self, output: str, epoch: int, clock: Callable[[], float]):
        self._folder = storage.join(output, "_lease")
        self.epoch = epoch
        self._clock = clock
        self._owner = f"{socket.gethostname()} process {os.getpid()} {uuid.uuid4().hex}"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def take(self) -> bool:
        """Whether the epoch was free; it is held from now on. Leases of older epochs are
        removed."""
        if not storage.put_if_absent(self._uri(self.epoch), self._content()):
            return False
        for epoch in _epochs(self._folder):
            if epoch < self.epoch:
                storage.delete(self._uri(epoch))
        self._thread.start()
        return True

    def check(self) -> None:
        """Raises LeaseLost if another driver has taken the output over."""
        if max(_epochs(self._folder), default=0) != self.epoch:
            raise LeaseLost(
                f"another driver has taken over {storage.redact(self._folder)}: this one stops writing"
            )

    def stop(self) -> None:
        """Stops renewing; the lease then runs out by itself."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(EXPIRE_S)

    def release(self) -> None:
        """Stops renewing and lets the next driver in at once."""
        self.stop()
        storage.put(self._uri(self.epoch), self._content(released=True))

    def _keep(self) -> None:
        while not self._stopped.wait(RENEW_S):
            try:
                storage.put(self._uri(self.epoch), self._content())
            except RequestError:
                # renewed again in 3 s; if that is too late, `check` finds out before anything is
                # written
                continue

    def _uri(self, epoch: int) -> str:
        return storage.join(self._folder, f"{epoch}.json")

    def _content(self, released: bool = False) -> bytes:
        content = {
            "epoch": self.epoch,
            "owner": self._owner,
            "renewed": self._clock(),
            "released": released,
        }
        return json.dumps(content).encode()


def wait_until_free(
    output: str, clock: Callable[[], float] = time.time, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Waits for the lease of a driver that has died to be over; touches nothing. Raises as
    `acquire` does."""
    folder = storage.join(output, "_lease")
    _wait_for_expiry(folder, max(_epochs(folder), default=0), clock, sleep)


def acquire(
    output: str,
    oldest: int,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease:
    """Takes an output's lease under an epoch above `oldest` and above all there were; waits for one
    to expire that is no longer renewed. Raises UsageError if another driver is at work,
    RequestError."""
    folder = storage.join(output, "_lease")
    while True:
        held = max(_epochs(folder), default=0)
        _wait_for_expiry(folder, held, clock, sleep)
        lease = Lease(output, max(held, oldest) + 1, clock)
        if lease.take():
            return lease


def _wait_for_expiry(
    folder: str, epoch: int, clock: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    """Returns once a lease is over: released, too old, or, where clocks differ, seen unchanged for
    long enough."""
    first = _read_lease(folder, epoch)
    start = clock()
    while (now := _read_lease(folder, epoch)) and not now["released"]:
        if first and now["renewed"] != first["renewed"]:
            owner = now["owner"].rpartition(" ")[0]
            raise UsageError(
                f"{storage.redact(folder)}: another driver ({owner}) is writing to this output"
            )
        if clock() - min(now["renewed"], start) > EXPIRE_S:
            return
        sleep(1.0)


def _read_lease(folder: str, epoch: int) -> dict | None:
    """None if there is none, or nothing that a driver wrote."""
    try:
        content = json.loads(storage.read_bytes(storage.join(folder, f"{epoch}.json")))
        return content if {"owner", "renewed", "released"} <= content.keys() else None
    except (ValueError, AttributeError):
        return None
    except RequestError as error:
        if error.code == "not_found":
            return None
        raise


def _epochs(folder: str) -> list[int]:
    return [
        int(name[:-5]) for name in storage.list_names(folder) if re.fullmatch(r"\d+\.json", name)
    ]
