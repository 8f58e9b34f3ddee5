"""Files on this machine's disks, by absolute path. Only `storage.py` uses this module."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from glob import iglob

from pipeline.uris import join

_Identity = tuple[int, int]  # device and inode of a folder


def walk(folder: str, above: frozenset[_Identity] = frozenset()) -> Iterator[str]:
    """The visible files below a folder, in the order of their paths as strings. Links to folders
    are followed, except to one of the folders `above`, which would be a loop."""
    above = _entered(folder, above)
    if not above:
        return
    with os.scandir(folder) as entries:
        names = sorted(
            # with its slash, a folder sorts where its files' paths do
            entry.name + "/" if entry.is_dir() else entry.name
            for entry in entries
            if not entry.name.startswith(".")
        )
    for name in names:
        path = os.path.join(folder, name)
        if name.endswith("/"):
            yield from walk(path[:-1], above)
        else:
            yield path


def _entered(folder: str, above: frozenset[_Identity]) -> frozenset[_Identity]:
    """`above` with this folder; empty if it is one of them."""
    stat = os.stat(folder)
    identity = (stat.st_dev, stat.st_ino)
    return frozenset() if identity in above else above | {identity}


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
        matches.update(_matches(base, pattern.split("/")))
    return sorted(path for path in matches if not os.path.isdir(path))


def _matches(folder: str, components: Sequence[str]) -> Iterator[str]:
    """What matches below a folder. Unlike `glob`, `**` enters no loop of links."""
    if not components:
        yield folder
        return
    first, *rest = components
    if first == "**":
        while rest[:1] == ["**"]:
            rest = rest[1:]
        for below in walk(folder) if not rest else _folders(folder, frozenset()):
            yield from _matches(below, rest)
        return
    for name in iglob(first, root_dir=folder):
        path = join(folder, name)
        if not rest or os.path.isdir(path):
            yield from _matches(path, rest)


def _folders(folder: str, above: frozenset[_Identity]) -> Iterator[str]:
    """A folder and the visible ones below it."""
    above = _entered(folder, above)
    if not above:
        return
    yield folder
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
    for name in names:
        yield from _folders(join(folder, name), above)


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
