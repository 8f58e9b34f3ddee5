from __future__ import annotations

import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.suites.shared.faulty_proxy import FAULTS, faulty_proxy
from pipeline import storage, uris
from pipeline.records import RequestError

ODD_NAMES = [
    "a#1%20.mp4",
    "b, c.mp4",
    'it\'s "so".mp4',
    "d{e}.mp4",
    "f[1]*?.mp4",
    "ümläut &+;=.mp4",
    "g@h.mp4",
]


def write(folder: str, *names: str) -> None:
    for name in names:
        storage.put(storage.join(folder, name), name.encode())


def relative_names(folder: str, uris: object) -> list[str]:
    return [uri.removeprefix(folder + "/") for uri in uris]


def test_a_written_file_is_read_back_and_its_version_changes(folder: str) -> None:
    uri = storage.join(folder, "deep", "er", "file.bin")
    storage.put(uri, b"one")
    before = storage.info(uri)
    storage.put(uri, b"three")
    after = storage.info(uri)
    assert storage.read_bytes(uri) == b"three"
    assert (before.size, after.size) == (3, 5)
    assert before.version != after.version
    assert after.uri == uri


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_are_literal(folder: str, name: str) -> None:
    write(folder, name)
    uri = storage.join(folder, name)
    assert storage.read_bytes(uri) == name.encode()
    assert storage.info(uri).size == len(name.encode())
    assert list(storage.expand_glob(uri)) == [uri]
    assert relative_names(folder, storage.list_files(folder)) == [name]
    assert storage.list_names(folder) == [name]
    with storage.open_read(uri) as file:
        assert file.read() == name.encode()


def test_a_folder_is_listed_in_order_without_hidden_and_other_files(folder: str) -> None:
    write(
        folder,
        "b.mp4",
        "a/z.MOV",
        "a-b.mp4",
        "a.mp4",
        ".hidden.mp4",
        ".h/x.mp4",
        "a/notes.txt",
        "a/b/c/d.mp4",
        "a/._x.mp4",
    )
    found = relative_names(folder, storage.list_files(folder, {".mp4", ".mov"}))
    assert found == sorted(["b.mp4", "a/z.MOV", "a-b.mp4", "a.mp4", "a/b/c/d.mp4"])
    assert "a/notes.txt" in relative_names(folder, storage.list_files(folder))


def test_a_prefix_is_a_whole_path_component(folder: str) -> None:
    write(folder, "clips/a.mp4", "clips2/b.mp4")
    assert relative_names(folder, storage.list_files(storage.join(folder, "clips"))) == [
        "clips/a.mp4"
    ]
    assert storage.is_folder(storage.join(folder, "clips"))
    assert not storage.is_folder(storage.join(folder, "clip"))
    assert not storage.is_folder(storage.join(folder, "clips/a.mp4"))


def test_listings_continue_over_pages(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "3")
    write(s3.bucket, *(f"many/{i}.mp4" for i in range(8)))
    page = s3.client().list_objects_v2(Bucket=s3.bucket.removeprefix("s3://"))
    assert page["IsTruncated"]
    assert relative_names(s3.bucket, storage.list_files(s3.bucket)) == [
        f"many/{i}.mp4" for i in range(8)
    ]
    assert len(storage.list_names(storage.join(s3.bucket, "many"))) == 8
    assert len(list(storage.expand_glob(storage.join(s3.bucket, "many/*.mp4")))) == 8


GLOBS = {
    "*.mp4": ["a.mp4", "b.mp4"],
    "*.{mp4,mov}": ["a.mp4", "b.mp4", "c.mov"],
    "?.mp4": ["a.mp4", "b.mp4"],
    "[!a].mp4": ["b.mp4"],
    "**/*.mp4": ["a.mp4", "b.mp4", "dt=1/d.mp4", "dt=1/deep/e.mp4", "dt=2/f.mp4"],
    "dt=*/*.mp4": ["dt=1/d.mp4", "dt=2/f.mp4"],
    "dt=*/": ["dt=1/d.mp4", "dt=1/deep/e.mp4", "dt=2/f.mp4"],
    "{dt=1,dt=2}/{d,f}.mp4": ["dt=1/d.mp4", "dt=2/f.mp4"],
    "{a,{b,c}}.m*": ["a.mp4", "b.mp4", "c.mov"],
    "{dt=1/d,a}.mp4": ["a.mp4", "dt=1/d.mp4"],
    "[x]/*.mp4": ["[x]/g.mp4"],
    ".h*.mp4": [".h.mp4"],
    "*.mkv": [],
}


@pytest.mark.parametrize(("pattern", "expected"), GLOBS.items())
def test_globs(folder: str, pattern: str, expected: list[str]) -> None:
    write(
        folder,
        "a.mp4",
        "b.mp4",
        "c.mov",
        "dt=1/d.mp4",
        "dt=1/deep/e.mp4",
        "dt=2/f.mp4",
        ".h.mp4",
        "dt=1/.i.mp4",
    )
    if "[x]" in pattern:
        write(folder, "[x]/g.mp4", "x/h.mp4")
    assert relative_names(folder, storage.expand_glob(storage.join(folder, pattern))) == expected


def test_a_large_file_is_read_in_ranges(folder: str) -> None:
    uri = storage.join(folder, "large.bin")
    data = os.urandom(4 << 20)
    storage.put(uri, data)
    with storage.open_read(uri) as file:
        read = []
        if hasattr(file._file, "cache"):  # a remote file: count the bytes requested
            fetch = file._file.cache.fetcher
            file._file.cache.fetcher = lambda start, end: (
                read.append(end - start) or fetch(start, end)
            )
        assert file.seekable()
        file.seek(-10, os.SEEK_END)
        assert file.tell() == len(data) - 10
        assert file.read() == data[-10:]
        file.seek(1000)
        assert file.read(5) == data[1000:1005]
        assert bool(read) == folder.startswith("s3")
        assert sum(read) <= 2 * (256 << 10) + 15
    with storage.open_read(uri, 1 << 20) as file:
        assert file.read() == data


def test_put_if_absent_succeeds_for_one_of_many_writers(folder: str) -> None:
    uri = storage.join(folder, "_lease", "1.json")
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: storage.put_if_absent(uri, b"%d" % i), range(8)))
    # moto checks and writes in two steps, so only a later writer is sure to fail there
    assert sum(won) == 1 or (folder.startswith("s3") and sum(won) >= 1)
    assert won[int(storage.read_bytes(uri))]
    assert not storage.put_if_absent(uri, b"late")
    assert storage.read_bytes(uri) != b"late"


def test_repeating_a_conditional_put_of_the_same_data_succeeds(s3: Any) -> None:
    uri = storage.join(s3.bucket, "x")
    assert storage.put_if_absent(uri, b"mine")
    assert storage.put_if_absent(uri, b"mine")  # as a retry does after a lost reply
    assert not storage.put_if_absent(uri, b"yours")


def test_a_failed_local_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = str(tmp_path / "x")
    storage.put(uri, b"old")

    def fail(*_: object) -> None:
        assert Path(uri).read_bytes() == b"old"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RequestError, match="No space left") as caught:
        storage.put(uri, b"new")
    assert caught.value.code == "storage_error"
    assert Path(uri).read_bytes() == b"old"


def test_deleting_twice_is_no_error(folder: str) -> None:
    uri = storage.join(folder, "x")
    storage.put(uri, b"")
    storage.delete(uri)
    storage.delete(uri)
    assert storage.list_names(folder) == []
    assert not storage.is_file(uri)


def test_an_empty_folder_can_be_made(folder: str) -> None:
    made = storage.join(folder, "_ledger")
    storage.make_folder(made)
    assert storage.is_folder(made)
    assert storage.list_names(made) == []
    assert list(storage.list_files(made)) == []


def test_missing_files_are_not_found(folder: str) -> None:
    uri = storage.join(folder, "nobody", "x.mp4")
    for read in (storage.info, storage.read_bytes, lambda u: storage.open_read(u).__enter__()):
        with pytest.raises(RequestError) as caught:
            read(uri)
        assert caught.value.code == "not_found"
        assert caught.value.message == f"{uri}: there is no such file"
    assert storage.list_names(storage.join(folder, "nobody")) == []
    with pytest.raises(RequestError, match="no such file"):
        storage.info(folder)
    with pytest.raises(RequestError, match="no name"):
        storage.info("")


def test_a_missing_bucket_is_not_found(s3: Any) -> None:
    with pytest.raises(RequestError) as caught:
        storage.read_bytes(s3.bucket + "-nobody/x")
    assert caught.value.code == "not_found"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_local_file_is_access_denied(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    (tmp_path / "x").chmod(0)
    with pytest.raises(RequestError) as caught:
        storage.read_bytes(str(tmp_path / "x"))
    assert caught.value.code == "access_denied"


def test_no_credentials_is_access_denied(
    s3: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    caught: list[RequestError] = []

    def read_info() -> None:
        try:
            storage.info(storage.join(s3.bucket, "x"))
        except RequestError as error:
            caught.append(error)

    # a new thread makes a new filesystem, which reads the credentials again
    thread = threading.Thread(target=read_info)
    thread.start()
    thread.join()
    assert [error.code for error in caught] == ["access_denied"]


def test_an_unreachable_server_is_a_storage_error(monkeypatch: pytest.MonkeyPatch, s3: Any) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(RequestError) as caught:
        storage.info(storage.join(s3.bucket, "x"))
    assert caught.value.code == "storage_error"
    assert "\n" not in caught.value.message


def test_an_unknown_scheme_is_a_storage_error() -> None:
    with pytest.raises(RequestError, match="gs:// is not supported") as caught:
        storage.info("gs://bucket/x.mp4")
    assert caught.value.code == "storage_error"


def test_error_messages_contain_no_credentials(s3: Any) -> None:
    uri = "s3://AKIA123:se/cret@bucket/x.mp4".replace("se/", "se")
    with pytest.raises(RequestError) as caught:
        storage.read_bytes(uri)
    assert "AKIA123" not in caught.value.message
    assert "secret" not in caught.value.message
    assert "@bucket/x.mp4" in caught.value.message


def test_a_presigned_url_can_be_read(s3: Any) -> None:
    storage.put(storage.join(s3.bucket, "a b.mp4"), b"0123456789")
    key = {"Bucket": s3.bucket.removeprefix("s3://"), "Key": "a b.mp4"}
    url = s3.client().generate_presigned_url("get_object", Params=key)
    assert list(storage.expand_glob(url)) == [url]
    with storage.open_read(url) as file:
        file.seek(4)
        assert file.read(2) == b"45"
    assert storage.canonical(url) == url.partition("?")[0]


@pytest.mark.parametrize(
    ("uri", "folder", "expected"),
    [
        ("a.mp4", "/m", "/m/a.mp4"),
        ("../x/a#1.mp4", "/m/n", "/m/x/a#1.mp4"),
        ("/abs/a.mp4", "s3://b/m", "/abs/a.mp4"),
        ("sub/a.mp4", "s3://b/m", "s3://b/m/sub/a.mp4"),
        ("../a.mp4", "s3://b/m", "s3://b/a.mp4"),
        ("s3a://c/a//b.mp4", "/m", "s3://c/a//b.mp4"),
        ("file:///d/a%20b.mp4", "s3://b", "/d/a%20b.mp4"),
        ("", "/m", ""),
    ],
)
def test_resolve(uri: str, folder: str, expected: str) -> None:
    assert storage.resolve(uri, folder) == expected


def test_local_path() -> None:
    assert storage.local_path("file:///a/b") == "/a/b"
    assert storage.local_path("a/b") == os.path.abspath("a/b")
    assert storage.local_path("s3://a/b") is None


@given(st.lists(st.text("ab.", min_size=1, max_size=3), min_size=1, max_size=4))
def test_braces_expand_to_all_choices(choices: list[str]) -> None:
    expected = (
        sorted({f"x{choice}y" for choice in choices})
        if len(choices) > 1
        else [f"x{{{choices[0]}}}y"]
    )
    assert uris.expand_braces("x{" + ",".join(choices) + "}y") == expected


def test_each_thread_has_its_own_filesystem(s3: Any) -> None:
    write(s3.bucket, "x")
    barrier = threading.Barrier(4)

    def filesystem(_: int) -> int:
        barrier.wait()
        assert storage.read_bytes(storage.join(s3.bucket, "x")) == b"x"
        barrier.wait()
        return id(storage._remote(s3.bucket)[0])

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(filesystem, range(4)))) == 4


def test_a_full_disk_keeps_the_old_file_and_no_partial_one(tmp_path: Path) -> None:
    uri = str(tmp_path / "part")
    storage.put(uri, b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1000, before[1])
    )  # like a full disk: only a part fits
    try:
        for write in (storage.put, storage.put_if_absent):
            with pytest.raises(RequestError, match="part: File too large") as caught:
                write(uri, bytes(5000))
            assert caught.value.code == "storage_error"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert storage.list_sizes(str(tmp_path)) == {"part": 3}


def test_throttling_and_dropped_connections_are_retried(
    s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost replies change nothing: of two writers exactly one succeeds."""
    with faulty_proxy(s3.endpoint, 0.25, 3) as (endpoint, calls):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        for number in range(10):
            uri = storage.join(s3.bucket, f"{number}.bin")
            data = os.urandom(3000)
            assert storage.put_if_absent(uri, data)
            assert not storage.put_if_absent(uri, b"another's")
            assert storage.info(uri).size == 3000
            with storage.open_read(uri) as file:
                assert file.read() == storage.read_bytes(uri) == data
        assert len(storage.list_names(s3.bucket)) == 10
    assert all(calls[kind] for kind in FAULTS)


def test_links_to_folders_are_followed_but_make_no_loop(tmp_path: Path) -> None:
    """A link to the folder itself made one file 41 files."""
    base = tmp_path / "videos"
    for name in ("a.mp4", "sub/b.mp4", "sub/deep/c.mp4", ".hidden/d.mp4"):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_bytes(b"x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "e.mp4").write_bytes(b"x")
    (base / "self").symlink_to(".")
    (base / "sub/up").symlink_to("..")
    (base / "sub/deep/top").symlink_to(base)
    (base / "linked").symlink_to(outside)
    (outside / "back").symlink_to(base)
    (base / "gone.mp4").symlink_to("nowhere")
    folder = str(base)
    every = ["a.mp4", "gone.mp4", "linked/e.mp4", "sub/b.mp4", "sub/deep/c.mp4"]
    assert relative_names(folder, storage.list_files(folder, {".mp4"})) == every
    for pattern, expected in {
        "**/*.mp4": every,
        "**": every,
        "**/**/*.mp4": every,
        "**/deep/*": ["sub/deep/c.mp4"],
        "*/e.mp4": ["linked/e.mp4"],
        "self/*.mp4": ["self/a.mp4", "self/gone.mp4"],
    }.items():
        found = relative_names(folder, storage.expand_glob(storage.join(folder, pattern)))
        assert found == expected, pattern
