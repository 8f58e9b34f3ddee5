"""The driver, with real actors and tasks, around engines and decoders that compute nothing."""

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
from pipeline.driver import replica as replica_module
from pipeline.driver.cluster import drive
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

pytestmark = pytest.mark.usefixtures("ray_cluster", "by_value")


@pytest.fixture(scope="module")
def by_value() -> None:
    """Functions of this module travel whole: Ray's processes cannot import it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Seen:
    """What a drive handed on."""

    def __init__(self, requests: list[PlannedRequest], slots: int, **settings: Any):
        self.rows: list[CompletedRequest] = []
        self.snapshots: list[RunSnapshot] = []
        self.job = Job(max_num_seqs=slots, **settings)
        self.requests = requests

    def drive(
        self, load: Any = load_stub_engine, decode: Any = decode_stub_video, waves: Any = None
    ) -> Seen:
        self.waves = waves or FixedWaves(self.requests, self.job.max_num_seqs)
        self.decoded = drive(
            self.job,
            self.waves,
            max_model_len=4096,
            on_answer=self.rows.append,
            observer=self,
            load=load,
            decode=decode,
        )
        return self

    def attach_metrics(self, instruments: Any, **where: Any) -> None:
        self.where = where

    def update(self, snapshot: RunSnapshot) -> None:
        self.snapshots.append(snapshot)

    def once(self) -> bool:
        return sorted(a.request.request_id for a in self.rows) == sorted(
            r.request_id for r in self.requests
        )

    @property
    def errors(self) -> dict[str, str]:
        """Prompt → code."""
        return {
            a.request.input_row.prompt: a.result.error.code for a in self.rows if a.result.error
        }

    @property
    def deaths(self) -> int:
        return self.snapshots[-1].deaths


def test_two_engines_share_the_work_and_bytes_stay_bounded() -> None:
    requests = [stub_request(i, video=f"/stub/{i // 3}.mp4") for i in range(60)]
    bound = 4 * 4 * 56 * 56 * 3
    seen = Seen(requests, 2, concurrency=2, max_bytes_in_flight=bound).drive(
        partial(load_stub_engine, seconds=0.05)
    )
    assert seen.once() and not seen.errors and seen.deaths == 0 and seen.decoded == 20
    assert len({a.result.text.split()[-1] for a in seen.rows}) == 2
    assert bound / 2 < seen.snapshots[-1].peak_frame_bytes <= bound
    assert max(s.in_engine for s in seen.snapshots) <= 2 * replica_module.HELD * 2
    assert {a.attempts for a in seen.rows} == {1}


def test_a_request_that_kills_its_engine_is_blamed_and_nobody_else() -> None:
    slots = 2
    seen = Seen([stub_request(i, "kill" if i == 5 else "?") for i in range(12)], slots).drive()
    assert seen.once() and seen.errors == {"kill": "worker_killed"}
    assert seen.deaths <= 4 + math.ceil(math.log2(slots))
    assert all(a.attempts > 1 for a in seen.rows if a.request.input_row.prompt == "kill")
    assert any(a.attempts > 1 for a in seen.rows if a.request.input_row.prompt == "?")


def test_a_request_that_hangs_its_engine_is_blamed_and_nobody_else() -> None:
    requests = [stub_request(0), stub_request(1, "hang")]
    seen = Seen(requests, 1, engine_timeout=5.0).drive()
    assert seen.once() and seen.errors == {"hang": "engine_timeout"}
    assert seen.deaths <= 4


def test_a_full_memory_halves_the_slots_and_blames_nobody() -> None:
    seen = Seen([stub_request(i) for i in range(16)], 4).drive(partial(load_stub_engine, memory=3))
    assert seen.once() and not seen.errors and seen.deaths == 1
    assert seen.snapshots[-1].suspects == 0


def crashing_decode(
    uri: str, info: VideoInfo, plan: FramePlan, limits: Limits, folder: str, times: dict[str, int]
) -> Frames:
    """Kills its process the first times that it is given a video."""
    tried = Path(folder) / Path(uri).name
    tried.touch()
    count = tried.stat().st_size
    tried.write_bytes(bytes(count + 1))
    if count < times.get(Path(uri).stem, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    return decode_stub_video(uri, info, plan, limits)


def test_a_video_whose_decoder_was_killed_is_decoded_again_but_not_for_ever(tmp_path: Path) -> None:
    decode = partial(crashing_decode, folder=str(tmp_path), times={"1": 1, "2": 9})
    seen = Seen([stub_request(i, str(i)) for i in range(4)], 2).drive(decode=decode)
    assert seen.once() and seen.errors == {"2": "decode_crashed"}
    assert {a.request.input_row.prompt: a.attempts for a in seen.rows} == {
        "0": 1,
        "1": 1,
        "2": 3,
        "3": 1,
    }


def endless_decode(uri: str, info: VideoInfo, plan: FramePlan, limits: Limits) -> Frames:
    time.sleep(600)
    return Frames(
        np.empty((0, 0, 0, 3), np.uint8), pts=(), fps=1.0, frames_lost=0, rotation=0, decoder="none"
    )


def test_a_stall_names_the_stage_and_what_it_waits_for() -> None:
    with pytest.raises(
        RunError, match=r"nothing has moved for 6 s: 1 videos .*decode.*free in the cluster.*CPU"
    ):
        Seen([stub_request(0)], 1, stall_timeout=6.0).drive(decode=endless_decode)
    assert Seen([stub_request(0)], 1).drive().once()  # what stalled has left its CPU


def failing_load(path: str, **settings: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_engines_that_never_start_end_the_run() -> None:
    with pytest.raises(RunError, match=r"while it started, 3 times in a row; .*resumes"):
        Seen([stub_request(0)], 1).drive(failing_load)


def test_a_refused_row_ends_the_run_and_leaves_nothing_running() -> None:
    def refuse(answer: CompletedRequest) -> None:
        raise RequestError("storage_error", "/out: No space left on device")

    waves = FixedWaves([stub_request(0)], 1)
    observer = Seen([], 1)
    with pytest.raises(RequestError, match="No space"):
        drive(
            Job(max_num_seqs=1),
            waves,
            max_model_len=4096,
            on_answer=refuse,
            observer=observer,
            load=load_stub_engine,
            decode=decode_stub_video,
        )


def test_every_wave_runs_with_its_own_draft_and_slots_and_none_is_left_out() -> None:
    """A draft of γ tokens: the stub answers with what it was told to run with."""
    requests = [stub_request(i, video=f"/stub/{i // 2}.mp4") for i in range(24)]
    setups = [(None, 2), (Draft("std", gamma=3), 2), (Draft("std", gamma=3), 1), (None, 2)]
    waves = FixedWaves([], 1)
    every = [
        Wave(tuple(requests[6 * i : 6 * i + 6]), slots, draft)
        for i, (draft, slots) in enumerate(setups)
    ]
    waves.waves.extend(every)
    seen = Seen(requests, 2).drive(waves=waves)
    assert seen.once() and not seen.errors
    for wave in every:
        ids = {r.request_id for r in wave.requests}
        ran = {
            (a.draft, a.result.text.split()[1]) for a in seen.rows if a.request.request_id in ids
        }
        assert ran == {(wave.draft, f"{wave.draft.gamma if wave.draft else 0}×{wave.max_num_seqs}")}
    assert [len(results) for _, results in waves.answered] == [6, 6, 6, 6]
