"""Whether the driver keeps engines busy, and what a large archive costs it.

First, one engine of a given rate is fed by decoders of `--speed` times its demand, once with
look-ahead and once without. Then a manifest of `--manifest` rows is read, probed, planned and
answered by stubs that take no time."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.suites.shared.flags import parse_suite_flags, require_positive
from jobs.suites.shared.stubs import (
    FixedWaves,
    decode_stub_video,
    load_stub_engine,
    stub_request,
    write_stub_video,
)
from pipeline.command_line import flag
from pipeline.config import Job
from pipeline.driver.cluster import cluster, drive
from pipeline.driver.resources import ClusterResources, EngineResources
from pipeline.driver.state import DEFAULT_LIMITS, DriverLimits
from pipeline.job import run_job
from pipeline.records import CompletedRequest, RunSnapshot

MAX_LINKS = 20_000  # names per file of the manifest's archive
VIDEOS_IN_FLIGHT = 6
MAX_MODEL_LEN = 4096
SLOTS = 64  # of the engine that answers the manifest
# a video is decoded only when a slot is free
WITHOUT_LOOKAHEAD = DriverLimits(in_engine=1, ahead=1)


@dataclass(frozen=True)
class Flags:
    """The suite's command line."""

    requests: int = flag(200, "answered with look-ahead, and again without")
    seconds: float = flag(0.1, "of a request in the engine")
    speed: float = flag(1.5, "videos decoded per second over those that the engine answers")
    manifest: int = flag(10_000, "rows of the manifest")
    videos: int = flag(1_000_000, "different videos of the manifest, at most")

    def __post_init__(self) -> None:
        require_positive(self, "requests", "seconds", "speed", "manifest", "videos")


def run(argv: list[str]) -> dict[str, Any]:
    """Return the suite's figures."""
    flags = parse_suite_flags(Flags, argv, "pipeline", __doc__)
    with cluster(Job()):
        with_lookahead = _drive_stubs(flags, DEFAULT_LIMITS)
        without_lookahead = _drive_stubs(flags, WITHOUT_LOOKAHEAD)
        manifest = _run_manifest(flags)
    return {
        "engine_busy": with_lookahead.busy,
        "engine_busy_without_lookahead": without_lookahead.busy,
        "most_bytes_in_flight": with_lookahead.snapshot.peak_frame_bytes,
        "max_bytes_in_flight": with_lookahead.max_bytes_in_flight,
        **manifest,
    }


# ------------------------------------------------------------------------------------ a busy engine


@dataclass
class EngineUse:
    """Observer of a run: how long its engine worked. Times in seconds of `time.monotonic`.

    Args:
        start: when the first request began.
        worked: time inside the engine.
    """

    start: float = 0.0
    end: float = 0.0
    worked: float = 0.0
    max_bytes_in_flight: int = 0
    snapshot: RunSnapshot = field(default_factory=RunSnapshot)

    def add_request(self, completed: CompletedRequest) -> None:
        result = completed.result
        self.end = time.monotonic()
        self.start = self.start or self.end - result.decode_s
        self.worked += result.vision_s + result.prefill_s + result.decode_s

    def attach_metrics(self, instruments: Any, **figures: Any) -> None:
        self.max_bytes_in_flight = figures["max_bytes_in_flight"]

    def update(self, snapshot: RunSnapshot) -> None:
        self.snapshot = snapshot

    @property
    def busy(self) -> float:
        """Share of the time from the first request to the last answer."""
        return round(self.worked / (self.end - self.start), 4)


def _drive_stubs(flags: Flags, limits: DriverLimits) -> EngineUse:
    """Run all requests through one engine with one slot."""
    requests = [stub_request(number) for number in range(flags.requests)]
    plan = requests[0].frame_plan
    video_bytes = len(plan.times) * plan.height * plan.width * 3
    job = Job(max_num_seqs=1, max_bytes_in_flight=VIDEOS_IN_FLIGHT * video_bytes)
    decode_seconds = _parallel_decoders(job) * flags.seconds / flags.speed
    use = EngineUse()
    drive(
        job,
        FixedWaves(requests, 1),
        max_model_len=MAX_MODEL_LEN,
        on_completed=use.add_request,
        observer=use,
        load=partial(load_stub_engine, seconds=flags.seconds),
        decode=partial(decode_stub_video, seconds=decode_seconds),
        limits=limits,
    )
    return use


def _parallel_decoders(job: Job) -> int:
    """Videos that are decoded at the same time: one per CPU that the engine leaves free."""
    resources = EngineResources(job, ClusterResources.current())
    return max(1, int(resources.cluster.cpus - resources.actor_options["num_cpus"]))


# ---------------------------------------------------------------------------------- a large archive


def _run_manifest(flags: Flags) -> dict[str, Any]:
    """A whole job: the manifest's Parquet, headers, waves, one engine, Parquet rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = _write_archive(flags, folder)
        first_request = folder / "first"  # touched by the engine
        job = Job(input=manifest, output=str(folder / "out"), max_num_seqs=SLOTS)
        before = _peak_mebibytes(resource.RUSAGE_SELF)
        start = time.time()  # comparable with the file's time
        load = partial(load_stub_engine, first_request_file=str(first_request))
        summary = run_job(job, load=load, decode=decode_stub_video)
        first_wave_seconds = first_request.stat().st_mtime - start
    return {
        "manifest_requests": summary["requests"],
        "manifest_errors": summary["errors"],
        "manifest_seconds": summary["seconds"],
        "first_wave_seconds": round(first_wave_seconds, 1),
        "driver_megabytes": round(_peak_mebibytes(resource.RUSAGE_SELF)),
        "driver_megabytes_before": round(before),
        "survey_megabytes": round(_peak_mebibytes(resource.RUSAGE_CHILDREN)),
    }


def _write_archive(flags: Flags, folder: Path) -> str:
    """A manifest whose videos are hard links to a few copies of one clip; returns its path."""
    count = min(flags.videos, flags.manifest)
    for number in range(count):
        original = folder / f"{number // MAX_LINKS}.original"
        if number % MAX_LINKS == 0:
            write_stub_video(original)
        os.link(original, folder / f"{number}.mp4")
    rows = range(flags.manifest)
    videos = [str(folder / f"{number * count // flags.manifest}.mp4") for number in rows]
    table = pa.table({"video": videos, "question": [f"Question {number}?" for number in rows]})
    manifest = folder / "manifest.parquet"
    pq.write_table(table, manifest)
    return str(manifest)


def _peak_mebibytes(who: int) -> float:
    """Peak resident memory of this process (`RUSAGE_SELF`), or the largest of its children that
    have ended (`RUSAGE_CHILDREN`)."""
    kibibytes = resource.getrusage(who).ru_maxrss
    return kibibytes / 1024
