"""What decoding frames costs: CPU time beside simpler ways to decode, memory, and the traffic of
probing and reading from S3.

The clips are drawn here: a soft texture that pans, with grain. A few seconds are encoded once as
H.264 and repeated packet by packet, so that a clip of any length takes seconds to make and has its
key frames where they are wanted."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np

from jobs.suites.shared.flags import parse_suite_flags
from jobs.suites.shared.local_s3 import LocalS3, local_s3
from jobs.suites.shared.process_memory import peak_resident_bytes, reset_peak, resident_bytes
from jobs.suites.shared.timing import Stopwatch, cpu_seconds
from pipeline import storage
from pipeline.command_line import flag
from pipeline.config import ROOT
from pipeline.records import FrameOptions, FramePlan, UsageError, VideoInfo
from pipeline.video import pyav_reader
from pipeline.video.decode_job import DecodeJob, FrameBuffer, resize
from pipeline.video.frame_plan import plan_frames
from pipeline.video.frames import Limits, decode
from pipeline.video.probe import probe
from pipeline.video.sandbox import close_workers
from std_core.types import Geometry

BUCKET = "videos"
RATE = 30  # frames/s
LONG_GOP = 250  # frames, libx264's default
TOTAL_PIXELS = int(128_000 * 28 * 28 * 0.9)  # qwen-vl-utils' default for all frames together
SAMPLED_RATES = (0.5, 2.0)  # frames/s
WARMUP_FILES = 50  # after which memory should not grow
S3_CLIP_SECONDS = 8
S3_BITRATE = 40_000_000  # bits/s at 720p
MEMORY_FRAMES = 32


@dataclass(frozen=True)
class Flags:
    """The suite's command line."""

    seconds: int = flag(600, "of the decoded clips")
    height: int = flag(720, "of their frames, which are 16:9")
    probes: int = flag(400, "files that are probed on S3")
    megabytes: int = flag(500, "size of the file of which 16 frames are read from S3")
    files: int = flag(500, "that are decoded one after another")
    seed: int = flag(0, "of the texture")


def run(argv: list[str]) -> dict[str, Any]:
    """Return the suite's figures."""
    flags = parse_suite_flags(Flags, argv, "frames", __doc__)
    if min(flags.seconds, flags.height // 32, flags.probes, flags.megabytes, flags.files) < 1:
        raise UsageError(
            "--seconds, --probes, --megabytes and --files have to be 1 or more, --height 32 or more"
        )
    watch = Stopwatch()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures["decoding"] = {str(fps): _decoding(flags, folder, fps) for fps in SAMPLED_RATES}
        figures["peak_memory_mb"] = _peak_memory(flags, folder)
        with local_s3(BUCKET) as server:
            figures["probe"] = _probing(flags, folder, server)
            figures["sixteen_frames"] = _sixteen_frames(flags, folder, server)
            close_workers()
        figures["in_a_row"] = _many_files(flags, folder)
    close_workers()
    return figures | {"seconds": round(watch.seconds, 1)}


# ----------------------------------------------------------------------------------------- decoding


def _decoding(flags: Flags, folder: Path, fps: float) -> dict[str, Any]:
    """CPU seconds with few key frames and with a key frame every half step."""
    figures = {}
    for gop in (LONG_GOP, int(RATE / fps / 2)):
        path = write_clip(folder / f"{fps}-{gop}.mp4", flags, gop, flags.seconds)
        figures[f"gop_{gop}"] = _compare_decoders(path, fps)
        path.unlink()
    return figures


def _compare_decoders(path: Path, fps: float) -> dict[str, Any]:
    """CPU seconds of one thread, and their ratio to decoding every frame without conversion."""
    info = probe(str(path))
    options = FrameOptions(fps=fps, max_frames=10**6, total_pixels=TOTAL_PIXELS)
    plan = plan_frames(info, options, Geometry())
    decoders = {
        "every_frame": _decode_every_frame,
        "ours": _decode_ours,
        "pyav": _decode_plain_pyav,
        "decord": _decode_plain_decord,
    }
    seconds = {
        name: cpu_seconds(partial(decoder, str(path), info, plan))
        for name, decoder in decoders.items()
    }
    every_frame = seconds["every_frame"]
    return {
        "frames": len(plan.times),
        "size": [plan.height, plan.width],
        "cpu_s": {name: round(s, 2) for name, s in seconds.items()},
        "to_every_frame": {
            name: round(s / every_frame, 3) for name, s in seconds.items() if name != "every_frame"
        },
    }


def _decode_every_frame(path: str, info: VideoInfo, plan: FramePlan) -> None:
    """All frames, none converted."""
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_type = "NONE"
        for _ in container.decode(stream):
            pass


def _decode_ours(path: str, info: VideoInfo, plan: FramePlan) -> None:
    """The PyAV reader of the pipeline, in this process."""
    job = DecodeJob(
        path,
        remote=False,
        times=plan.times,
        start=info.start,
        fps=info.fps,
        height=plan.height,
        width=plan.width,
        frame_bytes=info.height * info.width * 3,
        size_bytes=info.size_bytes,
    )
    memory = os.memfd_create("frames")
    buffer = FrameBuffer(memory, job)
    pyav_reader.decode(job, buffer)
    os.close(memory)
    if buffer.num_lost:
        raise RuntimeError(f"{buffer.num_lost} of {len(plan.times)} frames were lost")


def _decode_plain_pyav(path: str, info: VideoInfo, plan: FramePlan) -> None:
    """Decode all frames in order and resize the sampled ones."""
    sampled = {round(t * info.fps) for t in plan.times}
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_type = "NONE"
        for number, frame in enumerate(container.decode(stream)):
            if number in sampled:
                resize(frame, plan.height, plan.width, 0)


def _decode_plain_decord(path: str, info: VideoInfo, plan: FramePlan) -> None:
    """Index decord's reader by frame number."""
    # decord imports the package nvidia where there is one, which loads all of CUDA
    sys.modules.setdefault("nvidia", None)  # type: ignore[arg-type]
    import decord

    reader = decord.VideoReader(path, num_threads=1, width=plan.width, height=plan.height)
    for t in plan.times:
        reader[round(t * info.fps)].asnumpy()


# ------------------------------------------------------------------------------------------- memory


def _peak_memory(flags: Flags, folder: Path) -> dict[str, float]:
    """MiB that decoding 32 frames takes beyond a process's memory, for two lengths of clips."""
    peaks = {}
    for seconds in (max(2, flags.seconds // 10), max(3, flags.seconds)):
        path = write_clip(folder / f"{seconds}.mp4", flags, LONG_GOP, seconds)
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"from jobs.suites.frames import print_peak; print_peak({str(path)!r})",
            ],
            check=True,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        peaks[f"{seconds}_s"] = round(int(done.stdout.split()[-1]) / 2**20, 1)
        path.unlink()
    return peaks


def print_peak(path: str) -> None:
    """Print the bytes that decoding 32 frames takes at its peak beyond this process's memory."""
    info = probe(path)
    reset_peak()  # that of the imports is larger
    before = peak_resident_bytes()
    plan = plan_frames(info, FrameOptions(nframes=MEMORY_FRAMES), Geometry())
    _decode_ours(path, info, plan)
    print(peak_resident_bytes() - before)


def _many_files(flags: Flags, folder: Path) -> dict[str, Any]:
    """Memory of this process, which supervises the decoding processes, over many files."""
    path = str(write_clip(folder / "row.mp4", flags, 15, 1, height=96))
    geometry = Geometry(min_pixels=28 * 28, max_pixels=16 * 28 * 28)
    plan = plan_frames(probe(path), FrameOptions(nframes=4), geometry)
    megabytes = []
    for _ in range(flags.files):
        decode(path, probe(path), plan)
        gc.collect(0)
        megabytes.append(round(resident_bytes() / 1e6, 1))
    warm = megabytes[min(WARMUP_FILES, flags.files) - 1]
    return {
        "files": flags.files,
        "mb_after_50": warm,
        "mb_at_the_end": megabytes[-1],
        "ratio": round(megabytes[-1] / warm, 4),
    }


# ----------------------------------------------------------------------------------------------- S3


def _probing(flags: Flags, folder: Path, server: LocalS3) -> dict[str, Any]:
    """Probe many files, half of them with the index at the end."""
    clips = [
        write_clip(folder / f"{name}.mp4", flags, 30, S3_CLIP_SECONDS, faststart=faststart)
        for name, faststart in (("front", True), ("back", False))
    ]
    contents = [clip.read_bytes() for clip in clips]
    uris = [f"s3://{BUCKET}/{number}.mp4" for number in range(flags.probes)]
    for number, uri in enumerate(uris):
        storage.put(uri, contents[number % 2])
    before = server.traffic()
    watch = Stopwatch()
    found = storage.map_concurrently(probe, uris, threads=16)
    seconds = watch.seconds
    assert all(info.frames == S3_CLIP_SECONDS * RATE for info in found)
    after = server.traffic()
    return {
        "files": flags.probes,
        "file_bytes": sum(map(len, contents)) // 2,
        "per_minute": round(60 * flags.probes / seconds),
        "bytes_per_file": (after.bytes - before.bytes) // flags.probes,
        "requests_per_file": round((after.requests - before.requests) / flags.probes, 2),
    }


def _sixteen_frames(flags: Flags, folder: Path, server: LocalS3) -> dict[str, Any]:
    """Bytes read for 16 frames of one large file with a key frame per second."""
    bitrate = S3_BITRATE * flags.height**2 // 720**2
    path = folder / "large.mp4"
    write_clip(path, flags, 30, S3_CLIP_SECONDS, bitrate=bitrate)
    clip_bytes = path.stat().st_size
    repeats = flags.megabytes * 1e6 / clip_bytes
    seconds = max(S3_CLIP_SECONDS, round(S3_CLIP_SECONDS * repeats))
    write_clip(path, flags, 30, seconds, bitrate=bitrate)
    uri = f"s3://{BUCKET}/large.mp4"
    storage.put(uri, path.read_bytes())
    before = server.traffic()
    info = probe(uri)
    plan = plan_frames(info, FrameOptions(nframes=16), Geometry())
    frames = decode(uri, info, plan, Limits(deadline=600.0))
    after = server.traffic()
    read = after.bytes - before.bytes
    return {
        "file_bytes": info.size_bytes,
        "bytes": read,
        "share": round(read / info.size_bytes, 4),
        "requests": after.requests - before.requests,
        "frames": len(frames.pts),
    }


# -------------------------------------------------------------------------------------------- clips


def write_clip(
    path: Path,
    flags: Flags,
    gop: int,
    seconds: int,
    *,
    faststart: bool = False,
    bitrate: int = 0,
    height: int = 0,
) -> Path:
    """Write a clip of `seconds` at `RATE` frames/s; returns its path.

    Args:
        gop: frames from one key frame to the next.
        faststart: the index stands at the front of the file, not at its end.
        bitrate: bits/s; 0 is libx264's default quality.
        height: pixels; that of the flags if 0.
    """
    once = path.with_suffix(".once.mp4")
    whole_gops = max(gop, LONG_GOP // gop * gop)  # frames that can be repeated
    _encode(
        once,
        flags,
        gop,
        min(whole_gops, seconds * RATE),
        bitrate=bitrate,
        height=height or flags.height,
    )
    _repeat_packets(once, path, seconds * RATE, faststart=faststart)
    once.unlink()
    return path


def _repeat_packets(source_path: Path, path: Path, count: int, *, faststart: bool) -> None:
    """Write `count` packets: those of the source again and again, with times that go on."""
    options = {"movflags": "+faststart"} if faststart else {}
    with av.open(str(source_path)) as source, av.open(str(path), "w", options=options) as out:
        stream: Any = source.streams.video[0]
        packets = [packet for packet in source.demux(stream) if packet.size]
        target = out.add_stream_from_template(stream)
        frame_duration = round(Fraction(1, RATE) / stream.time_base)
        for number in range(count):
            repeat, index = divmod(number, len(packets))
            original = packets[index]
            shift = repeat * len(packets) * frame_duration
            packet = av.Packet(bytes(original))
            packet.pts = original.pts + shift
            packet.dts = original.dts + shift
            packet.duration = frame_duration
            packet.time_base = stream.time_base
            packet.is_keyframe = original.is_keyframe
            packet.stream = target
            out.mux(packet)


def _encode(path: Path, flags: Flags, gop: int, count: int, *, bitrate: int, height: int) -> None:
    """Encode `count` frames of a texture that moves by one pixel per frame."""
    rng = np.random.default_rng(flags.seed)
    width = height * 16 // 9 // 2 * 2  # H.264's 4:2:0 needs even sides
    height = height // 2 * 2
    soft = rng.normal(128, 60, ((height + 64) // 16, (width + count + 64) // 16 + 1))
    texture = np.clip(soft, 0, 255).astype(np.uint8).repeat(16, 0).repeat(16, 1)
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
            panned = texture[:height, number : number + width] // 2
            pixels = panned + np.roll(grain, 7 * number)
            frame = av.VideoFrame.from_ndarray(pixels, format="gray")
            out.mux(stream.encode(frame.reformat(format="yuv420p")))
        out.mux(stream.encode())
