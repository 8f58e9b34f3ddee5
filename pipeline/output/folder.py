"""The files of an output folder: their names, and every storage call on them."""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager
from typing import BinaryIO, cast

from pipeline import storage
from pipeline.records import UsageError

SUMMARY_FILE = "_summary.json"
LEDGER = "_ledger"
LEASES = "_lease"
_PART_FILE = re.compile(r"part-([0-9a-f]{32})\.parquet")
_RECORD_FILE = re.compile(r"([0-9a-f]{32})\.json")
_LEASE_FILE = re.compile(r"(\d+)\.json")


def part_file(name: str) -> str:
    return f"part-{name}.parquet"


def part_name_of(file: str) -> str | None:
    """The name in a part's file name; None for another file."""
    match = _PART_FILE.fullmatch(file)
    return match[1] if match else None


def is_unfinished_part(file: str) -> bool:
    """Whether a file is a local write of a part that was interrupted (`.<part>.<random>`)."""
    return file.startswith(".") and part_name_of(file[1:].rpartition(".")[0]) is not None


def record_file(name: str) -> str:
    return f"{LEDGER}/{name}.json"


def lease_file(epoch: int) -> str:
    return f"{LEASES}/{epoch}.json"


class OutputFolder:
    """One output by its URI. Files are named relative to it.

    Every method raises RequestError where storage fails.
    """

    def __init__(self, uri: str):
        self._uri = storage.normalize(uri).rstrip("/")

    def __str__(self) -> str:
        """The URI without credentials, for messages."""
        return storage.redact(self._uri)

    def check(self) -> None:
        """Raises UsageError for a name that can be no output: a local file, or a URL of HTTP."""
        if self._uri.startswith(("http://", "https://")):
            raise UsageError(f"the output {self} is behind HTTP, which is only read")
        path = storage.local_path(self._uri)
        while path and path != "/":
            if os.path.exists(path) and not os.path.isdir(path):
                raise UsageError(f"the output {self} cannot be a folder: {path} is a file")
            path = os.path.dirname(path)

    def sizes(self) -> dict[str, int]:
        """Name → bytes of the files directly in the output, in order of name."""
        return storage.list_sizes(self._uri)

    def record_names(self) -> list[str]:
        """Names of the ledger's files, whatever is in them."""
        files = storage.list_names(self._path(LEDGER))
        return [match[1] for match in map(_RECORD_FILE.fullmatch, files) if match]

    def lease_epochs(self) -> list[int]:
        files = storage.list_names(self._path(LEASES))
        return [int(match[1]) for match in map(_LEASE_FILE.fullmatch, files) if match]

    def has_ledger(self) -> bool:
        return storage.is_folder(self._path(LEDGER))

    def make_ledger(self) -> None:
        """Creates the ledger's folder, which is there even while it is empty."""
        storage.make_folder(self._path(LEDGER))

    def read(self, file: str) -> bytes:
        return storage.read_bytes(self._path(file))

    def open(self, file: str) -> AbstractContextManager[BinaryIO]:
        """A seekable file, read in ranges."""
        return cast(AbstractContextManager[BinaryIO], storage.open_read(self._path(file)))

    def put(self, file: str, data: bytes) -> None:
        """Writes or replaces a file as a whole."""
        storage.put(self._path(file), data)

    def put_if_absent(self, file: str, data: bytes) -> bool:
        """Writes a file as a whole unless it exists; False if it does."""
        return storage.put_if_absent(self._path(file), data)

    def delete(self, file: str) -> None:
        """Removes a file; a missing one is no error."""
        storage.delete(self._path(file))

    def describe(self, file: str) -> str:
        """The URI of a file without credentials, for messages."""
        return storage.redact(self._path(file))

    def _path(self, file: str) -> str:
        return storage.join(self._uri, file)
