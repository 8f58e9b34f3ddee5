"""Rows, runs and report data without a run behind them."""

from __future__ import annotations

import hashlib
from datetime import datetime, timezone
from typing import Any

from pipeline.output.schema import RESULT_SCHEMA, to_table
from pipeline.report.data import ReportData
from pipeline.report.runs import RunRecord, Sample, WaveRecord

START = 1_796_000_000.0  # s since 1970
# Text that would become markup, run a script or send a request if it were not escaped.
HOSTILE = (
    """"><img src=x onerror=alert(1)><script>alert('$x_1$')</script>"""
    """<b style='--a:url(http://127.0.0.1:1/leak)'>&amp;"""
)
HOSTILE_NAME = """"><img src=x>$x_1$<script>"""  # short enough for a plot


def row(number: int, **values: Any) -> dict[str, Any]:
    """A row with a text, created a second after the row with the number before."""
    return {
        "request_id": hashlib.md5(str(number).encode()).hexdigest(),
        "video_uri": f"s3://archive/clip-{number}.mp4",
        "video_start": 0.0,
        "video_end": 36.0,
        "prompt": "Describe this video.",
        "status": "success",
        "text": "A red circle moves left.",
        "finish_reason": "stop",
        "attempts": 1,
        "num_prompt_tokens": 40,
        "num_visual_tokens": 600,
        "num_generated_tokens": 60,
        "draft": "std",
        "kv_keep": 0.25,
        "rounds": 12,
        "proposed": 60,
        "accepted": 47,
        "vision_s": 0.1,
        "prefill_s": 0.2,
        "decode_s": 0.3,
        "created_at": datetime.fromtimestamp(START + 1 + number, timezone.utc),
    } | values


def failed(number: int, code: str, message: str = "it is broken", **values: Any) -> dict[str, Any]:
    """An error row."""
    columns = ("request_id", "video_uri", "prompt", "created_at", "attempts")
    request = {name: value for name, value in row(number).items() if name in columns}
    error = {
        "status": "error",
        "finish_reason": "error",
        "error_code": code,
        "error_message": message,
    }
    return request | error | values


def run_of(seconds: float = 30.0, start_time: float = START, **values: Any) -> RunRecord:
    """The record of a finished run with two waves."""
    about = {
        "model": "demo",
        "draft": "std",
        "engines": 1,
        "device": "cpu",
        "max_bytes_in_flight": 2e6,
    }
    samples = [
        Sample(
            second=float(second),
            answered=second,
            failed=0,
            tokens=60 * second,
            engine_s=0.6 * second,
            decoding=1,
            decoded=4,
            frame_bytes=1_000_000,
        )
        for second in range(int(seconds))
    ]
    middle = seconds / 2
    waves = [
        WaveRecord(0.0, middle, requests=20, min_context=400, max_context=640, engine_s=6.0),
        WaveRecord(middle, seconds, requests=8, min_context=90, max_context=300, engine_s=1.0),
    ]
    fields: dict[str, Any] = {
        "start_time": start_time,
        "seconds": seconds,
        "outcome": "finished",
        "about": about,
        "samples": samples,
        "waves": waves,
        "merged": 1,
    }
    return RunRecord(**{**fields, **values})


def data_of(
    rows: list[dict[str, Any]], runs: list[RunRecord] | None = None, price: float | None = None
) -> ReportData:
    """The data of a report; of one run if `runs` is not given."""
    return ReportData(
        output="s3://archive/out",
        table=to_table(rows, RESULT_SCHEMA),
        runs=[run_of()] if runs is None else runs,
        total_rows=len(rows),
        total_errors=sum(row["status"] == "error" for row in rows),
        summary={},
        price_per_hour=price,
    )


def hostile_data() -> ReportData:
    """Data for every plot and table, with hostile text wherever a row or a record holds text."""
    hostile = {
        "video_uri": f"s3://archive/{HOSTILE}",
        "prompt": HOSTILE,
        "text": HOSTILE,
        "draft": HOSTILE_NAME,
    }
    rows = [row(n, num_visual_tokens=100 * 2 ** (n % 5)) for n in range(20)]
    rows += [
        row(n, draft="dense", proposed=0, accepted=0, rounds=60, decode_s=0.9)
        for n in range(20, 24)
    ]
    rows += [row(24, **hostile), row(25, status="truncated", **hostile)]
    rows += [
        failed(26, HOSTILE_NAME, HOSTILE, video_uri=HOSTILE, prompt=HOSTILE),
        failed(27, "empty_file"),
    ]
    about = {
        "model": HOSTILE,
        "draft": HOSTILE,
        "engines": 1,
        "device": HOSTILE,
        "max_bytes_in_flight": 2e6,
    }
    return data_of(rows, [run_of(about=about, outcome=HOSTILE)], price=4.2)
