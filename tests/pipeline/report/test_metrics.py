from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jobs.demo_model import world
from pipeline import read
from pipeline.config import ROOT
from pipeline.records import RunSnapshot
from pipeline.report.metrics import RunMetrics
from pipeline.report.tally import PHASES, Tally

# Runs a job on a cluster of its own, then reads the metrics page that Prometheus would read.
JOB = """
import json, re, sys, time, urllib.request
import ray
from pipeline.config import parse_job
from pipeline.job import run_job
from pipeline.driver.cluster import cluster

job = parse_job(sys.argv[1:], "test")
with cluster(job):
    summary = run_job(job)
    node = ray.nodes()[0]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    page = ""
    until = time.monotonic() + 60
    complete = rf"rows_written_total.* {summary['new']}\\.0"
    while not re.search(complete, page) and time.monotonic() < until:
        time.sleep(0.2)
        try:
            page = urllib.request.urlopen(address, timeout=10).read().decode()
        except OSError:
            pass  # the node's agent is not up yet
    print(json.dumps([summary, page, sorted({"torch", "transformers"} & sys.modules.keys())]))
"""


def scrape(page: str) -> dict[tuple[str, ...], float]:
    """(name, values of its tags) → value, of this project's metrics on a metrics page."""
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith("ray_std_caption_") and "bucket" not in sample.name:
                tags = [sample.labels[key] for key in ("code", "phase") if key in sample.labels]
                found[(sample.name.removeprefix("ray_std_caption_"), *tags)] = sample.value
    return found


def test_metrics_of_a_run_stand_at_rays_metrics_port(tiny_model: Path, tmp_path: Path) -> None:
    videos = tmp_path / "videos"
    output = tmp_path / "out"
    videos.mkdir()
    for seed in range(3):
        (videos / f"{seed}.mp4").write_bytes(world.make_clip(seed, 1)[1])
    (videos / "text.mp4").write_text("this is no video\n" * 100)
    (videos / "empty.mp4").write_bytes(b"")
    words = [
        "--input",
        videos,
        "--output",
        output,
        "--draft",
        "std",
        "--model",
        tiny_model,
        "--max-tokens",
        "8",
        "--rows-per-part",
        "1",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_metrics_report_interval_ms": "500"}
    command = [sys.executable, "-c", JOB, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    summary, page, loaded = json.loads(done.stdout.splitlines()[-1])
    assert loaded == []  # a driver runs without torch and transformers
    metrics = scrape(page)
    rows = read(str(output)).to_pylist()
    good = [row for row in rows if row["status"] != "error"]
    assert metrics[("requests_done_total",)] == len(good) == 3
    assert metrics["requests_failed_total", "not_a_video"] == 1
    assert metrics["requests_failed_total", "empty_file"] == 1
    assert metrics[("rows_written_total",)] == summary["new"] == 5
    assert metrics[("tokens_generated_total",)] == summary["tokens"] > 0
    for name in ("proposed", "accepted"):
        if total := sum(row[name] for row in good):
            assert metrics[(f"drafts_{name}_total",)] == total
    assert sum(row["proposed"] for row in good) > 0
    for phase in PHASES:
        assert metrics["engine_seconds_total", phase] == pytest.approx(
            sum(row[f"{phase}_s"] for row in good)
        )
    assert metrics[("frame_bytes_in_flight",)] == metrics[("requests_seated",)] == 0
    assert metrics[("context_tokens_count",)] == metrics[("request_engine_seconds_count",)] == 3


class Instrument:
    """Keeps its values; like Ray's, its counter accepts only increments above 0."""

    def __init__(self, name: str, description: str, tags: Any = ()):
        self.name = name
        self.values = Counter[tuple[str, ...]]()

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        self.values[tuple(tags.values())] += value

    def set(self, value: float) -> None:
        self.values[()] = value

    observe = set


def test_counters_include_sums_from_before_they_were_created() -> None:
    made: dict[str, Instrument] = {}

    def make(name: str, *rest: Any) -> Instrument:
        made[name.removeprefix("std_caption_")] = Instrument(name, *rest)
        return made[name.removeprefix("std_caption_")]

    tally = Tally(failed=Counter({"not_found": 2}))
    metrics = RunMetrics(SimpleNamespace(Counter=make, Gauge=make, Histogram=make))
    metrics.publish(tally, RunSnapshot(frame_bytes=7), rows_written=0)
    tally.succeeded = 1
    tally.tokens = 30
    tally.failed["not_found"] += 1
    tally.phase_seconds["decode"] += 0.5
    metrics.publish(tally, RunSnapshot(decoding=3, deaths=1), rows_written=4)
    metrics.publish(tally, RunSnapshot(decoding=3, deaths=1), rows_written=4)
    assert made["engine_deaths"].values == {(): 1}
    assert made["requests_failed"].values == {("not_found",): 3}
    assert made["engine_seconds"].values == {("decode",): 0.5}
    assert made["requests_done"].values == {(): 1}
    assert made["rows_written"].values == {(): 4}
    assert made["frame_bytes_in_flight"].values == {(): 0}
    assert made["videos_decoding"].values == {(): 3}
