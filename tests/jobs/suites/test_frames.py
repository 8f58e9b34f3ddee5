"""The suite `frames` at a small size: its figures are complete, however fast anything is."""

from __future__ import annotations

import json

import pytest

from jobs import benchmark
from pipeline.records import UsageError


def test_a_small_size_has_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "--seconds 10 --height 144 --probes 4 --megabytes 8 --files 60"
    assert benchmark.main(["--suite", "frames", *argv.split()]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(figures) == {
        "decoding",
        "peak_memory_mb",
        "probe",
        "sixteen_frames",
        "in_a_row",
        "seconds",
    }
    assert {fps: set(by_gop) for fps, by_gop in figures["decoding"].items()} == {
        "0.5": {"gop_250", "gop_30"},
        "2.0": {"gop_250", "gop_7"},
    }
    assert [figures["decoding"][fps]["gop_250"]["frames"] for fps in ("0.5", "2.0")] == [4, 20]
    assert all(0 < peak < 100 for peak in figures["peak_memory_mb"].values())
    sixteen = figures["sixteen_frames"]
    assert sixteen["frames"] == 16
    assert sixteen["bytes"] < 1.2 * sixteen["file_bytes"]
    assert figures["probe"]["bytes_per_file"] < 1 << 20
    assert figures["in_a_row"]["ratio"] < 1.1


def test_zero_files_are_an_error() -> None:
    with pytest.raises(UsageError, match="--files"):
        benchmark.main(["--suite", "frames", "--files", "0"])
