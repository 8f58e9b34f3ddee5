"""Credentials in URIs: what identifies a file without them, and what may be shown.

- `canonical` is the form that enters a request id. It lacks user-info and the parameters of the
  known signature schemes, which change from night to night. Nothing is removed by resemblance.
- `redact` is the form that is shown. It keeps only query parameters known to be harmless. What is
  left out is replaced by a short digest, so that URIs that differ there are still told apart.

The digest is keyed, since the hash of a short password could be found by trying passwords. The key
is the environment variable `STD_CAPTION_REDACTION_KEY`, or random for each run.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from dataclasses import dataclass, replace

from pipeline.uris import local_path, normalize

KEY_VARIABLE = "STD_CAPTION_REDACTION_KEY"


@dataclass(frozen=True)
class _SignatureScheme:
    """The query parameters of one way to sign a URL, in lower case.

    Args:
        required: they identify the scheme: nothing is removed unless all of them occur.
        names: what is removed.
    """

    required: frozenset[str]
    names: frozenset[str]


def _scheme(required: str, optional: str = "") -> _SignatureScheme:
    names = frozenset(required.split())
    return _SignatureScheme(names, names | frozenset(optional.split()))


_SIGNATURE_SCHEMES = (
    # S3, signature version 4, then 2
    _scheme(
        "x-amz-algorithm x-amz-credential x-amz-signature",
        "x-amz-date x-amz-expires x-amz-signedheaders x-amz-security-token x-amz-content-sha256",
    ),
    _scheme("awsaccesskeyid signature expires", "x-amz-security-token"),
    # Google Cloud Storage, signature version 4, then 2
    _scheme(
        "x-goog-algorithm x-goog-credential x-goog-signature",
        "x-goog-date x-goog-expires x-goog-signedheaders",
    ),
    _scheme("googleaccessid signature expires"),
    # Azure: a shared access signature. One with a stored policy (`si`) may lack `se` and `sp`.
    _scheme(
        "sv sig",
        "ss srt sr sp st se sip spr si skoid sktid skt ske sks skv saoid suoid scid sdd ses",
    ),
    # CloudFront, with a canned policy, then with a custom one
    _scheme("expires signature key-pair-id", "hash-algorithm"),
    _scheme("policy signature key-pair-id", "hash-algorithm"),
)
# Azure Data Lake and Blob Storage name the container before the `@`: it is no user-info
_CONTAINER_SCHEMES = frozenset(("abfs", "abfss", "wasb", "wasbs"))
# `?` is an ordinary character in the object names of these
_OBJECT_SCHEMES = frozenset(("s3", "gs"))
_HOST_AND_PORT = re.compile(r"(\[[^\]]*\]|[^:@]*)(:\d*)?")
_HARMLESS = """
    alt camera channel chapter clip codec duration end episode ext file filename format fps frame
    generation height id index item lang language length list name page part partnumber path quality
    resolution segment start t time track v version versionid video videoid width
"""
_HARMLESS_PARAMETERS = frozenset(_HARMLESS.split())
_DIGEST = re.compile("redacted-[0-9a-f]{8}")
# a URL in a sentence, without the punctuation that follows it
_URL_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]*[^\s\"'<>:;,.)\]]")
_QUERY_IN_TEXT = re.compile(r"\?([^\s\"'<>?=]+=[^\s\"'<>]*[^\s\"'<>:;,.)\]])")


@dataclass(frozen=True)
class _Parts:
    """A remote URI. A part that is empty was absent."""

    scheme: str
    user: str  # without its `@`
    location: str  # host and path
    query: str = ""  # without its `?`
    fragment: str = ""  # without its `#`; only where it has the form of a query

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        query = f"?{self.query}" if self.query else ""
        fragment = f"#{self.fragment}" if self.fragment else ""
        return f"{self.scheme}://{user}{self.location}{query}{fragment}"


def _split(uri: str) -> _Parts:
    """The parts of a URI in its normal form, which is remote."""
    scheme, _, rest = uri.partition("://")
    user, rest = _split_user(scheme, rest)
    location, _, query = rest.partition("?")
    if scheme in _OBJECT_SCHEMES:
        return _Parts(scheme, user, location, query) if "=" in query else _Parts(scheme, user, rest)
    before, _, fragment = rest.partition("#")
    if "=" not in fragment:  # a literal `#`
        return _Parts(scheme, user, location, query)
    location, _, query = before.partition("?")
    return _Parts(scheme, user, location, query, fragment)


def _split_user(scheme: str, rest: str) -> tuple[str, str]:
    """User-info, and what follows its `@`. A secret key may contain a slash: what precedes the
    first slash is then no host and port."""
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in authority:
        user = authority.rpartition("@")[0]
        is_container = scheme in _CONTAINER_SCHEMES and ":" not in user
        return ("", rest) if is_container else (user, rest[len(user) + 1 :])
    if _is_host(scheme, authority) or "@" not in rest:
        return "", rest
    user, _, rest = rest.partition("@")
    more, rest = _split_user(scheme, rest)
    return (f"{user}@{more}" if more else user), rest


def _is_host(scheme: str, authority: str) -> bool:
    """Whether this is a bucket, or a host with or without a port."""
    if scheme in _OBJECT_SCHEMES:
        return ":" not in authority
    return _HOST_AND_PORT.fullmatch(authority) is not None


def _name(parameter: str) -> str:
    return parameter.partition("=")[0].lower()


# ----------------------------------------------------------------------------------------- identity


def canonical(uri: str) -> str:
    """What a URI names, whoever asks and whenever: the normal form without user-info and without
    the parameters of a signature. Local paths have neither."""
    uri = normalize(uri)
    if not uri or local_path(uri) is not None:
        return uri
    parts = _split(uri)
    parameters = parts.query.split("&")
    present = frozenset(map(_name, parameters))
    signature: frozenset[str] = frozenset()
    for scheme in _SIGNATURE_SCHEMES:
        if scheme.required <= present:
            signature |= scheme.names
    if not parts.user and not signature:
        return uri
    query = "&".join(parameter for parameter in parameters if _name(parameter) not in signature)
    return str(replace(parts, user="", query=query))


# ---------------------------------------------------------------------------------------- redaction


def share_redaction_key() -> None:
    """Fixes the key of the digests for this process and those that it starts."""
    os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(16))


def _digest(secret: str) -> str:
    share_redaction_key()
    key = os.environ[KEY_VARIABLE].encode("utf-8", "surrogateescape")
    hashed = hashlib.blake2b(secret.encode("utf-8", "surrogatepass"), digest_size=4, key=key[:64])
    return f"redacted-{hashed.hexdigest()}"


def redact(uri: str) -> str:
    """The URI with a digest in place of user-info and of the query parameters that are not known to
    be harmless; local paths unchanged. A redacted URI stays as it is."""
    if not uri or local_path(uri) is not None:
        return uri
    parts = _split(normalize(uri))
    user = parts.user
    if user and not _DIGEST.fullmatch(user):
        user = _digest(user)
    return str(
        replace(
            parts,
            user=user,
            query=_redact_parameters(parts.query),
            fragment=_redact_parameters(parts.fragment),
        )
    )


def _redact_parameters(query: str) -> str:
    """The harmless parameters, then one digest of all others."""
    kept: list[str] = []
    secret: list[str] = []
    for parameter in filter(None, query.split("&")):
        harmless = _name(parameter) in _HARMLESS_PARAMETERS or _DIGEST.fullmatch(parameter)
        (kept if harmless else secret).append(parameter)
    if secret:
        kept.append(_digest("&".join(secret)))
    return "&".join(kept)


def redact_text(text: str) -> str:
    """A message with every URL, and every query that stands alone, redacted."""
    text = _URL_IN_TEXT.sub(lambda match: redact(match[0]), text)
    return _QUERY_IN_TEXT.sub(lambda match: f"?{_redact_parameters(match[1])}", text)


def display_uri(uri: str) -> str:
    """The URI for messages and logs: redacted, unprintable characters escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in redact(uri)
    )


def redact_utf8(uri: str) -> str:
    """The URI for output rows: redacted, bytes that are not UTF-8 escaped."""
    return redact(uri).encode("utf-8", "backslashreplace").decode("utf-8")
