"""Files on this machine's disks, by absolute path. Only `storage.py` uses this module."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from glob import escape, iglob

from pipeline.uris import join


def walk(folder: str) -> Iterator[str]:
    """The visible files below a folder, in the order of their paths as strings."""
    with os.scandir(folder) as entries:
        names = sorted(
            # with its slash, a folder sorts where its files' paths do
            entry.name + "/" if entry.is_dir(follow_symlinks=False) else entry.name
            for entry in entries
            if not entry.name.startswith(".")
        )
    for name in names:
        path = os.path.join(folder, name)
        if name.endswith("/"):
            yield from walk(path[:-1])
        elif not os.path.isdir(path):
            yield path


def file_sizes(folder: str) -> dict[str, int]:
    """Name to size in bytes of a folder's own files, sorted by name; empty without such a
    folder."""
    if not os.path.exists(folder):
        return {}
    sizes: dict[str, int] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # deleted while the folder is read
                if not entry.is_dir():
                    sizes[entry.name] = entry.stat().st_size
    return dict(sorted(sizes.items()))


def glob(base: str, patterns: Sequence[str]) -> list[str]:
    """The files below a literal folder that match one of the patterns, sorted."""
    matches: set[str] = set()
    for pattern in patterns:
        matches.update(iglob(join(escape(base), pattern), recursive=True))
    return sorted(path for path in matches if not os.path.isdir(path))


def write(path: str, data: bytes) -> None:
    """Writes a file atomically and durably."""
    draft = _write_draft(path, data)
    os.replace(draft, path)
    _sync_folder_of(path)


def write_if_absent(path: str, data: bytes) -> bool:
    """Writes a file atomically and durably; False if it exists."""
    draft = _write_draft(path, data)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(draft)
    _sync_folder_of(path)
    return True


def _write_draft(path: str, data: bytes) -> str:
    """Writes data to a new dot-file in the same folder and syncs it to the disk. Leaves nothing
    behind if that fails."""
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    draft = os.path.join(folder, f".{name}.{uuid.uuid4().hex}")
    try:
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            os.unlink(draft)
        raise
    return draft


def _sync_folder_of(path: str) -> None:
    """Syncs the folder to the disk: a rename survives a power cut only then."""
    descriptor = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
