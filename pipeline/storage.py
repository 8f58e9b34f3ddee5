"""Reads and writes files on local disks and in S3: paths, `file://`, `s3://`; single files behind
`http(s)://` for reading only.

The only module that opens URLs and imports fsspec. `uris.py` parses names, `local_files.py` handles
local disks. Every failure is a `RequestError` (`not_found`, `access_denied`, `storage_error`) whose
one sentence names the file without its credentials (`credentials.py`). The standard AWS variables
(`AWS_ENDPOINT_URL`, ...) give S3's endpoint and credentials.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import posixpath
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import aiohttp
import fsspec
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
from fsspec.utils import glob_translate

from pipeline import local_files, uris
from pipeline.credentials import (
    canonical,
    display_uri,
    redact,
    redact_text,
    redact_utf8,
    share_redaction_key,
)
from pipeline.records import RequestError
from pipeline.uris import join, local_path, normalize, parent, resolve

__all__ = [
    "FileInfo",
    "canonical",
    "delete",
    "display_uri",
    "expand_glob",
    "info",
    "is_file",
    "is_folder",
    "join",
    "list_files",
    "list_names",
    "list_sizes",
    "local_path",
    "make_folder",
    "map_concurrently",
    "normalize",
    "open_read",
    "parent",
    "put",
    "put_if_absent",
    "read_bytes",
    "redact",
    "redact_text",
    "redact_utf8",
    "resolve",
    "share_redaction_key",
]

_FAILURES = (
    OSError,
    ValueError,
    ImportError,
    asyncio.TimeoutError,
    BotoCoreError,
    ClientError,
    aiohttp.ClientError,
)
THREADS = 8  # storage calls that run at once
MIN_CONCURRENT_READS = 16  # small reads; fewer take less time than new threads' first connections
READ_AHEAD_BYTES = 256 << 10  # per range request; s3fs's default of 50 MB is most of a video
MAX_CONFLICTS = 10  # conditional puts that S3 may reject because another put is under way

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class FileInfo:
    """Metadata of one file.

    Args:
        size: bytes.
        version: ETag, or mtime in ns, as text; it changes when the file does.
    """

    uri: str
    size: int
    version: str


# ------------------------------------------------------------------------------------------- errors


@contextmanager
def _errors(uri: str) -> Iterator[None]:
    """Turns what a storage call raises into a `RequestError` that names the file."""
    try:
        yield
    except _FAILURES as error:
        raise _request_error(uri, error) from error


def _request_error(uri: str, error: BaseException) -> RequestError:
    name = display_uri(uri) or "(no name)"
    http_status = getattr(error, "status", None)
    absent = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    if isinstance(error, absent) or http_status == 404:
        return RequestError("not_found", f"{name}: there is no such file")
    if isinstance(error, PermissionError) or http_status in (401, 403):
        return RequestError(
            "access_denied", f"{name}: access is denied with the credentials in use"
        )
    if isinstance(error, NoCredentialsError):
        return RequestError(
            "access_denied", f"{name}: there are no S3 credentials in the environment"
        )
    return RequestError("storage_error", f"{name}: {_reason(error)}")


def _reason(error: BaseException) -> str:
    """The error's message in one line, without credentials."""
    strerror = error.strerror if isinstance(error, OSError) else None
    text = redact_text(strerror or str(error) or type(error).__name__)
    text = re.sub(r"[^\s/\"'=]+:[^\s/\"']+@", "", text)
    return " ".join(text.split())


# ------------------------------------------------------------------------------ remote filesystems

_thread_state = threading.local()


class _S3Object(NamedTuple):
    uri: str
    size: int  # bytes


def _remote(uri: str) -> tuple[Any, str]:
    """The fsspec filesystem of a remote URI, and the file's name in it.

    There is one filesystem per thread, since shared s3fs objects deadlock; per process, since a
    forked copy is unusable; and per endpoint, which s3fs reads only when it is made.
    """
    scheme, _, path = normalize(uri).partition("://")
    if scheme not in ("s3", "http", "https"):
        raise ValueError(
            f"{scheme}:// is not supported; s3://, http(s)://, file:// and local paths are"
        )
    protocol = "s3" if scheme == "s3" else "http"
    endpoints = (os.environ.get("AWS_ENDPOINT_URL_S3"), os.environ.get("AWS_ENDPOINT_URL"))
    key = (os.getpid(), protocol, *endpoints)
    filesystems = _thread_state.__dict__.setdefault("filesystems", {})
    if key not in filesystems:
        options = _s3_options() if protocol == "s3" else {}
        filesystems[key] = fsspec.filesystem(
            protocol, skip_instance_cache=True, use_listings_cache=False, **options
        )
    return filesystems[key], path if protocol == "s3" else uri


def _s3_options() -> dict[str, Any]:
    """Options of s3fs. Throttling, 5xx, resets and timeouts are retried, after up to 1, 2, 4, ...
    20 s."""
    max_attempts = int(os.environ.get("AWS_MAX_ATTEMPTS", 7))
    config = {
        "retries": {"mode": "standard", "max_attempts": max_attempts},
        "connect_timeout": 10,
        "read_timeout": 30,
    }
    # with a higher concurrency, reading a whole file takes an extra request for its size
    return {"max_concurrency": 1, "config_kwargs": config}


def _list_s3(folder: str, prefix: str = "", delimiter: str = "") -> Iterator[_S3Object]:
    """The objects below an S3 folder, in order, one page at a time.

    Args:
        prefix: that names within the folder start with.
        delimiter: "/" leaves out objects in subfolders.
    """
    fs, path = _remote(folder)
    bucket, _, key_prefix = path.partition("/")
    key_prefix = key_prefix.rstrip("/") + "/" if key_prefix.strip("/") else ""
    query: dict[str, Any] = {
        "Bucket": bucket,
        "Prefix": key_prefix + prefix,
        "Delimiter": delimiter,
    }
    while True:
        page = fs.call_s3("list_objects_v2", **query)
        for entry in page.get("Contents", ()):
            if not entry["Key"].endswith("/"):  # the marker of an empty folder
                yield _S3Object(f"s3://{bucket}/{entry['Key']}", entry["Size"])
        if not page.get("IsTruncated"):
            return
        query["ContinuationToken"] = page["NextContinuationToken"]


# ------------------------------------------------------------------------- metadata and listings


def info(uri: str) -> FileInfo:
    """Size and version of one file. Raises RequestError."""
    with _errors(uri):
        if not uri:
            raise FileNotFoundError(uri)
        if (path := local_path(uri)) is not None:
            stat = os.stat(path)
            if os.path.isdir(path):
                raise IsADirectoryError(path)
            return FileInfo(path, stat.st_size, str(stat.st_mtime_ns))
        fs, name = _remote(uri)
        entry = fs.info(name)
        if entry["type"] != "file":
            raise FileNotFoundError(uri)
        version = entry.get("ETag") or entry.get("LastModified") or entry.get("Last-Modified") or ""
        return FileInfo(normalize(uri), entry["size"] or 0, str(version).strip('"'))


def is_file(uri: str) -> bool:
    """Whether the file exists. Raises RequestError if that cannot be found out."""
    try:
        info(uri)
    except RequestError as error:
        if error.code == "not_found":
            return False
        raise
    return True


def is_folder(uri: str) -> bool:
    """Whether the folder exists; on S3, whether any object, or the marker of an empty folder, has
    the name as its prefix. Raises RequestError."""
    with _errors(uri):
        if (path := local_path(uri)) is not None:
            return os.path.isdir(path)
        fs, name = _remote(uri)
        if not normalize(uri).startswith("s3://"):
            return False
        bucket, _, key = name.rstrip("/").partition("/")
        prefix = key + "/" if key else ""
        page = fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=1)
        return bool(page.get("KeyCount"))


def list_files(uri: str, suffixes: Collection[str] = ()) -> Iterator[str]:
    """The visible files below a folder or bucket prefix, at any depth, sorted by name.

    Args:
        suffixes: lower-case, with the dot; files with other suffixes are left out. Empty: all.

    Raises:
        RequestError: while the files are iterated, too.
    """
    with _errors(uri):
        path = local_path(uri)
        files = local_files.walk(path) if path is not None else _visible_s3_files(uri)
        for file in files:
            if not suffixes or posixpath.splitext(file)[1].lower() in suffixes:
                yield file


def _visible_s3_files(folder: str) -> Iterator[str]:
    start = len(normalize(folder).rstrip("/"))
    for uri, _ in _list_s3(folder):
        if "/." not in uri[start:]:
            yield uri


def list_sizes(folder: str) -> dict[str, int]:
    """Name to size in bytes of a folder's own files, dot-names included, sorted by name; empty
    without such a folder. Raises RequestError."""
    with _errors(folder):
        if (path := local_path(folder)) is not None:
            return local_files.file_sizes(path)
        return {uri.rpartition("/")[2]: size for uri, size in _list_s3(folder, delimiter="/")}


def list_names(folder: str) -> list[str]:
    """The names of a folder's own files, sorted; empty without such a folder. Raises
    RequestError."""
    return list(list_sizes(folder))


def expand_glob(uri: str) -> Iterator[str]:
    """The files that a glob matches, sorted.

    Supports `*`, `?`, `[...]`, `{a,b}`, `**` as a whole path component, and a final `/` for
    everything below. Hidden files match only if the pattern has the dot. A file whose name is the
    pattern itself, or a name without glob characters, stands for itself.

    Raises:
        RequestError: while the files are iterated, too.
    """
    is_http = normalize(uri).startswith(("http://", "https://"))
    if not uris.is_glob(uri) or is_http or is_file(uri):
        yield normalize(uri)
        return
    with _errors(uri):
        pattern = normalize(uri).rstrip("/") + ("/**" if uri.endswith("/") else "")
        base, rest = uris.split_glob(pattern, is_folder)
        patterns = uris.expand_braces(rest)
        if (path := local_path(base)) is not None:
            yield from local_files.glob(path, patterns)
        else:
            yield from _glob_s3(base, patterns)


def _glob_s3(base: str, patterns: list[str]) -> Iterator[str]:
    start = len(base) + 1
    regexes = [re.compile(glob_translate(pattern)) for pattern in patterns]
    regexes_with_dot = [
        regex
        for regex, pattern in zip(regexes, patterns, strict=True)
        if uris.matches_hidden(pattern)
    ]
    for uri, _ in _list_s3(base, uris.common_prefix(patterns)):
        hidden = "/." in uri[start - 1 :]
        candidates = regexes_with_dot if hidden else regexes
        if any(regex.match(uri[start:]) for regex in candidates):
            yield uri


# ------------------------------------------------------------------------------------------ reading


class _Reader(io.RawIOBase):
    """A seekable file that raises `RequestError`s when it is read."""

    def __init__(self, uri: str, file: Any):
        self._uri = uri
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        with _errors(self._uri):
            return self._file.read(-1 if size is None else size)

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _errors(self._uri):
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def open_read(uri: str, block_size: int = READ_AHEAD_BYTES) -> Iterator[_Reader]:
    """Opens a seekable binary file.

    Args:
        block_size: bytes per range request of a remote file.

    Raises:
        RequestError: while the file is read, too.
    """
    with _errors(uri):
        if not uri:
            raise FileNotFoundError(uri)
        if (path := local_path(uri)) is not None:
            file: Any = open(path, "rb")  # noqa: SIM115 - closed by the reader
        else:
            fs, name = _remote(uri)
            file = fs.open(name, "rb", block_size=block_size)
    with _Reader(uri, file) as reader:
        yield reader


def read_bytes(uri: str) -> bytes:
    """Reads a whole file. Raises RequestError."""
    with _errors(uri):
        if (path := local_path(uri)) is not None:
            with open(path, "rb") as file:
                return file.read()
        fs, name = _remote(uri)
        return fs.cat_file(name)


def map_concurrently(
    function: Callable[[T], R],
    items: Iterable[T],
    threads: int = THREADS,
    min_items: int = MIN_CONCURRENT_READS,
) -> list[R]:
    """Calls a function that mostly waits for storage on each item.

    Args:
        threads: calls that run at once.
        min_items: with fewer items the calls run one after another in the calling thread.

    Returns:
        The results in the order of the items.
    """
    listed: Sequence[T] = list(items)
    if len(listed) < min_items:
        return list(map(function, listed))
    return list(_thread_pool(os.getpid(), threads).map(function, listed))


@cache
def _thread_pool(process_id: int, threads: int) -> ThreadPoolExecutor:
    """A pool that is kept, and with it each thread's filesystem: making one takes longer than many
    reads. Threads do not survive a fork, so each process has its own pool."""
    return ThreadPoolExecutor(threads, "storage")


# ------------------------------------------------------------------------------------------ writing


def put(uri: str, data: bytes) -> None:
    """Writes a file atomically: readers see the old content or all of the new. Raises
    RequestError."""
    with _errors(uri):
        if (path := local_path(uri)) is not None:
            local_files.write(path, data)
            return
        fs, name = _remote(uri)
        fs.pipe_file(name, data)


def put_if_absent(uri: str, data: bytes) -> bool:
    """Writes a file atomically unless it exists; of several writers one gets True.

    On S3 a file with the same content counts as this writer's own, since the reply to its put may
    have been lost. Writers therefore have to write different data.

    Raises:
        RequestError
    """
    with _errors(uri):
        if (path := local_path(uri)) is not None:
            return local_files.write_if_absent(path, data)
        return _put_s3_if_absent(uri, data)


def _put_s3_if_absent(uri: str, data: bytes) -> bool:
    """A conditional put."""
    fs, name = _remote(uri)
    for _ in range(MAX_CONFLICTS):
        try:
            fs.pipe_file(name, data, mode="create")
            return True
        except OSError as error:
            response = getattr(error.__cause__, "response", None) or {}
            code = response.get("Error", {}).get("Code")
            if isinstance(error, FileExistsError) or code in ("PreconditionFailed", "412"):
                return fs.cat_file(name) == data
            if code != "ConditionalRequestConflict":
                raise
    raise OSError(errno.EBUSY, "other writers kept writing the same file")


def make_folder(uri: str) -> None:
    """Makes a folder that exists while it is empty; on S3 by an empty object with a final slash, as
    consoles do. Raises RequestError."""
    with _errors(uri):
        if (path := local_path(uri)) is not None:
            os.makedirs(path, exist_ok=True)
            return
        fs, name = _remote(uri)
        bucket, _, key = name.partition("/")
        fs.call_s3("put_object", Bucket=bucket, Key=key.rstrip("/") + "/", Body=b"")


def delete(uri: str) -> None:
    """Deletes a file; no error if it does not exist. Raises RequestError."""
    with _errors(uri):
        try:
            if (path := local_path(uri)) is not None:
                os.unlink(path)
            else:
                fs, name = _remote(uri)
                fs.rm_file(name)
        except FileNotFoundError:
            return
