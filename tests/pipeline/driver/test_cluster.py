"""The driver on a real Ray cluster, with stubs for engines and decoders."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import cloudpickle

from jobs.suites.shared.stubs import FixedWaves, decode_stub_video, load_stub_engine, stub_request
from pipeline.config import Job
from pipeline.driver.cluster import drive
from pipeline.driver.state import DEFAULT_LIMITS
from pipeline.records import (
    CompletedRequest,
    FramePlan,
    Frames,
    PlannedRequest,
    RequestError,
    RunError,
    RunSnapshot,
    VideoInfo,
    Wave,
)
from pipeline.video.frames import Limits
from std_core.types import Draft

pytestmark = pytest.mark.usefixtures("ray_cluster", "pickled_by_value")


@pytest.fixture(scope="module")
def pickled_by_value() -> None:
    """Ray's processes cannot import this module, so its functions are pickled by value."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Run:
    """Calls `drive` and records what it calls back."""

    def __init__(self, requests: list[PlannedRequest], slots: int, **options: Any):
        self.completed: list[CompletedRequest] = []
        self.snapshots: list[RunSnapshot] = []
        self.job = Job(max_num_seqs=slots, **options)
        self.requests = requests

    def go(
        self, load: Any = load_stub_engine, decode: Any = decode_stub_video, waves: Any = None
    ) -> Run:
        self.waves = waves or FixedWaves(self.requests, self.job.max_num_seqs)
        self.decoded_videos = drive(
            self.job,
            self.waves,
            max_model_len=4096,
            on_completed=self.completed.append,
            observer=self,
            load=load,
            decode=decode,
        )
        return self

    def attach_metrics(self, instruments: Any, **facts: Any) -> None:
        """See `RunObserver`."""

    def update(self, snapshot: RunSnapshot) -> None:
        """See `RunObserver`."""
        self.snapshots.append(snapshot)

    @property
    def each_once(self) -> bool:
        """Whether every request was completed exactly once."""
        completed = sorted(one.request.request_id for one in self.completed)
        return completed == sorted(request.request_id for request in self.requests)

    @property
    def errors(self) -> dict[str, str]:
        """Error codes by prompt."""
        return {
            one.request.input_row.prompt: one.result.error.code
            for one in self.completed
            if one.result.error
        }

    @property
    def attempts(self) -> dict[str, int]:
        """Attempts by prompt."""
        return {one.request.input_row.prompt: one.attempts for one in self.completed}

    @property
    def deaths(self) -> int:
        return self.snapshots[-1].deaths


def test_two_engines_share_the_work_and_bytes_stay_bounded() -> None:
    requests = [stub_request(i, video=f"/stub/{i // 3}.mp4") for i in range(60)]
    bound = 4 * 4 * 56 * 56 * 3
    run = Run(requests, 2, concurrency=2, max_bytes_in_flight=bound)
    run.go(partial(load_stub_engine, seconds=0.05))
    assert run.each_once and not run.errors and run.deaths == 0 and run.decoded_videos == 20
    assert len({one.result.text.split()[-1] for one in run.completed}) == 2
    assert bound / 2 < run.snapshots[-1].peak_frame_bytes <= bound
    in_engines = max(snapshot.in_engine for snapshot in run.snapshots)
    assert in_engines <= 2 * DEFAULT_LIMITS.in_engine * 2
    assert {one.attempts for one in run.completed} == {1}


def test_only_the_request_that_kills_its_engine_is_blamed() -> None:
    slots = 2
    run = Run([stub_request(i, "kill" if i == 5 else "?") for i in range(12)], slots).go()
    assert run.each_once and run.errors == {"kill": "worker_killed"}
    assert run.deaths <= 4 + math.ceil(math.log2(slots))
    repeated = {one.request.input_row.prompt for one in run.completed if one.attempts > 1}
    assert repeated == {"kill", "?"}


def test_only_the_request_that_hangs_its_engine_is_blamed() -> None:
    requests = [stub_request(0), stub_request(1, "hang")]
    run = Run(requests, 1, engine_timeout=5.0).go()
    assert run.each_once and run.errors == {"hang": "engine_timeout"}
    assert run.deaths <= 4


def test_out_of_memory_halves_the_slots_and_blames_no_request() -> None:
    run = Run([stub_request(i) for i in range(16)], 4).go(partial(load_stub_engine, memory=3))
    assert run.each_once and not run.errors and run.deaths == 1
    assert run.snapshots[-1].suspects == 0


def crashing_decode(
    uri: str, info: VideoInfo, plan: FramePlan, limits: Limits, folder: str, crashes: dict[str, int]
) -> Frames:
    """Kill the process in the first attempts at a video.

    Args:
        folder: where attempts are counted, as the size of a file per video.
        crashes: attempts that crash, by the video's name.
    """
    counter = Path(folder) / Path(uri).name
    counter.touch()
    attempts_before = counter.stat().st_size
    counter.write_bytes(bytes(attempts_before + 1))
    if attempts_before < crashes.get(Path(uri).stem, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    return decode_stub_video(uri, info, plan, limits)


def test_a_video_whose_decoder_is_killed_is_decoded_again_a_limited_number_of_times(
    tmp_path: Path,
) -> None:
    decode = partial(crashing_decode, folder=str(tmp_path), crashes={"1": 1, "2": 9})
    run = Run([stub_request(i, str(i)) for i in range(4)], 2).go(decode=decode)
    assert run.each_once and run.errors == {"2": "decode_crashed"}
    assert run.attempts == {"0": 1, "1": 1, "2": 3, "3": 1}


def endless_decode(uri: str, info: VideoInfo, plan: FramePlan, limits: Limits) -> Frames:
    time.sleep(600)
    return Frames(
        np.empty((0, 0, 0, 3), np.uint8), pts=(), fps=1.0, frames_lost=0, rotation=0, decoder="none"
    )


def test_the_message_of_a_stall_names_the_stage_and_what_it_waits_for() -> None:
    message = r"nothing made progress for 6 s: 1 videos .*decode.*free in the cluster.*CPU"
    with pytest.raises(RunError, match=message):
        Run([stub_request(0)], 1, stall_timeout=6.0).go(decode=endless_decode)
    assert Run([stub_request(0)], 1).go().each_once  # the stalled task has left its CPU


def failing_load(path: str, **settings: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_engines_that_never_start_end_the_run() -> None:
    with pytest.raises(RunError, match=r"while it started, 3 times in a row; .*resumes"):
        Run([stub_request(0)], 1).go(failing_load)


def test_an_exception_of_the_caller_ends_the_run() -> None:
    def refuse(completed: CompletedRequest) -> None:
        raise RequestError("storage_error", "/out: No space left on device")

    with pytest.raises(RequestError, match="No space"):
        drive(
            Job(max_num_seqs=1),
            FixedWaves([stub_request(0)], 1),
            max_model_len=4096,
            on_completed=refuse,
            observer=Run([], 1),
            load=load_stub_engine,
            decode=decode_stub_video,
        )


def test_every_wave_runs_with_its_own_draft_and_slots() -> None:
    """The stub's texts name γ and the slots with which it ran."""
    requests = [stub_request(i, video=f"/stub/{i // 2}.mp4") for i in range(24)]
    configs = [(None, 2), (Draft("std", gamma=3), 2), (Draft("std", gamma=3), 1), (None, 2)]
    every = [
        Wave(tuple(requests[6 * number : 6 * number + 6]), slots, draft)
        for number, (draft, slots) in enumerate(configs)
    ]
    waves = FixedWaves([], 1)
    waves.waves.extend(every)
    run = Run(requests, 2).go(waves=waves)
    assert run.each_once and not run.errors
    for wave in every:
        ids = {request.request_id for request in wave.requests}
        ran = {
            (one.draft, one.result.text.split()[1])
            for one in run.completed
            if one.request.request_id in ids
        }
        gamma = wave.draft.gamma if wave.draft else 0
        assert ran == {(wave.draft, f"{gamma}×{wave.max_num_seqs}")}
    assert [len(results) for _, results in waves.completed] == [6, 6, 6, 6]
