"""Planned requests and rows as a run under way produces them."""

from __future__ import annotations

from typing import Any

from pipeline.records import FramePlan, InputRow, PlannedRequest, VideoInfo

INFO = VideoInfo(
    "v.mp4",
    size_bytes=1,
    version="1",
    container="mp4",
    codec="h264",
    duration=1.0,
    start=0.0,
    frames=8,
    exact=True,
    fps=8.0,
    height=64,
    width=64,
    rotation=0,
)
PLAN = FramePlan((0.0,), height=64, width=64, fps=1.0, tokens=16)


def planned(request_id: str, context: int = 100) -> PlannedRequest:
    """A request with a context of so many tokens."""
    return PlannedRequest(
        request_id,
        input_row=InputRow("v.mp4", "what?"),
        info=INFO,
        frame_plan=PLAN,
        context=context,
    )


def row(request_id: str, **values: Any) -> dict[str, Any]:
    """A row with a text: 30 tokens, 0.8 s in the engine, 20 of 50 drafted tokens accepted."""
    return {
        "request_id": request_id,
        "status": "success",
        "error_code": None,
        "num_generated_tokens": 30,
        "rounds": 10,
        "proposed": 50,
        "accepted": 20,
        "vision_s": 0.1,
        "prefill_s": 0.2,
        "decode_s": 0.5,
        **values,
    }


def failed(request_id: str, code: str) -> dict[str, Any]:
    """An error row."""
    return {
        "request_id": request_id,
        "status": "error",
        "error_code": code,
        "error_message": "it failed",
    }
