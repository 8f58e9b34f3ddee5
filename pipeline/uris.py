"""File names: normal forms, relative names and globs. Accesses no file.

Names are literal: `#`, `%`, commas, spaces and quotes have no special meaning. Only `storage.py`,
`credentials.py` and `local_files.py` import this module; other modules use these functions through
`storage`.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Sequence
from glob import has_magic

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")


def local_path(uri: str) -> str | None:
    """The absolute path of a local file; None for a remote one."""
    if uri[: len("file://")].lower() == "file://":
        return os.path.abspath(uri[len("file://") :])
    return None if _SCHEME.match(uri) else os.path.abspath(uri)


def normalize(uri: str) -> str:
    """The normal form of a name: an absolute path, or a URL whose scheme is in lower case, with
    `s3://` for `s3a://`. Empty stays empty."""
    if not uri:
        return uri
    if (path := local_path(uri)) is not None:
        return path
    scheme, _, rest = uri.partition("://")
    scheme = scheme.lower()
    return f"{'s3' if scheme == 's3a' else scheme}://{rest}"


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
