"""Whether engines are kept busy, and what an archive of any size costs the driver. An engine of a
given rate is fed by a decoder of `speed` times its demand, once with look-ahead and once without;
then a manifest of `manifest` rows is read, probed, planned and answered, with stubs that take no
time."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.suites.shared.stubs import (
    FixedWaves,
    decode_stub_video,
    load_stub_engine,
    stub_request,
    write_stub_video,
)
from pipeline.command_line import (
    parse_flags,
)
from pipeline.config import (
    Job,
)
from pipeline.driver import replica as replica_module
from pipeline.driver.cluster import cluster, drive, engine_share
from pipeline.job import run_job
from pipeline.records import CompletedRequest, RunSnapshot, UsageError

LINKS = 20_000  # names per file, at most, in the manifest's archive


@dataclass(frozen=True)
class Flags:
    """The suite's command line. `seconds` is what a request takes in the engine; `manifest` is a
    number of rows, each with a video of its own up to `videos` of them."""

    requests: int = 200
    seconds: float = 0.1
    speed: float = 1.5
    manifest: int = 10_000
    videos: int = 1_000_000

    def __post_init__(self) -> None:
        for name in ("requests", "seconds", "speed", "manifest", "videos"):
            if getattr(self, name) <= 0:
                raise UsageError(f"--{name} is {getattr(self, name)}: more than 0 is needed")


def run(argv: list[str]) -> dict[str, Any]:
    """The suite's figures."""
    flags: Flags = parse_flags(Flags, argv, "benchmark.py --suite pipeline")
    with cluster(Job()):
        ahead = _measure(flags)
        with _without_look_ahead():
            alone = _measure(flags)
        large = _manifest(flags)
    return {
        "engine_busy": ahead.busy,
        "engine_busy_without_lookahead": alone.busy,
        **ahead.memory,
        **large,
    }


@dataclass
class _Measured:
    """What a drive handed on, and when."""

    began: float = 0.0  # when the first request was begun
    ended: float = 0.0
    worked: float = 0.0  # s inside the engine
    snapshot: RunSnapshot = field(default_factory=RunSnapshot)

    def emit(self, answer: CompletedRequest) -> None:
        """One request's result."""
        result = answer.result
        self.ended = time.monotonic()
        self.began = self.began or self.ended - result.decode_s
        self.worked += result.vision_s + result.prefill_s + result.decode_s

    def attach_metrics(self, instruments: Any, **where: Any) -> None:
        """What bounds it."""
        self.bound = where["max_bytes_in_flight"]

    def update(self, snapshot: RunSnapshot) -> None:
        """What is where."""
        self.snapshot = snapshot

    @property
    def busy(self) -> float:
        return round(self.worked / (self.ended - self.began), 4)

    @property
    def memory(self) -> dict[str, int]:
        return {
            "most_bytes_in_flight": self.snapshot.peak_frame_bytes,
            "max_bytes_in_flight": self.bound,
        }


def _measure(flags: Flags) -> _Measured:
    """One engine with one slot; frames in flight are bounded to six videos."""
    requests = [stub_request(number) for number in range(flags.requests)]
    size = (
        len(requests[0].frame_plan.times)
        * requests[0].frame_plan.height
        * requests[0].frame_plan.width
        * 3
    )
    job = Job(max_num_seqs=1, max_bytes_in_flight=6 * size)
    seen = _Measured()
    load = partial(load_stub_engine, seconds=flags.seconds)
    decode = partial(decode_stub_video, seconds=_decoders(job) * flags.seconds / flags.speed)
    drive(
        job,
        FixedWaves(requests, 1),
        max_model_len=4096,
        on_answer=seen.emit,
        observer=seen,
        load=load,
        decode=decode,
    )
    return seen


def _decoders(job: Job) -> int:
    """Videos that decode at the same time."""
    import ray  # the cluster's figures are its own

    _, options, _ = engine_share(job)
    return max(1, int(ray.cluster_resources()["CPU"] - options["num_cpus"]))


@contextmanager
def _without_look_ahead() -> Iterator[None]:
    """A video is decoded when a slot is free."""
    before = replica_module.HELD, replica_module.AHEAD
    replica_module.HELD = replica_module.AHEAD = 1
    try:
        yield
    finally:
        replica_module.HELD, replica_module.AHEAD = before


# ------------------------------------------------------------------------------------ many requests


def _manifest(flags: Flags) -> dict[str, Any]:
    """All of it: Parquet in, headers, waves, one engine, Parquet out."""
    with tempfile.TemporaryDirectory() as folder:
        source = _archive(flags, Path(folder))
        before = _memory()
        began = time.time()
        first = Path(folder) / "first"
        job = Job(input=source, output=str(Path(folder) / "out"), max_num_seqs=64)
        summary = run_job(
            job, load=partial(load_stub_engine, begun=str(first)), decode=decode_stub_video
        )
        waited = first.stat().st_mtime - began
    return {
        "manifest_requests": summary["requests"],
        "manifest_errors": summary["errors"],
        "manifest_seconds": summary["seconds"],
        "first_wave_seconds": round(waited, 1),
        "driver_megabytes": round(_memory()),
        "driver_megabytes_before": round(before),
        "survey_megabytes": round(_memory(resource.RUSAGE_CHILDREN)),
    }


def _archive(flags: Flags, folder: Path) -> str:
    """A manifest of rows on one clip under many names."""
    count = min(flags.videos, flags.manifest)
    for number in range(count):
        original = folder / f"{number // LINKS}.original"
        if number % LINKS == 0:
            write_stub_video(original)
        os.link(original, folder / f"{number}.mp4")
    rows = range(flags.manifest)
    videos = [str(folder / f"{number * count // flags.manifest}.mp4") for number in rows]
    table = pa.table({"video": videos, "question": [f"Question {number}?" for number in rows]})
    pq.write_table(table, folder / "manifest.parquet")
    return str(folder / "manifest.parquet")


def _memory(whose: int = resource.RUSAGE_SELF) -> float:
    """The most that this process has had, or one that it started and that is over, in MB."""
    return resource.getrusage(whose).ru_maxrss / 1024
