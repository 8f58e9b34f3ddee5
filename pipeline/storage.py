"""Files wherever they lie: local paths, `file://`, `s3://` (and single files behind `http(s)://`,
reading only).

The only module that opens a URL; what names mean is in `uris.py`. Every failure is a `RequestError`
(`not_found`, `access_denied`, `storage_error`) whose one sentence names the file without its
credentials. S3's endpoint and credentials come from the standard AWS variables (`AWS_ENDPOINT_URL`,
...)."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import posixpath
import re
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from glob import escape, iglob
from typing import Any, TypeVar

import aiohttp
import fsspec
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
from fsspec.utils import glob_translate

from pipeline import uris
from pipeline.records import RequestError
from pipeline.uris import (
    display_uri,
    join,
    local_path,
    normalize,
    parent,
    redact,
    redact_utf8,
    resolve,
)

__all__ = [
    "FileInfo",
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
    "redact_utf8",
    "resolve",
]  # fmt: skip

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
_threads = threading.local()
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class FileInfo:
    """One file: `version` is its ETag or its mtime in ns, as text; it changes when the file does.
    Size in bytes."""

    uri: str
    size: int
    version: str


# --- errors --------------------------------------------------------------------------------------------------------


@contextmanager
def _errors(uri: str) -> Iterator[None]:
    """Turns what a storage call raises into a `RequestError` that names the file."""
    try:
        yield
    except _FAILURES as error:
        raise _request_error(uri, error) from error


def _request_error(uri: str, error: BaseException) -> RequestError:
    name = display_uri(uri) or "(no name)"
    status = getattr(error, "status", None)
    if (
        isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        or status == 404
    ):
        return RequestError("not_found", f"{name}: there is no such file")
    if isinstance(error, PermissionError) or status in (401, 403):
        return RequestError(
            "access_denied", f"{name}: access is denied with the credentials in use"
        )
    if isinstance(error, NoCredentialsError):
        return RequestError(
            "access_denied", f"{name}: there are no S3 credentials in the environment"
        )
    return RequestError("storage_error", f"{name}: {_reason(error)}")


def _reason(error: BaseException) -> str:
    """The error's own words in one line, without anything that looks like a credential."""
    text = (
        error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    ) or type(error).__name__
    text = re.sub(r"[^\s/\"'=]+:[^\s/\"']+@", "", re.sub(r"\?[^\s\"']*", "", text))
    return " ".join(text.split())


# --- filesystems ---------------------------------------------------------------------------------------------------


def _remote(uri: str) -> tuple[Any, str]:
    """The filesystem of a remote URI and the file's name in it. One object per thread: shared s3fs
    objects deadlock. Keyed by process too, since a forked copy cannot be used, and by endpoint,
    since it is read only once."""
    scheme, _, path = normalize(uri).partition("://")
    if scheme not in ("s3", "http", "https"):
        raise ValueError(
            f"{scheme}:// is not supported; s3://, http(s)://, file:// and local paths are"
        )
    protocol = "s3" if scheme == "s3" else "http"
    key = (
        os.getpid(),
        protocol,
        os.environ.get("AWS_ENDPOINT_URL_S3"),
        os.environ.get("AWS_ENDPOINT_URL"),
    )
    known = _threads.__dict__.setdefault("filesystems", {})
    if key not in known:
        options = _s3_options() if protocol == "s3" else {}
        known[key] = fsspec.filesystem(
            protocol, skip_instance_cache=True, use_listings_cache=False, **options
        )
    return known[key], path if protocol == "s3" else uri


def _s3_options() -> dict[str, Any]:
    """Throttling, 5xx, resets and silence are tried again, after up to 1, 2, 4, ... 20 s."""
    tries = int(os.environ.get("AWS_MAX_ATTEMPTS", 7))
    patience = {
        "retries": {"mode": "standard", "max_attempts": tries},
        "connect_timeout": 10,
        "read_timeout": 30,
    }
    return {
        "max_concurrency": 1,
        "config_kwargs": patience,
    }  # with more, a whole read asks for the size first


def _keys(folder: str, prefix: str = "", delimiter: str = "") -> Iterator[tuple[str, int]]:
    """(URI, size) of the objects of an S3 folder, in order, a page at a time; with a delimiter its
    own only."""
    fs, path = _remote(folder)
    bucket, _, inner = path.partition("/")
    inner = inner.rstrip("/") + "/" if inner.strip("/") else ""
    query: dict[str, Any] = {"Bucket": bucket, "Prefix": inner + prefix, "Delimiter": delimiter}
    while True:
        page = fs.call_s3("list_objects_v2", **query)
        for entry in page.get("Contents", ()):
            if not entry["Key"].endswith("/"):
                yield f"s3://{bucket}/{entry['Key']}", entry["Size"]
        if not page.get("IsTruncated"):
            return
        query["ContinuationToken"] = page["NextContinuationToken"]


# --- looking -------------------------------------------------------------------------------------------------------


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
        found = fs.info(name)
        if found["type"] != "file":
            raise FileNotFoundError(uri)
        version = found.get("ETag") or found.get("LastModified") or found.get("Last-Modified") or ""
        return FileInfo(normalize(uri), found["size"] or 0, str(version).strip('"'))


def is_file(uri: str) -> bool:
    """Whether there is such a file. Raises RequestError for anything but its absence."""
    try:
        info(uri)
    except RequestError as error:
        if error.code == "not_found":
            return False
        raise
    return True


def is_folder(uri: str) -> bool:
    """Whether there is such a folder; on S3: whether any object, a folder's marker included, lies
    below the name."""
    with _errors(uri):
        if (path := local_path(uri)) is not None:
            return os.path.isdir(path)
        fs, name = _remote(uri)
        if not normalize(uri).startswith("s3://"):
            return False
        bucket, _, inner = name.rstrip("/").partition("/")
        page = fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=inner and inner + "/", MaxKeys=1)
        return bool(page.get("KeyCount"))


def list_files(uri: str, suffixes: Collection[str] = ()) -> Iterator[str]:
    """The files below a folder or bucket prefix at any depth, sorted by name, those with one of the
    suffixes (lower-case, with the dot; all if none are given); hidden ones are skipped. Raises
    RequestError."""
    with _errors(uri):
        path = local_path(uri)
        found = _walk(path) if path is not None else _visible_keys(uri)
        for name in found:
            if not suffixes or posixpath.splitext(name)[1].lower() in suffixes:
                yield name


def _visible_keys(folder: str) -> Iterator[str]:
    """Objects below an S3 folder, hidden ones skipped as on a disk."""
    start = len(normalize(folder).rstrip("/"))
    return (uri for uri, _ in _keys(folder) if "/." not in uri[start:])


def _walk(folder: str) -> Iterator[str]:
    """Visible files below a local folder; a folder sorts as its name with a slash, so that whole
    paths are in order."""
    with os.scandir(folder) as entries:
        found = sorted(
            (e.name + "/" if e.is_dir(follow_symlinks=False) else e.name)
            for e in entries
            if e.name[0] != "."
        )
    for name in found:
        path = os.path.join(folder, name)
        if name.endswith("/"):
            yield from _walk(path[:-1])
        elif not os.path.isdir(path):
            yield path


def list_sizes(folder: str) -> dict[str, int]:
    """Name → size in bytes of a folder's own files, dot-names included, sorted; empty if there is
    no such folder."""
    with _errors(folder):
        if (path := local_path(folder)) is None:
            return {uri.rpartition("/")[2]: size for uri, size in _keys(folder, delimiter="/")}
        if not os.path.exists(path):
            return {}
        with os.scandir(path) as entries:
            return dict(
                sorted((e.name, size) for e in entries if (size := _file_size(e)) is not None)
            )


def _file_size(entry: os.DirEntry[str]) -> int | None:
    """None for a folder, and for a file that was deleted while the folder was read."""
    try:
        return None if entry.is_dir() else entry.stat().st_size
    except FileNotFoundError:
        return None


def list_names(folder: str) -> list[str]:
    """The names of a folder's own files, sorted; empty if there is no such folder."""
    return list(list_sizes(folder))


def expand_glob(uri: str) -> Iterator[str]:
    """The files a glob means, sorted: `*`, `?`, `[...]`, `**` as a whole path component, `{a,b}`; a
    `/` at the end stands for everything below. A file with exactly this name is that file; a name
    without glob characters is itself. Hidden files match only where the glob names the dot."""
    if not uris.is_glob(uri) or uri.startswith(("http://", "https://")) or is_file(uri):
        yield normalize(uri)
        return
    with _errors(uri):
        whole = normalize(uri).rstrip("/") + ("/**" if uri.endswith("/") else "")
        base, rest = uris.literal_folder(whole, is_folder)
        patterns = uris.braces(rest)
        path = local_path(base)
        yield from (
            _local_matches(path, patterns) if path is not None else _remote_matches(base, patterns)
        )


def _local_matches(base: str, patterns: list[str]) -> Iterator[str]:
    found = {
        path
        for p in patterns
        for path in iglob(join(escape(base), p), recursive=True)
        if not os.path.isdir(path)
    }
    return iter(sorted(found))


def _remote_matches(base: str, patterns: list[str]) -> Iterator[str]:
    start = len(base) + 1
    matchers = [(re.compile(glob_translate(p)), uris.names_hidden(p)) for p in patterns]
    for uri, _ in _keys(base, uris.literal_start(patterns)):
        hidden = "/." in uri[start - 1 :]
        if any(matcher.match(uri[start:]) and (dots or not hidden) for matcher, dots in matchers):
            yield uri


# --- reading -------------------------------------------------------------------------------------------------------


class _Reader(io.RawIOBase):
    """A range-reading, seekable file whose failures are `RequestError`s also while its user
    reads."""

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
def open_read(uri: str, block_size: int = 256 << 10) -> Iterator[_Reader]:
    """A seekable binary file. Remote ones are read in ranges of `block_size` bytes ahead: a probe
    of a large video then reads a megabyte or two, where s3fs's own 50 MB would read all of it.
    Raises RequestError, while reading too."""
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
    """A whole file. Raises RequestError."""
    with _errors(uri):
        if (path := local_path(uri)) is not None:
            with open(path, "rb") as file:
                return file.read()
        fs, name = _remote(uri)
        return fs.cat_file(name)


def map_concurrently(
    function: Callable[[_T], _R],
    items: Iterable[_T],
    threads: int = THREADS,
    min_items: int = MIN_CONCURRENT_READS,
) -> list[_R]:
    """Results of a function that mostly waits for storage, in the order of the items.

    Args:
        threads: calls that run at once.
        min_items: with fewer items the calls run one after another in the calling thread.
    """
    listed = list(items)
    if len(listed) < min_items:
        return list(map(function, listed))
    return list(_thread_pool(os.getpid(), threads).map(function, listed))


@cache
def _thread_pool(process_id: int, threads: int) -> ThreadPoolExecutor:
    """The pool is kept, and with it each thread's filesystem: making one takes longer than many
    reads. Threads do not survive a fork, so each process has its own pool."""
    return ThreadPoolExecutor(threads, "storage")


# --- writing -------------------------------------------------------------------------------------------------------


def put(uri: str, data: bytes) -> None:
    """Writes a file so that nobody ever sees half of it: one put, or a dot-name, fsync and
    `os.replace`."""
    with _errors(uri):
        if (path := local_path(uri)) is None:
            fs, name = _remote(uri)
            fs.pipe_file(name, data)
            return
        draft = _draft(path, data)
        os.replace(draft, path)
        _sync_folder(path)


def put_if_absent(uri: str, data: bytes) -> bool:
    """Writes a file unless there is one, whole and at once; False if there is. Of several writers
    one gets True: data that no other writer would write tells apart a put that S3 did and answered
    too late from somebody else's."""
    with _errors(uri):
        if (path := local_path(uri)) is None:
            return _create(uri, data)
        draft = _draft(path, data)
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            os.unlink(draft)
        _sync_folder(path)
        return True


def _create(uri: str, data: bytes) -> bool:
    """S3's conditional put. After a reply that got lost, the retry finds what the first try wrote:
    then it is ours."""
    fs, name = _remote(uri)
    for _ in range(10):
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
    raise OSError(errno.EBUSY, "other writers keep getting in between")


def _draft(path: str, data: bytes) -> str:
    """Data under a dot-name beside its place, on the disk for good; nothing where the disk refuses
    it."""
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


def _sync_folder(path: str) -> None:
    """A rename lasts only once its folder is on the disk."""
    descriptor = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(uri: str) -> None:
    """A folder that is there even while it is empty; on S3 by the empty object consoles write for
    that."""
    with _errors(uri):
        if (path := local_path(uri)) is not None:
            os.makedirs(path, exist_ok=True)
            return
        fs, name = _remote(uri)
        bucket, _, inner = name.partition("/")
        fs.call_s3("put_object", Bucket=bucket, Key=inner.rstrip("/") + "/", Body=b"")


def delete(uri: str) -> None:
    """Removes a file; it is no error if there is none."""
    with _errors(uri):
        try:
            if (path := local_path(uri)) is not None:
                os.unlink(path)
            else:
                fs, name = _remote(uri)
                fs.rm_file(name)
        except FileNotFoundError:
            return
