"""Hashes of files, each read once: kept by what the file system says about a file.

A checkpoint has hundreds of gigabytes and is loaded by several processes. The hash of a file is
kept in the user's cache folder under its path, size, times and inode. Without such a folder
nothing is kept, and every process reads the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

THREADS = 8  # files that are read at once; hashing releases the interpreter lock
# A file may change again within the file system's clock tick, and keep its times. Hashes of files
# that changed this recently (s) are not kept.
SETTLED_SECONDS = 2.0


def sha256_of_files(files: Sequence[Path]) -> list[str]:
    """The SHA-256 of each file's whole content, as hex digits. Raises OSError."""
    with ThreadPoolExecutor(THREADS, "hash") as pool:
        return list(pool.map(sha256_of_file, files))


def sha256_of_file(file: Path) -> str:
    """The SHA-256 of a file's whole content, as hex digits. Raises OSError."""
    stat = file.stat()
    entry = _cache_entry(file, stat)
    if (kept := _read_entry(entry)) is not None:
        return kept
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    after = file.stat()
    unchanged = _identity(file, after) == _identity(file, stat)
    if unchanged and time.time() - max(stat.st_mtime, stat.st_ctime) > SETTLED_SECONDS:
        _write_entry(entry, digest)
    return digest


def _identity(file: Path, stat: os.stat_result) -> str:
    """Changes when the file does. The time of the last status change is part of it, since copying
    tools set the modification time."""
    numbers = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_dev, stat.st_ino)
    return "\0".join([os.path.abspath(file), *map(str, numbers)])


def _cache_entry(file: Path, stat: os.stat_result) -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    name = hashlib.sha256(os.fsencode(_identity(file, stat))).hexdigest()
    return caches / "std-caption" / "file-hashes" / name


def _read_entry(entry: Path) -> str | None:
    try:
        kept = entry.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None  # not kept, or unreadable: the file is hashed
    is_digest = len(kept) == 64 and set(kept) <= set("0123456789abcdef")
    return kept if is_digest else None


def _write_entry(entry: Path, digest: str) -> None:
    """Writes it as a whole, since other processes read it. The cache is an economy: where it cannot
    be written, the next process hashes the file again."""
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=entry.parent)
        with os.fdopen(descriptor, "w", encoding="ascii") as stream:
            stream.write(digest)
        os.replace(name, entry)
