"""What the frames stage costs: probing and reading from S3, decoding beside the plainest ways to do
it, and memory.

Clips are drawn here (a soft texture that pans, with grain), a few seconds encoded once as H.264 and
repeated packet by packet, so that a clip of any length and size takes seconds to make and has its
key frames where it should."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np

from jobs.suites.shared.counting_s3 import BUCKET, counting_s3
from pipeline import storage
from pipeline.command_line import (
    parse_flags,
)
from pipeline.config import (
    ROOT,
)
from pipeline.records import FrameOptions, FramePlan, UsageError, VideoInfo
from pipeline.video import pyav_reader
from pipeline.video.decode_job import DecodeJob, FrameBuffer, resize
from pipeline.video.frame_plan import plan_frames
from pipeline.video.frames import Limits, decode
from pipeline.video.probe import probe
from pipeline.video.sandbox import close_workers
from std_core.types import Geometry

RATE = 30
TOTAL_PIXELS = int(128_000 * 28 * 28 * 0.9)  # of all frames together: qwen-vl-utils' default
AFTER = 50  # files, from which on memory should not grow


@dataclass(frozen=True)
class Flags:
    """The suite's command line."""

    seconds: int = 600  # of the clips that are decoded
    height: int = 720  # of their pictures; 16:9
    probes: int = 400  # files whose headers are read from S3
    megabytes: int = 500  # of the file of which 16 frames are read from S3
    files: int = 500  # that are decoded in a row
    seed: int = 0


def run(argv: list[str]) -> dict[str, Any]:
    """The suite's figures."""
    flags: Flags = parse_flags(Flags, argv, "benchmark.py --suite frames")
    if min(flags.seconds, flags.height // 32, flags.probes, flags.megabytes, flags.files) < 1:
        raise UsageError(
            "--seconds, --probes, --megabytes and --files have to be 1 or more, --height 32 or more"
        )
    began = time.monotonic()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures["decoding"] = {str(fps): _decoding(flags, folder, fps) for fps in (0.5, 2.0)}
        figures["peak_memory_mb"] = _memory(flags, folder)
        with counting_s3() as counts:
            figures["probe"] = _probing(flags, folder, counts)
            figures["sixteen_frames"] = _sixteen(flags, folder, counts)
            close_workers()
        figures["in_a_row"] = _in_a_row(flags, folder)
    close_workers()
    return figures | {"seconds": round(time.monotonic() - began, 1)}


# ----------------------------------------------------------------------------------------- decoding


def _decoding(flags: Flags, folder: Path, fps: float) -> dict[str, Any]:
    """CPU seconds of one thread, with few key frames and with many; ratios to decoding every frame
    unconverted."""
    few = 250
    many = int(RATE / fps / 2)
    return {
        f"gop_{gop}": _beside(write(folder / f"{fps}-{gop}.mp4", flags, gop, flags.seconds), fps)
        for gop in (few, many)
    }


def _beside(path: Path, fps: float) -> dict[str, Any]:
    info = probe(str(path))
    options = FrameOptions(fps=fps, max_frames=10**6, total_pixels=TOTAL_PIXELS)
    plan = plan_frames(info, options, Geometry())
    ways = {
        "every_frame": _every_frame,
        "ours": _ours,
        "pyav": _plain_pyav,
        "decord": _plain_decord,
    }
    took = {name: _cpu(partial(way, str(path), info, plan)) for name, way in ways.items()}
    path.unlink()
    every = took["every_frame"]
    return {
        "frames": len(plan.times),
        "size": [plan.height, plan.width],
        "cpu_s": {name: round(seconds, 2) for name, seconds in took.items()},
        "to_every_frame": {
            name: round(took[name] / every, 3) for name in ("ours", "pyav", "decord")
        },
    }


def _cpu(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _every_frame(path: str, info: VideoInfo, plan: FramePlan) -> None:
    """All frames decoded, none converted."""
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_type = "NONE"
        for _ in container.decode(stream):
            pass


def _ours(path: str, info: VideoInfo, plan: FramePlan) -> None:
    job = DecodeJob(
        path, False, plan.times, info.start, info.fps, plan.height, plan.width, info.height * info.width * 3,
        info.size_bytes,
    )  # fmt: skip
    memory = os.memfd_create("frames")
    buffer = FrameBuffer(memory, job)
    pyav_reader.decode(job, buffer)
    os.close(memory)
    if buffer.num_lost:
        raise RuntimeError(f"{buffer.num_lost} of {len(plan.times)} frames were lost")


def _plain_pyav(path: str, info: VideoInfo, plan: FramePlan) -> None:
    """As one would write it: through all frames, the sampled ones resized as they come."""
    wanted = {round(t * info.fps) for t in plan.times}
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_type = "NONE"
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                resize(frame, plan.height, plan.width, 0)


def _plain_decord(path: str, info: VideoInfo, plan: FramePlan) -> None:
    sys.modules.setdefault("nvidia", None)  # type: ignore[arg-type]  # it would load all of CUDA
    import decord

    reader = decord.VideoReader(path, num_threads=1, width=plan.width, height=plan.height)
    for t in plan.times:
        reader[round(t * info.fps)].asnumpy()


# ------------------------------------------------------------------------------------------- memory


def _memory(flags: Flags, folder: Path) -> dict[str, float]:
    """Peak of a process that decodes 32 frames of a clip, for two lengths."""
    peaks = {}
    for seconds in (max(2, flags.seconds // 10), max(3, flags.seconds)):
        path = write(folder / f"{seconds}.mp4", flags, 250, seconds)
        code = f"from suites.frames import peak; peak({str(path)!r})"
        search = os.pathsep.join((str(ROOT), str(ROOT / "jobs")))
        told = subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": search},
        )
        peaks[f"{seconds}_s"] = round(int(told.stdout.split()[-1]) / 1024, 1)
        path.unlink()
    return peaks


def peak(path: str) -> None:
    """Prints this process's peak memory in KiB above what it held before it decoded 32 frames. The
    system is told to forget the peak of the imports, which is larger."""
    info = probe(path)
    Path("/proc/self/clear_refs").write_text("5")
    before = _highest()
    _ours(path, info, plan_frames(info, FrameOptions(nframes=32), Geometry()))
    print(_highest() - before)


def _highest() -> int:
    """KiB that this process has held at most."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def _in_a_row(flags: Flags, folder: Path) -> dict[str, Any]:
    """Memory of this process, which supervises the decoders, over many files."""
    path = str(write(folder / "row.mp4", flags, 15, 1, height=96))
    info = probe(path)
    plan = plan_frames(
        info, FrameOptions(nframes=4), Geometry(min_pixels=28 * 28, max_pixels=16 * 28 * 28)
    )
    held = []
    for _ in range(flags.files):
        decode(path, probe(path), plan)
        gc.collect(0)
        held.append(_resident())
    first = held[min(AFTER, flags.files) - 1]
    return {
        "files": flags.files,
        "mb_after_50": first,
        "mb_at_the_end": held[-1],
        "ratio": round(held[-1] / first, 4),
    }


def _resident() -> float:
    """MB of this process."""
    return round(
        int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6, 1
    )


# ----------------------------------------------------------------------------------------------- S3


def _probing(flags: Flags, folder: Path, counts: Callable[[], Any]) -> dict[str, Any]:
    """Headers of many files, half of them with the index at the end."""
    clips = [
        write(folder / f"{at}.mp4", flags, 30, 8, front=at == "front").read_bytes()
        for at in ("front", "back")
    ]
    uris = [f"s3://{BUCKET}/{number}.mp4" for number in range(flags.probes)]
    for number, uri in enumerate(uris):
        storage.put(uri, clips[number % 2])
    before = counts()
    began = time.monotonic()
    found = storage.map_concurrently(probe, uris, threads=16)
    seconds = time.monotonic() - began
    assert all(info.frames == 8 * RATE for info in found)
    after = counts()
    return {
        "files": flags.probes,
        "file_bytes": sum(map(len, clips)) // 2,
        "per_minute": round(60 * flags.probes / seconds),
        "bytes_per_file": (after.bytes - before.bytes) // flags.probes,
        "requests_per_file": round((after.requests - before.requests) / flags.probes, 2),
    }


def _sixteen(flags: Flags, folder: Path, counts: Callable[[], Any]) -> dict[str, Any]:
    """16 frames of one large file: a clip of 40 Mbit/s (at 720p) with a key frame a second, all of
    it footage."""
    rate = 40_000_000 * flags.height**2 // 720**2
    once = write(folder / "large.mp4", flags, 30, 8, bitrate=rate).stat().st_size
    seconds = max(8, round(8 * flags.megabytes * 1e6 / once))
    path = write(folder / "large.mp4", flags, 30, seconds, bitrate=rate)
    uri = f"s3://{BUCKET}/large.mp4"
    storage.put(uri, path.read_bytes())
    before = counts()
    info = probe(uri)
    frames = decode(
        uri, info, plan_frames(info, FrameOptions(nframes=16), Geometry()), Limits(deadline=600.0)
    )
    after = counts()
    return {
        "file_bytes": info.size_bytes,
        "bytes": after.bytes - before.bytes,
        "share": round((after.bytes - before.bytes) / info.size_bytes, 4),
        "requests": after.requests - before.requests,
        "frames": len(frames.pts),
    }


# -------------------------------------------------------------------------------------------- clips


def write(
    path: Path,
    flags: Flags,
    gop: int,
    seconds: int,
    front: bool = False,
    bitrate: int = 0,
    height: int = 0,
) -> Path:
    """A clip of `seconds` at `RATE` frames a second; every `gop`-th frame is a key frame, the index
    at the front or the end."""
    once = path.with_suffix(".once.mp4")
    count = max(gop, 250 // gop * gop)
    _encode(
        once, flags, gop, min(count, seconds * RATE), bitrate=bitrate, height=height or flags.height
    )
    with (
        av.open(str(once)) as source,
        av.open(str(path), "w", options={"movflags": "+faststart"} if front else {}) as out,
    ):
        stream: Any = source.streams.video[0]
        packets = [packet for packet in source.demux(stream) if packet.size]
        target = out.add_stream_from_template(stream)
        per_frame = round(Fraction(1, RATE) / stream.time_base)
        for number in range(seconds * RATE):
            turn, at = divmod(number, len(packets))
            packet = av.Packet(bytes(packets[at]))
            old = packets[at]
            shift = turn * len(packets) * per_frame
            packet.pts = old.pts + shift
            packet.dts = old.dts + shift
            packet.duration = per_frame
            packet.time_base = stream.time_base
            packet.is_keyframe = old.is_keyframe
            packet.stream = target
            out.mux(packet)
    once.unlink()
    return path


def _encode(path: Path, flags: Flags, gop: int, count: int, bitrate: int, height: int) -> None:
    rng = np.random.default_rng(flags.seed)
    height, width = height // 2 * 2, height * 16 // 9 // 2 * 2
    soft = rng.normal(128, 60, ((height + 64) // 16, (width + count + 64) // 16 + 1))
    wide = np.clip(soft, 0, 255).astype(np.uint8).repeat(16, 0).repeat(16, 1)
    grain = rng.integers(0, 12, (height, width), dtype=np.uint8)
    options = {"g": str(gop), "keyint_min": str(gop), "sc_threshold": "0", "preset": "veryfast"}
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=RATE, options=options)
        stream.height = height
        stream.width = width
        stream.pix_fmt = "yuv420p"
        if bitrate:
            stream.bit_rate = bitrate
        for number in range(count):
            grey = wide[:height, number : number + width] // 2 + np.roll(grain, 7 * number)
            out.mux(
                stream.encode(
                    av.VideoFrame.from_ndarray(grey, format="gray").reformat(format="yuv420p")
                )
            )
        out.mux(stream.encode())
