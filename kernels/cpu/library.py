"""A shared library that is compiled on first use and kept in the user's cache folder.

    find_or_build(library) -> path of a library that has passed its test

A process loads only what it may trust and what works: a file of its own user or of root, that
nobody else can write, whose content has the checksum in its name, and that a child process has
loaded and tested. A truncated library would otherwise end the process by SIGBUS. A library that
fails is built again.

The name is `<inputs>-<machine>-<compiler>-<checksum>.so`: hashes of sources and flags, of the CPU's
instruction sets, of the compiler's version, and of the library's content. Without a compiler, any
compiler's library for these sources and this CPU is used. The library gets its name when it is
complete, on disk and tested, and one process at a time builds in a folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BUILD_TIMEOUT_S = 600  # of one source file
TEST_TIMEOUT_S = 60
BUILD_PREFIX = "build-"  # of temporary folders


class LibraryUnavailable(Exception):
    """There is no library and none can be built; the message is the reason."""


class _UnusableFolder(Exception):
    """A folder cannot hold the library; another one may."""


@dataclass(frozen=True)
class Library:
    """What a shared library is built from.

    Args:
        sources: C++ files.
        headers: files that they include.
        flags: of the compiler.
        self_test: Python script that is run in a child process, without packages, as
            `self_test.py <library> <preload>...`. It exits with 0 if the library works.
        preload: shared libraries that the self-test loads first.
    """

    sources: tuple[Path, ...]
    headers: tuple[Path, ...]
    flags: tuple[str, ...]
    self_test: Path
    preload: tuple[str, ...] = ()

    @property
    def inputs_hash(self) -> str:
        digest = hashlib.sha256(repr(self.flags).encode())
        for file in (*self.sources, *self.headers):
            digest.update(file.read_bytes())
        return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the words of its command, and a hash of these and of its version."""

    command: tuple[str, ...]
    hash: str

    @classmethod
    def find(cls) -> Compiler | None:
        """Return the compiler that `CXX` names, or the machine's; None if there is none."""
        named = os.environ.get("CXX")
        try:
            commands = [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]
        except ValueError:  # an unclosed quotation
            return None
        for command in commands:
            if not command or shutil.which(command[0]) is None:
                continue
            try:
                version = subprocess.run(
                    [*command, "--version"], capture_output=True, check=True, timeout=60
                ).stdout
            except (OSError, subprocess.SubprocessError):
                continue
            return cls(tuple(command), _short_hash(repr(command).encode() + version))
        return None


def find_or_build(library: Library) -> Path:
    """Return a library that has passed its test; build it if there is none.

    Raises:
        LibraryUnavailable: there is no compiler, or it fails, or no folder can hold the library.
    """
    compiler = Compiler.find()
    reasons = []
    for folder in cache_folders():
        try:
            _make_private(folder)
            return _find_or_build_in(folder, library, compiler)
        except (OSError, _UnusableFolder) as error:
            reasons.append(f"{folder}: {error}")
    raise LibraryUnavailable("; ".join(reasons))


def cache_folders() -> list[Path]:
    """Folders that may hold the library, best first: the user's cache, and a temporary folder."""
    temporary = Path(tempfile.gettempdir()) / f"std-caption-{os.getuid()}"
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the specification says to ignore relative paths
        cache = os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):  # there is no home folder
        return [temporary]
    return [Path(cache) / "std-caption", temporary]


def _make_private(folder: Path) -> None:
    """Make a folder if it is missing, and check who can write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := _distrust(folder.stat()):
        raise _UnusableFolder(reason)


def _distrust(status: os.stat_result) -> str | None:
    """Why another user could have written a file or folder; None if none could."""
    if status.st_uid not in (0, os.getuid()):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return "every user can write to it"
    return None


# ------------------------------------------------------------------------------------ one folder


def _find_or_build_in(folder: Path, library: Library, compiler: Compiler | None) -> Path:
    prefix = f"{library.inputs_hash}-{_machine_hash()}"
    pattern = f"{prefix}-{compiler.hash if compiler else '*'}-*.so"
    for path in folder.glob(pattern):
        if _fault(path, library) is None:
            return path
    if compiler is None:
        named = os.environ.get("CXX")
        named = f" (CXX is {named!r})" if named else ""
        raise _UnusableFolder(f"it holds no library, and there is no C++ compiler{named}")
    with _lock(folder):
        for leftover in folder.glob(f"{BUILD_PREFIX}*"):  # of processes that were killed
            shutil.rmtree(leftover)
        for path in folder.glob(pattern):
            if _fault(path, library) is None:  # another process has built it meanwhile
                return path
            path.unlink()
        return _build(folder, f"{prefix}-{compiler.hash}", library, compiler)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Wait until no other process builds in a folder. The lock ends with the process."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    descriptor = os.open(folder / "lock", flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _build(folder: Path, name: str, library: Library, compiler: Compiler) -> Path:
    """Compile and test in a temporary folder, then move the result into place."""
    with tempfile.TemporaryDirectory(prefix=BUILD_PREFIX, dir=folder) as temporary:
        built = Path(temporary) / "library.so"
        objects = [f"{temporary}/{source.stem}.o" for source in library.sources]
        for source, target in zip(library.sources, objects, strict=True):
            _compile([*compiler.command, *library.flags, "-c", str(source), "-o", target])
        _compile([*compiler.command, "-shared", "-o", str(built), *objects])
        if reason := _test(built, library):
            raise _UnusableFolder(f"the library that was built there fails: {reason}")
        built.chmod(0o600)
        _flush(built)
        path = folder / f"{name}-{_short_hash(built.read_bytes())}.so"
        built.replace(path)
    _flush(folder)
    return path


def _compile(command: Sequence[str]) -> None:
    try:
        subprocess.run(
            command,
            capture_output=True,
            check=True,
            text=True,
            errors="replace",
            timeout=BUILD_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line.lower()]
        reason = lines[0] if lines else f"exit code {error.returncode}"
        raise LibraryUnavailable(f"{command[0]} failed: {reason}") from error
    except subprocess.TimeoutExpired as error:
        raise LibraryUnavailable(f"{command[0]} took over {BUILD_TIMEOUT_S} s") from error


def _flush(path: Path) -> None:
    """Wait until a file, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------- one library


def _fault(path: Path, library: Library) -> str | None:
    """Why a library must not be loaded; None if it may."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return "it is not a regular file"
        if reason := _distrust(status):
            return reason
        if _short_hash(path.read_bytes()) != path.stem.rpartition("-")[2]:
            return "its content is not what was built"
    except OSError as error:
        return str(error)
    return _test(path, library)


def _test(path: Path, library: Library) -> str | None:
    """Load and test a library in a child process; return why it fails, None if it works."""
    # without the user's packages, which the test does not need: they take time to find
    python = [sys.executable, "-E", "-s", "-S"]
    try:
        done = subprocess.run(
            [*python, str(library.self_test), str(path), *library.preload],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TEST_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its test did not run: {error}"
    if done.returncode < 0:
        return f"its test died of {signal.Signals(-done.returncode).name}"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"its test failed: {lines[-1]}"
    return None


def _machine_hash() -> str:
    """Hash of what `-march=native` depends on."""
    wanted = ("vendor_id", "cpu family", "model", "flags", "CPU part", "Features")
    text = ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            kept = {line.strip() for line in lines if line.split(":")[0].strip() in wanted}
        text = "\n".join(sorted(kept))
    return _short_hash(f"{platform.machine()}\n{text}".encode())


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
