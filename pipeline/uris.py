"""What a file is called: spellings, folders, globs and credentials of names. Looks at no file.

A name is literal: `#`, `%`, commas, spaces and quotes mean nothing. Only `storage.py` uses this
module; the others find these functions there."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Sequence
from glob import has_magic

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
# query parameters of presigned URLs (S3, Google, Azure), and other credentials
_SIGNING = re.compile(
    r"^x-(amz|goog)-|sig|token|credential|secret|passw|auth|api.?key|accesskey|policy|expires|^s[eprtv]$",
    re.IGNORECASE,
)


def local_path(uri: str) -> str | None:
    """The path of a file on this machine's disks, absolute; None for a remote one."""
    if uri.startswith("file://"):
        return os.path.abspath(uri[len("file://") :])
    return None if _SCHEME.match(uri) else os.path.abspath(uri)


def normalize(uri: str) -> str:
    """The one spelling a file has here: a local one as an absolute path, a remote one as it is.
    Empty stays empty."""
    return uri and (local_path(uri) or re.sub("^s3a://", "s3://", uri))


def join(folder: str, *names: str) -> str:
    """A file below a folder; nothing in the names is interpreted."""
    return "/".join([folder.rstrip("/") if folder.strip("/") else "", *names])


def parent(uri: str) -> str:
    """The folder a file lies in."""
    return normalize(uri).rpartition("/")[0] or "/"


def resolve(uri: str, folder: str) -> str:
    """What a file list in `folder` means by `uri`: itself if absolute or a URL, else relative to
    the folder."""
    if not uri or _SCHEME.match(uri) or uri.startswith("/"):
        return normalize(uri)
    if (local := local_path(folder)) is not None:
        return os.path.normpath(join(local, uri))
    scheme, _, path = folder.partition("://")
    return f"{scheme}://{posixpath.normpath(join(path, uri))}"


def redact(uri: str) -> str:
    """The URI without user-info and without the signing parts of a query; local paths stay as they
    are."""
    if local_path(uri) is not None:
        return uri
    scheme, _, rest = uri.partition("://")
    query = ""
    if scheme in ("http", "https"):
        rest, _, query = rest.partition("?")
    host, slash, path = rest.partition("/")
    kept = [
        pair for pair in query.split("&") if pair and not _SIGNING.search(pair.partition("=")[0])
    ]
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}{'?' if kept else ''}{'&'.join(kept)}"


def display_uri(uri: str) -> str:
    """The URI as messages and logs have it: without credentials, in one line, whatever characters
    it holds."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in redact(uri)
    )


def redact_utf8(uri: str) -> str:
    """The URI as rows have it: without credentials; bytes that are no UTF-8 are spelt out."""
    return redact(uri).encode("utf-8", "backslashreplace").decode("utf-8")


def is_glob(name: str) -> bool:
    """Whether a name has characters that mean something in a glob."""
    return has_magic(name) or "{" in name


def literal_folder(uri: str, is_folder: Callable[[str], bool]) -> tuple[str, str]:
    """Cuts a glob at the first component that is one; folders whose names only look like globs are
    names."""
    components = uri.split("/")
    for i, component in enumerate(components):
        if is_glob(component) and (
            i == len(components) - 1 or not is_folder("/".join(components[: i + 1]))
        ):
            return "/".join(components[:i]) or "/", "/".join(components[i:])
    return "/".join(components[:-1]), components[-1]


def braces(pattern: str) -> list[str]:
    """All patterns that `{a,b}` stands for; braces without a comma are characters."""
    match = re.search(r"\{([^{}]*,[^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    whole = [
        pattern[: match.start()] + choice + pattern[match.end() :] for choice in match[1].split(",")
    ]
    return sorted({found for choice in whole for found in braces(choice)})


def names_hidden(pattern: str) -> bool:
    """Whether a glob asks for names with a dot in front."""
    return any(component.startswith(".") for component in pattern.split("/"))


def literal_start(patterns: Sequence[str]) -> str:
    """What all names start with that one of the patterns can match; may end within a component."""
    return os.path.commonprefix([re.split(r"[*?\[]", pattern)[0] for pattern in patterns])  # noqa: RUF071
