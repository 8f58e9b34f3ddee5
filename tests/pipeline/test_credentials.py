from __future__ import annotations

import os
import re
import string
import subprocess
import sys
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import storage
from pipeline.config import ROOT
from pipeline.credentials import KEY_VARIABLE

S3_V4 = (
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIA%2F1&X-Amz-Date=1&X-Amz-Expires=60"
    "&X-Amz-SignedHeaders=host&X-Amz-Security-Token=T&X-Amz-Signature=abc"
)
S3_V2 = "AWSAccessKeyId=AKIA&Signature=abc&Expires=1"
GCS_V4 = (
    "x-goog-algorithm=G&x-goog-credential=C&x-goog-date=1&x-goog-expires=2"
    "&x-goog-signedheaders=host&x-goog-signature=abc"
)
GCS_V2 = "GoogleAccessId=a%40b&Expires=1&Signature=abc"
AZURE = "sv=2024&st=1&se=2&sr=b&sp=r&spr=https&sip=1.2.3.4&skoid=o&sktid=t&sig=abc"
CLOUDFRONT = "Expires=1&Signature=abc&Key-Pair-Id=K"
CLOUDFRONT_POLICY = "Policy=eyJ&Signature=abc&Key-Pair-Id=K&Hash-Algorithm=SHA256"
SIGNATURES = (S3_V4, S3_V2, GCS_V4, GCS_V2, AZURE, CLOUDFRONT, CLOUDFRONT_POLICY)

WORD = st.text(string.ascii_letters + string.digits + "-._~", min_size=1, max_size=8)
SIGNING_NAMES = frozenset(
    parameter.partition("=")[0].lower() for scheme in SIGNATURES for parameter in scheme.split("&")
)
# names that resemble a credential's, or are one of a scheme that is not complete
NAMES = st.one_of(
    WORD,
    st.sampled_from(
        ["author", "design", "token", "se", "sp", "st", "expires", "policy", "sig", "x-amz-meta-a"]
    ),
)


@pytest.mark.parametrize("signature", SIGNATURES)
def test_a_signature_is_no_part_of_the_canonical_form(signature: str) -> None:
    other_night = re.sub("=[^&]*", "=other", signature)
    forms = {
        storage.canonical(f"https://host/a.mp4?author=1&{query}&token=2")
        for query in (signature, other_night, signature.lower())
    }
    assert forms == {"https://host/a.mp4?author=1&token=2"}
    assert storage.canonical(f"https://host/a.mp4?{signature}") == "https://host/a.mp4"


@pytest.mark.parametrize("signature", SIGNATURES)
def test_a_part_of_a_signature_is_none(signature: str) -> None:
    """Parameters go only as the set of one scheme."""
    for parameter in signature.split("&"):
        uri = f"https://host/a.mp4?{parameter}"
        assert storage.canonical(uri) == uri


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3a://bucket/a.mp4", "s3://bucket/a.mp4"),
        ("S3://k:s@bucket/a@b.mp4", "s3://bucket/a@b.mp4"),
        ("s3://KEY:a/b@bucket/x.mp4", "s3://bucket/x.mp4"),
        ("s3://KEY:a/b@bucket/x@y:1.mp4", "s3://bucket/x@y:1.mp4"),
        ("HTTPS://u:p@host:80/a@b.mp4", "https://host:80/a@b.mp4"),
        ("https://u:p@ss@host/a.mp4", "https://host/a.mp4"),
        ("https://u:a/b@c@host/a@b.mp4", "https://host/a@b.mp4"),
        ("https://[::1]:80/a@b.mp4", "https://[::1]:80/a@b.mp4"),
        ("abfss://box@account.net/a.mp4", "abfss://box@account.net/a.mp4"),
        ("https://host/a.mp4?", "https://host/a.mp4?"),
        ("s3://bucket/a?b#c=1.mp4", "s3://bucket/a?b#c=1.mp4"),
        ("", ""),
    ],
)
def test_user_info_is_no_part_of_the_canonical_form(uri: str, expected: str) -> None:
    assert storage.canonical(uri) == expected


@given(
    st.sampled_from(["http", "https", "s3", "gs", "abfss"]),
    WORD,
    st.lists(st.tuples(NAMES, WORD), max_size=5),
    st.sampled_from(["", *SIGNATURES]),
    st.integers(0, 5),
)
def test_what_is_no_signature_stays_in_the_canonical_form(
    scheme: str, path: str, parameters: list[tuple[str, str]], signature: str, place: int
) -> None:
    own = [f"{name}={value}" for name, value in parameters if name.lower() not in SIGNING_NAMES]
    signed = [*own[:place], *signature.split("&"), *own[place:]] if signature else own
    base = f"{scheme}://host/{path}"
    plain = base + ("?" + "&".join(own) if own else "")
    uri = base + ("?" + "&".join(signed) if signed else "")
    assert storage.canonical(uri) == plain
    assert storage.canonical(plain) == plain
    if scheme != "abfss":
        with_user = uri.replace("://", "://user:pass@")
        assert storage.canonical(with_user) == plain


SECRET = "s3cr3tS3CR3T"


@pytest.mark.parametrize(
    "uri",
    [
        f"https://host/a.mp4?jwt={SECRET}",
        f"https://host/a.mp4?hdnea=exp=1~acl=*~hmac={SECRET}&id=3",
        f"https://host/a.mp4?pwd={SECRET}",
        f"https://host/a.mp4?key={SECRET}",
        f"HTTPS://host/a.mp4?SIG={SECRET}",
        f"https://host/a.mp4?{SECRET}",
        f"https://host/a.mp4#access_token={SECRET}",
        f"https://host/a.mp4?id=1#access_token={SECRET}",
        f"https://{SECRET}@host/a.mp4",
        f"Https://user:{SECRET}@host/a.mp4",
        f"gs://bucket/a.mp4?X-Goog-Signature={SECRET}",
        f"GS://k:{SECRET}@bucket/a.mp4",
        f"abfss://box@account.net/a.mp4?sv=1&sig={SECRET}",
        f"ABFSS://k:{SECRET}@account.net/a.mp4",
        f"s3://KEY:{SECRET}/b@bucket/a.mp4",
        f"S3A://KEY:a/{SECRET}@bucket/a.mp4",
        f"s3://bucket/a.mp4?X-Amz-Signature={SECRET}",
        f"ftp://user:{SECRET}@host/a.mp4?x={SECRET}",
    ],
)
def test_no_form_that_is_shown_has_a_credential(uri: str) -> None:
    other = uri.replace(SECRET, SECRET[::-1])
    for show in (storage.redact, storage.display_uri, storage.redact_utf8, storage.redact_text):
        shown = show(uri)
        assert SECRET not in shown
        assert "a.mp4" in shown
        assert show(shown) == shown
        assert shown == show(uri) != show(other)  # rows can be told apart


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "/data/a@b?sig=1.mp4",
        "file:///data/a@b?sig=1.mp4",
        "s3://bucket/a@b?c#d.mp4",
        "https://host:8080/a@b:c/dt=2026-01-01/d.mp4?id=3&versionId=x#take2",
        "abfss://box@account.net/a.mp4",
    ],
)
def test_a_uri_without_credentials_is_shown_whole(uri: str) -> None:
    assert storage.redact(uri) == uri


@given(st.lists(st.tuples(WORD, WORD), min_size=1, max_size=4), WORD)
def test_redaction_keeps_harmless_parameters_only(
    parameters: list[tuple[str, str]], name: str
) -> None:
    query = "&".join(f"{key}-x={quote(value)}{SECRET}" for key, value in parameters)
    shown = storage.redact(f"https://host/{name}?file=3&{query}&V=2")
    assert re.fullmatch(
        rf"https://host/{re.escape(name)}\?file=3&V=2&redacted-[0-9a-f]{{8}}", shown
    )
    sentence = f"'https://host/{name}?{query}': 403, url=https://u:p@h/?{query}, and /x?{query}."
    text = storage.redact_text(sentence)
    assert SECRET not in text
    assert storage.redact_text(text) == text


def test_the_digest_is_keyed_and_shared_with_child_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri = "https://host/a.mp4?pwd=hunter2"
    shown = set()
    for key in ("one", "two"):
        monkeypatch.setenv(KEY_VARIABLE, key)
        shown.add(storage.redact(uri))
    assert len(shown) == 2
    monkeypatch.delenv(KEY_VARIABLE)
    storage.share_redaction_key()
    script = "import sys; from pipeline.credentials import redact; print(redact(sys.argv[1]))"
    child = subprocess.run(
        [sys.executable, "-c", script, uri],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.strip() == storage.redact(uri)
