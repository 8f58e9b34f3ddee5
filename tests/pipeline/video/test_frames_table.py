"""A table of files and their exact outcomes, from the probe to the pixels. Each picture encodes its
own number, so a wrong frame is detected."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from pipeline.records import FrameOptions, FramePlan, Frames, RequestError, VideoInfo
from pipeline.video.frame_plan import plan_frames
from pipeline.video.frames import decode
from pipeline.video.probe import probe
from pipeline.video.sandbox import close_workers
from std_core.types import Geometry

RATE = 24
COUNT = 36
GEOMETRY = Geometry(min_pixels=4 * 28 * 28, max_pixels=64 * 28 * 28)
EVENLY = (0, 12, 23, 35)  # 4 frames of 36
TOKENS = 30  # of 4 frames of 96×128, resized to 84×140
FOUR = FrameOptions(nframes=4)


@dataclass(frozen=True)
class Case:
    """A file and its expected outcome: `code` if it fails, else the numbers of the frames and the
    other fields."""

    name: str
    make: Callable[[Path], Any]
    code: str = ""
    numbers: tuple[int, ...] = EVENLY
    tokens: int = TOKENS
    rotation: int = 0
    lost: int = 0
    size: tuple[int, int] = (96, 128)  # height, width after rotation
    pts: Callable[[int], float] = field(
        default=lambda number: number / RATE
    )  # s from the first visible frame
    tolerance: int = 0  # frames by which a container's clock may be off
    options: FrameOptions = FOUR


def numbered(number: int, height: int = 96, width: int = 128) -> np.ndarray:
    """Six bits as light and dark bars in the middle of the picture."""
    image = np.full((height, width, 3), 30, np.uint8)
    for bit in range(6):
        if number >> bit & 1:
            image[
                height // 4 : 3 * height // 4,
                width * (2 * bit + 2) // 16 : width * (2 * bit + 4) // 16,
            ] = 220
    return image


def number_of(image: np.ndarray, rotation: int) -> int:
    image = np.rot90(image, -rotation // 90)
    height, width = image.shape[:2]
    middle = image[height // 2 - 4 : height // 2 + 4]
    spots = [width * (2 * bit + 3) // 16 for bit in range(6)]
    return sum(int(middle[:, x - 2 : x + 2].mean() > 125) << bit for bit, x in enumerate(spots))


def clip(
    codec: str,
    container: str,
    pix_fmt: str = "yuv420p",
    count: int = COUNT,
    size: tuple[int, int] = (96, 128),
    rotation: int = 0,
    when: Callable[[int], int] = int,
    muxer: dict[str, str] | None = None,
    keep: float = 1.0,
    **encoder: str,
) -> Callable[[Path], None]:
    """Writes a video of `count` numbered pictures, then cuts the file to a share of its bytes."""

    def make(path: Path) -> None:
        options = {"x265-params": "log-level=none"} | encoder if codec == "libx265" else encoder
        with av.open(str(path), "w", format=container, options=muxer or {}) as out:
            stream = out.add_stream(
                codec, rate=RATE, options={k.replace("_", "-"): v for k, v in options.items()}
            )
            stream.height, stream.width, stream.pix_fmt = *size, pix_fmt
            if rotation:
                stream.set_display_rotation(rotation)
            for number in range(count):
                frame = av.VideoFrame.from_ndarray(
                    numbered(number, *size), format="rgb24"
                ).reformat(format=pix_fmt)
                frame.pts = when(number)
                frame.time_base = Fraction(1, RATE)
                out.mux(stream.encode(frame))
            out.mux(stream.encode())
        data = path.read_bytes()
        path.write_bytes(data[: int(keep * len(data))])

    return make


def sound(codec: str, container: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with av.open(str(path), "w", format=container) as out:
            stream = out.add_stream(codec, rate=16000, layout="mono")
            for k in range(20):
                samples = np.zeros((1, 1024), np.float32 if codec == "aac" else np.int16)
                kind = "fltp" if codec == "aac" else "s16"
                frame = av.AudioFrame.from_ndarray(samples, format=kind, layout="mono")
                frame.sample_rate = 16000
                frame.pts = k * 1024
                out.mux(stream.encode(frame))
            out.mux(stream.encode())

    return make


def content(data: bytes | str) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data.encode() if isinstance(data, str) else data) and None


def missing(path: Path) -> None:
    assert not path.exists()


def playlist(text: str) -> Callable[[Path], None]:
    """A playlist, and beside it a video that it names."""

    def make(path: Path) -> None:
        h264("mp4")(path.with_name("other.mp4"))
        path.write_text(text)

    return make


def bomb(path: Path) -> None:
    """A GIF whose header claims 10,000 × 10,000 pixels."""
    clip("gif", "gif", "rgb8")(path)
    data = bytearray(path.read_bytes())
    data[6:10] = (10_000).to_bytes(2, "little") * 2
    path.write_bytes(data)


def frameless(path: Path) -> None:
    """An MP4 with a video track and nothing in it."""
    clip("libx264", "mp4", muxer={"movflags": "+frag_keyframe+empty_moov"})(path)
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"moof") - 4])


def damaged(path: Path) -> None:
    """A tenth of the bytes in the middle are zeros."""
    clip("mjpeg", "avi", "yuvj420p")(path)
    data = bytearray(path.read_bytes())
    at = len(data) // 2
    data[at : at + len(data) // 10] = bytes(len(data) // 10)
    path.write_bytes(data)


h264 = functools.partial(clip, "libx264")
VPX = {"deadline": "realtime", "cpu_used": "8"}
UNEVEN = [n if n < 18 else 18 + (n - 18) * 3 for n in range(COUNT)]  # 24 frames a second, then 8


GOOD = [
    Case("h264.mp4", h264("mp4")),
    Case("h264-index-first.mp4", h264("mp4", muxer={"movflags": "+faststart"})),
    Case("h264-intra.mp4", h264("mp4", g="1")),
    Case("h264-no-b.mp4", h264("mp4", g="12", bf="0")),
    Case("h264-b.mp4", h264("mp4", g="12", bf="3")),
    Case("h264-open-gop.mp4", h264("mp4", g="6", bf="3",
         x264_params="open-gop=1:b-pyramid=strict")),
    Case("h264-intra-refresh.mp4", h264("mp4", g="12", bf="0", x264_params="intra-refresh=1")),
    Case("h264-interlaced.mp4", h264("mp4", g="12", x264_params="interlaced=1")),
    Case("h264-fragments.mp4", h264("mp4",
         muxer={"movflags": "+frag_keyframe+empty_moov"}, g="12")),
    Case("h264.mov", h264("mov")),
    Case("h264.mkv", h264("matroska", g="12")),
    Case("h264.avi", h264("avi", bf="0")),
    Case("h264-b.avi", h264("avi", bf="2")),
    Case("h264.ts", h264("mpegts")),
    Case("hevc.mp4", clip("libx265", "mp4")),
    Case("hevc.mkv", clip("libx265", "matroska")),
    Case("hevc.ts", clip("libx265", "mpegts")),
    Case("hevc-10.mp4", clip("libx265", "mp4", "yuv420p10le")),
    Case("hevc-10.mkv", clip("libx265", "matroska", "yuv420p10le")),
    Case("vp8.webm", clip("libvpx", "webm", **VPX)),
    Case("vp8.mkv", clip("libvpx", "matroska", **VPX)),
    Case("vp9.webm", clip("libvpx-vp9", "webm", **VPX)),
    Case("vp9.mp4", clip("libvpx-vp9", "mp4", **VPX)),
    Case("av1.mp4", clip("libsvtav1", "mp4", preset="8", crf="10")),
    Case("av1.mkv", clip("libsvtav1", "matroska", preset="8", crf="10")),
    Case("av1.webm", clip("libsvtav1", "webm", preset="8", crf="10")),
    Case("mpeg4.mp4", clip("mpeg4", "mp4")),
    Case("mpeg4-b.mp4", clip("mpeg4", "mp4", bf="2")),
    Case("mpeg4.avi", clip("mpeg4", "avi")),
    Case("mpeg4.mkv", clip("mpeg4", "matroska")),
    Case("mjpeg.avi", clip("mjpeg", "avi", "yuvj420p")),
    Case("mjpeg.mov", clip("mjpeg", "mov", "yuvj420p")),
    Case("mjpeg.mkv", clip("mjpeg", "matroska", "yuvj420p")),
    Case("gif.gif", clip("gif", "gif", "rgb8"), tolerance=1),
    Case("wrong-suffix.txt", h264("mp4")),
    Case("turned-90.mp4", h264("mp4", rotation=90), rotation=90, size=(128, 96)),
    Case("turned-180.mov", h264("mov", rotation=180), rotation=180),
    Case("turned-270.mp4", h264("mp4", rotation=270), rotation=270, size=(128, 96)),
    Case("turned-90-hevc.mp4", clip("libx265", "mp4", rotation=90), rotation=90, size=(128, 96)),
    Case("portrait.mp4", h264("mp4", size=(128, 96)), size=(128, 96)),
    Case("odd.mp4", h264("mp4", "yuv444p", size=(97, 131)), size=(97, 131)),
    Case("odd.mkv", clip("mjpeg", "matroska", "yuvj444p", size=(97, 131)), size=(97, 131)),
    Case("one.mp4", h264("mp4", count=1), numbers=(0,), tokens=15),
    Case("one.gif", clip("gif", "gif", "rgb8", count=1), numbers=(0,), tokens=15),
    Case("three.mp4", h264("mp4", count=3), numbers=(0, 2), tokens=15),
    Case("more-than-there-are.mp4", h264("mp4", count=6), numbers=tuple(range(6)), tokens=45,
         options=FrameOptions(nframes=50)),
    Case("late.mp4", h264("mp4", when=lambda n: n + 24)),
    Case("late.mkv", h264("matroska", when=lambda n: n + 24)),
    Case("late.ts", h264("mpegts", when=lambda n: n + 24)),
    Case("edited.mp4", h264("mp4", when=lambda n: n - 12),
         numbers=(12, 20, 27, 35), pts=lambda n: (n - 12) / RATE),
    Case("uneven.mp4", h264("mp4", when=lambda n: UNEVEN[n]),
         numbers=(0, 19, 26, 33), pts=lambda n: UNEVEN[n] / RATE),
    Case("uneven.mkv", h264("matroska", when=lambda n: UNEVEN[n]), numbers=(0, 19, 27, 35),
         pts=lambda n: UNEVEN[n] / RATE),
    Case("part.mp4", h264("mp4"), numbers=(12, 16, 20, 24),
         options=FrameOptions(nframes=4, video_start=0.5, video_end=1)),
    Case("by-rate.mp4", h264("mp4"), numbers=(0, 5, 10, 15, 20, 25, 30, 35), tokens=60,
         options=FrameOptions(fps=6, min_frames=2)),
    Case("damaged.avi", damaged, numbers=(0, 12, 23, 35)),
]  # fmt: skip

HLS = "#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nother.mp4\n#EXT-X-ENDLIST\n"
DASH = '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"></MPD>'
BAD = [
    Case("missing.mp4", missing, "not_found"),
    Case("empty.mp4", content(b""), "empty_file"),
    Case("text.mp4", content("not a video\n" * 100), "not_a_video"),
    Case("picture.mp4", content(b"\x89PNG\r\n\x1a\n" + bytes(200)), "not_a_video"),
    Case("avif.mp4", content(b"\x00\x00\x00\x1cftypavif" + bytes(200)), "not_a_video"),
    Case("headless.mkv", content(b"\x1aE\xdf\xa3" + bytes(500)), "not_a_video"),
    Case("ffconcat.mp4", playlist("ffconcat version 1.0\nfile 'other.mp4'\n"), "not_a_video"),
    Case("hls.ts", playlist(HLS), "not_a_video"),
    Case("dash.mp4", playlist(DASH), "not_a_video"),
    Case("sound.mp4", sound("aac", "mp4"), "no_video_stream"),
    Case("sound.mkv", sound("aac", "matroska"), "no_video_stream"),
    Case("sound.avi", sound("pcm_s16le", "avi"), "no_video_stream"),
    Case("cut-index-last.mp4", h264("mp4", keep=0.5), "truncated_file"),
    Case("cut-early.mp4", clip("mjpeg", "mov", "yuvj420p",
         muxer={"movflags": "+faststart"}, keep=0.3),
         "truncated_file"),
    Case("bomb.gif", bomb, "too_large"),
    Case("frameless.mp4", frameless, "zero_frames"),
    Case("strip.mkv", clip("mjpeg", "matroska", "yuvj444p", count=2, size=(8, 2000)),
         "invalid_request"),
    Case("nothing-there.mp4", h264("mp4"), "too_few_frames", options=FrameOptions(video_start=9)),
]  # fmt: skip

CUT = Case("cut-late.mov", clip("mjpeg", "mov", "yuvj420p",
         muxer={"movflags": "+faststart"}, keep=0.8),
           numbers=(0, 12, 23), lost=1)  # fmt: skip

NAMES = [
    "a b",
    "a%20b",
    "a#b",
    "a,b=c",
    'it\'s "it"',
    "видео-日本-🎬",
    "two\nlines",
    "bell\a",
    "..",
    "x..y",
    "-i",
    "concat:x",
]


@pytest.fixture(scope="module", autouse=True)
def _no_worker_left() -> Iterator[None]:
    yield
    close_workers()


def frames_of(path: Path, options: FrameOptions) -> tuple[VideoInfo, FramePlan, Frames]:
    info = probe(str(path))
    plan = plan_frames(info, options, GEOMETRY)
    return info, plan, decode(str(path), info, plan)


def check(case: Case, path: Path) -> None:
    case.make(path)
    info, plan, frames = frames_of(path, case.options)
    assert (info.height, info.width, info.rotation) == (*case.size, case.rotation)
    shown = [number_of(image, case.rotation) for image in frames.pixels]
    assert shown == pytest.approx(case.numbers, abs=case.tolerance)
    assert frames.pts == pytest.approx(
        [case.pts(n) for n in case.numbers], abs=0.002 + case.tolerance / RATE
    )
    assert (plan.tokens, frames.frames_lost, frames.rotation) == (
        case.tokens,
        case.lost,
        case.rotation,
    )
    assert frames.pixels.shape == (len(case.numbers), plan.height, plan.width, 3)


@pytest.mark.parametrize("case", [*GOOD, CUT], ids=lambda case: case.name)
def test_readable_files(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path / case.name)


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_unreadable_files(case: Case, tmp_path: Path) -> None:
    path = tmp_path / case.name
    case.make(path)
    with pytest.raises(RequestError) as raised:
        frames_of(path, case.options)
    assert raised.value.code == case.code
    if case.code not in ("invalid_request", "too_few_frames"):  # these errors do not name the file
        assert case.name in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("name", [*NAMES, os.fsdecode(b"no-utf8-\xff")], ids=ascii)
def test_file_names_are_literal(name: str, tmp_path: Path) -> None:
    """For a folder of that name with a video and an empty file; the error message about the latter
    is one printable line."""
    (tmp_path / "in").mkdir()
    folder = tmp_path / "in" / name
    folder.mkdir(exist_ok=True)
    check(Case(name, clip("mjpeg", "avi", "yuvj420p")), folder / "v.avi")
    (folder / "e.mp4").touch()
    with pytest.raises(RequestError) as raised:
        probe(str(folder / "e.mp4"))
    assert raised.value.code == "empty_file"
    assert raised.value.message.isprintable()
