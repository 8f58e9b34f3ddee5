from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from std_core.model import file_hashes
from std_core.model.checkpoint import checkpoint_hash
from std_core.model.file_hashes import sha256_of_file

SIZE = 70 << 20  # as of a shard of weights


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and files that need not settle."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_hashes, "SETTLED_SECONDS", -1.0)
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    return path


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are hashed from now on."""
    names: list[str] = []
    digest = hashlib.file_digest

    def counting(stream: object, name: str) -> object:
        names.append(getattr(stream, "name", ""))
        return digest(stream, name)  # type: ignore[arg-type]

    monkeypatch.setattr(hashlib, "file_digest", counting)
    return names


def test_a_byte_in_the_middle_of_a_large_file_changes_the_revision(tmp_path: Path) -> None:
    revisions = set()
    for place in (1, SIZE // 2, SIZE - 2):
        folder = tmp_path / str(place)
        folder.mkdir()
        with (folder / "model.safetensors").open("wb") as stream:
            stream.truncate(SIZE)
            stream.seek(place)
            stream.write(b"\1")
        revisions.add(checkpoint_hash(str(folder)))
    assert len(revisions) == 3


def test_a_file_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = reads(monkeypatch)
    assert sha256_of_file(file) == sha256_of_file(file) == hashlib.sha256(b"abc").hexdigest()
    assert names == [str(file)]


def test_a_changed_file_is_read_again(file: Path) -> None:
    before = file.stat()
    sha256_of_file(file)
    file.write_bytes(b"xyz")  # in place, of the same size, with the same modification time
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_ino == before.st_ino
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # until the file system's clock ticks
        file.chmod(0o600)
    assert sha256_of_file(file) == hashlib.sha256(b"xyz").hexdigest()


def test_the_hash_of_a_file_that_may_still_change_is_not_kept(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashes, "SETTLED_SECONDS", 3600.0)
    sha256_of_file(file)
    assert not cache.exists()


@pytest.mark.parametrize("content", ["", "0" * 63, "g" * 64])
def test_a_damaged_entry_is_no_hash(file: Path, cache: Path, content: str) -> None:
    digest = sha256_of_file(file)
    [entry] = (path for path in cache.rglob("*") if path.is_file())
    entry.write_text(content)
    assert sha256_of_file(file) == digest
    assert entry.read_text() == digest


def test_without_a_cache_folder_files_are_hashed_all_the_same(file: Path, cache: Path) -> None:
    cache.write_bytes(b"")
    assert sha256_of_file(file) == hashlib.sha256(b"abc").hexdigest()
