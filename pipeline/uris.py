"""File names: normal forms, relative names, globs and credentials. Accesses no file.

Names are literal: `#`, `%`, commas, spaces and quotes have no special meaning. Only `storage.py`
and `local_files.py` import this module; other modules use these functions through `storage`.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Sequence
from glob import has_magic

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
# query parameters of presigned URLs (S3, Google, Azure), and other credentials
_CREDENTIAL_PARAMETER = re.compile(
    r"^x-(amz|goog)-|sig|token|credential|secret|passw|auth|api.?key|accesskey|policy|expires|^s[eprtv]$",
    re.IGNORECASE,
)


def local_path(uri: str) -> str | None:
    """The absolute path of a local file; None for a remote one."""
    if uri.startswith("file://"):
        return os.path.abspath(uri[len("file://") :])
    return None if _SCHEME.match(uri) else os.path.abspath(uri)


def normalize(uri: str) -> str:
    """The normal form of a name: an absolute path, or a URL with `s3://` for `s3a://`. Empty stays
    empty."""
    if not uri:
        return uri
    return local_path(uri) or re.sub("^s3a://", "s3://", uri)


def join(folder: str, *names: str) -> str:
    """A file below a folder; nothing in the names is interpreted."""
    return "/".join([folder.rstrip("/") if folder.strip("/") else "", *names])


def parent(uri: str) -> str:
    """The folder of a file."""
    return normalize(uri).rpartition("/")[0] or "/"


def resolve(uri: str, folder: str) -> str:
    """The normal form of a name that is a URL, an absolute path, or relative to `folder`."""
    if not uri or _SCHEME.match(uri) or uri.startswith("/"):
        return normalize(uri)
    if (local := local_path(folder)) is not None:
        return os.path.normpath(join(local, uri))
    scheme, _, path = folder.partition("://")
    return f"{scheme}://{posixpath.normpath(join(path, uri))}"


def redact(uri: str) -> str:
    """The URI without user-info and without credentials in the query; local paths unchanged."""
    if local_path(uri) is not None:
        return uri
    scheme, _, rest = uri.partition("://")
    query = ""
    if scheme in ("http", "https"):
        rest, _, query = rest.partition("?")
    host, slash, path = rest.partition("/")
    host = host.rpartition("@")[2]
    kept = "&".join(parameter for parameter in query.split("&") if _is_harmless(parameter))
    return f"{scheme}://{host}{slash}{path}" + (f"?{kept}" if kept else "")


def _is_harmless(parameter: str) -> bool:
    """Whether a query parameter, `name=value`, is not empty and holds no credential."""
    return bool(parameter) and not _CREDENTIAL_PARAMETER.search(parameter.partition("=")[0])


def display_uri(uri: str) -> str:
    """The URI for messages and logs: without credentials, unprintable characters escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in redact(uri)
    )


def redact_utf8(uri: str) -> str:
    """The URI for output rows: without credentials, bytes that are not UTF-8 escaped."""
    return redact(uri).encode("utf-8", "backslashreplace").decode("utf-8")


def is_glob(name: str) -> bool:
    """Whether a name contains glob characters."""
    return has_magic(name) or "{" in name


def split_glob(uri: str, is_folder: Callable[[str], bool]) -> tuple[str, str]:
    """Splits a glob into a literal folder and a pattern, at the first component with glob
    characters that is not the name of an existing folder."""
    components = uri.split("/")
    last = len(components) - 1
    for i, component in enumerate(components):
        if not is_glob(component):
            continue
        if i == last or not is_folder("/".join(components[: i + 1])):
            return "/".join(components[:i]) or "/", "/".join(components[i:])
    return "/".join(components[:-1]), components[-1]


def expand_braces(pattern: str) -> list[str]:
    """The patterns that `{a,b}` stands for, sorted; braces without a comma are literal."""
    match = re.search(r"\{([^{}]*,[^{}]*)\}", pattern)  # an innermost pair
    if match is None:
        return [pattern]
    before = pattern[: match.start()]
    after = pattern[match.end() :]
    expanded: set[str] = set()
    for choice in match[1].split(","):
        expanded.update(expand_braces(before + choice + after))
    return sorted(expanded)


def matches_hidden(pattern: str) -> bool:
    """Whether a glob can match hidden files, because one of its components starts with a dot."""
    return any(component.startswith(".") for component in pattern.split("/"))


def common_prefix(patterns: Sequence[str]) -> str:
    """The literal prefix of all names that the patterns can match; may end within a component."""
    literals = [re.split(r"[*?\[]", pattern)[0] for pattern in patterns]
    return os.path.commonprefix(literals)  # noqa: RUF071 - a string prefix is meant
