"""Requests and device profiles of the planner's tests."""

from __future__ import annotations

from pipeline.records import FramePlan, InputRow, PlannedRequest, VideoInfo
from std_core.cost_model.acceptance import AcceptanceCounts
from std_core.cost_model.model_size import ModelSize
from std_core.cost_model.profile import (
    CalibratedDraft,
    Device,
    DraftSetupLatency,
    LatencyModel,
    PrefillLatency,
    Profile,
)
from std_core.types import Draft

LLAMA = ModelSize(
    32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=128256,
    parameters=8_030_000_000,
)
A100 = Device("A100", kind="cuda", bandwidth=2e12, memory=80e9, flops=312e12)
FLAT = LatencyModel(1.0, 1e-3)
GOOD = (AcceptanceCounts(4096, "caption", (90,), (10,)),)
STD = CalibratedDraft(Draft("std"), FLAT, DraftSetupLatency(), GOOD)
INT4 = CalibratedDraft(Draft("std", weights="int4"), FLAT, DraftSetupLatency(), GOOD)
BAD = CalibratedDraft(
    Draft("random"), FLAT, DraftSetupLatency(), (AcceptanceCounts(4096, "caption", (1,), (99,)),)
)
PROFILE = Profile(
    A100,
    model="m",
    dtype="bfloat16",
    model_size=LLAMA,
    latency=FLAT,
    prefill=PrefillLatency(0.0, 1e-4, 0.0),
    vision_s_per_token=1e-5,
    drafts=(STD, INT4, BAD),
)


def planned_request(
    number: int,
    video: int,
    context: int,
    visual: int | None = None,
    frames: int = 1,
    duration: float = 1.0,
) -> PlannedRequest:
    """A caption of a video.

    Args:
        number: becomes the request id.
        visual: of the context's tokens; all if not given.
        frames: planned ones.
        duration: of the video, in seconds.
    """
    uri = f"v{video}.mp4"
    info = VideoInfo(
        uri,
        size_bytes=1,
        version="1",
        container="mp4",
        codec="h264",
        duration=duration,
        start=0.0,
        frames=8,
        exact=True,
        fps=8.0,
        height=56,
        width=56,
        rotation=0,
    )
    tokens = context if visual is None else visual
    return PlannedRequest(
        str(number),
        input_row=InputRow(uri, "Describe."),
        info=info,
        frame_plan=FramePlan(
            tuple(map(float, range(frames))), height=56, width=56, fps=1.0, tokens=tokens
        ),
        context=context,
    )
