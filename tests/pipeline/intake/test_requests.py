from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import pytest

from jobs.demo_model import model, world
from pipeline.config import Job
from pipeline.intake import requests
from pipeline.intake.requests import (
    FIRST_BATCH,
    MAX_BATCH,
    RequestStream,
    plan_in_batches,
    plan_requests,
    probe_all,
    resolve_max_model_len,
)
from pipeline.job import main
from pipeline.records import (
    FailedRequest,
    FrameOptions,
    InputRow,
    PendingRequest,
    PlannedRequest,
    RequestError,
    UsageError,
    VideoInfo,
)
from std_core.model.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("model")
    words = model.tokenizer()
    model.build("demo", words).config.save_pretrained(folder)
    model.processor(words).save_pretrained(folder)
    return Checkpoint.load(str(folder))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    path.write_bytes(world.make_clip(0, 2)[1])
    return str(path)


def test_a_model_without_video_support_is_a_usage_error(
    families: Callable[[str], Path], clip: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--input", clip, "--output", str(tmp_path / "out"), "--model", str(families("llama"))]
    for extra in ([], ["--dry-run"]):
        assert main([*argv, *extra], "caption_archive.py") == 2
        assert capsys.readouterr().err.splitlines()[-1].endswith("is a llama, which takes no video")
    assert not (tmp_path / "out").exists()


def ids(items: list[InputRow], job: Job, done: frozenset[bytes] = frozenset()) -> list[str]:
    return [p.request_id for p in RequestStream(items, job, "r", set()).pending(done)]


def test_ids_depend_on_settings_that_change_the_text_only(clip: str) -> None:
    items = [
        InputRow(clip, "a"),
        InputRow(clip, "b"),
        InputRow(clip, "a", occurrence=1),
        InputRow("/nowhere.mp4", "a"),
    ]
    names = ids(items, Job())
    assert len(set(names)) == 4
    assert (
        ids(items, Job(draft="random", mode="dense", gamma=2, max_num_seqs=1, rows_per_part=3))
        == names
    )
    for other in (
        Job(max_model_len=512),
        Job(max_tokens=7),
        Job(dtype="bfloat16"),
        Job(frames=FrameOptions(fps=1.0)),
    ):
        assert not set(ids(items, other)) & set(names)


def test_requests_with_a_row_are_left_out_and_equal_ids_are_one_request(clip: str) -> None:
    items = [
        InputRow(clip, "a", given_id="7"),
        InputRow(clip, "b"),
        InputRow(clip, "a", given_id="7"),
    ]
    names = ids(items, Job())
    assert len(names) == 2
    requests = RequestStream(items, Job(), "r", set())
    assert [p.request_id for p in requests.pending({bytes.fromhex(names[0])})] == names[1:]
    assert requests.ids == {bytes.fromhex(name) for name in names}


def test_the_context_is_prompt_plus_visual_tokens(clip: str, checkpoint: Checkpoint) -> None:
    pool = [PendingRequest("1", InputRow(clip, "Describe this video."))]
    [planned] = plan_requests(pool, Job(), checkpoint)
    assert isinstance(planned, PlannedRequest)
    assert planned.context == planned.frame_plan.tokens + checkpoint.count_prompt_tokens(
        "Describe this video."
    )
    [too_long] = plan_requests(pool, Job(max_model_len=planned.context), checkpoint)
    assert isinstance(too_long, FailedRequest)
    assert too_long.error.code == "context_too_long"
    assert too_long.info == planned.info
    assert isinstance(
        next(plan_requests(pool, Job(max_model_len=planned.context + 1), checkpoint)),
        PlannedRequest,
    )


def test_every_request_is_planned_or_failed(clip: str, checkpoint: Checkpoint) -> None:
    items = [
        InputRow(clip, "a"),
        InputRow("", "a"),
        InputRow(clip, ""),
        InputRow("/nowhere.mp4", "a"),
        InputRow(clip, "b"),
    ]
    pool = [PendingRequest(str(i), item) for i, item in enumerate(items)]
    [batch] = plan_in_batches(pool, Job(), checkpoint)
    assert [one.request_id for one in batch if isinstance(one, PlannedRequest)] == ["0", "4"]
    assert {
        one.pending.request_id: one.error.code for one in batch if isinstance(one, FailedRequest)
    } == {
        "1": "invalid_request",
        "2": "invalid_request",
        "3": "not_found",
    }


def test_max_model_len_is_limited_by_the_model(checkpoint: Checkpoint) -> None:
    assert resolve_max_model_len(Job(), checkpoint) == checkpoint.max_model_len
    with pytest.raises(UsageError, match="--max-model-len"):
        resolve_max_model_len(Job(max_model_len=checkpoint.max_model_len + 1), checkpoint)


def test_draft_settings_are_part_of_the_id_in_sparse_mode_only(tmp_path: Path) -> None:
    def ids(**settings: Any) -> set[str]:
        job = Job(input=str(tmp_path), **settings)
        items = [InputRow(str(tmp_path / "a.mp4"), "?")]
        return {p.request_id for p in RequestStream(items, job, "1", set()).pending(frozenset())}

    assert ids() == ids(draft="random") == ids(mode="dense") == ids(gamma=2)
    sparse = ids(mode="sparse")
    assert sparse != ids() and sparse == ids(mode="sparse", gamma=2)
    assert sparse != ids(mode="sparse", keep=0.5)
    assert sparse != ids(mode="sparse", draft="teal")


LONG_CLAIM = VideoInfo(
    uri="/v.mkv",
    size_bytes=7600,
    version="1",
    container="mkv",
    codec="h264",
    duration=99_999_999 * 3600.0,
    start=0.0,
    frames=100,
    exact=False,
    fps=1e-9,
    height=240,
    width=320,
    rotation=0,
)


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_video_that_claims_too_many_windows_is_a_row_a_prompt(
    prompts: int, clip: str, checkpoint: Checkpoint
) -> None:
    def probe(uris: Set[str]) -> Mapping[str, VideoInfo | RequestError]:
        return {uri: LONG_CLAIM if uri.endswith(".mkv") else probe_all({uri})[uri] for uri in uris}

    items = [
        InputRow(video, f"{number}?") for video in ("/v.mkv", clip) for number in range(prompts)
    ]
    job = Job(window_seconds=1.0)
    stream = RequestStream(items, job, "r", set(), probe)
    batches = list(plan_in_batches(stream.pending(frozenset()), job, checkpoint, probe))
    found = [one for batch in batches for one in batch]
    failed = [one for one in found if isinstance(one, FailedRequest)]
    assert [one.error.code for one in failed] == ["too_large"] * prompts
    assert {one.pending.input_row.video_uri for one in failed} == {"/v.mkv"}
    assert len(found) > 2 * prompts  # the good video's windows follow


@pytest.mark.parametrize("error", [MemoryError(), OverflowError("too\nlong"), RuntimeError("?")])
@pytest.mark.parametrize("place", ["probe", "windows", "plan", "prompt"])
def test_an_exception_of_one_video_is_its_row(
    place: str,
    error: Exception,
    clip: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever raises in the survey because of one video or prompt: the others go on."""
    bad = str(shutil.copy(clip, tmp_path / "bad.mp4"))

    def raising(work: Callable[..., Any], belongs: Callable[..., bool]) -> Callable[..., Any]:
        def work_or_raise(*args: Any) -> Any:
            if belongs(*args):
                raise error
            return work(*args)

        return work_or_raise

    name, work, belongs = {
        "probe": ("probe", requests.probe, lambda uri: uri == bad),
        "windows": ("split_into_windows", requests.split_into_windows, lambda i, *_: i.uri == bad),
        "plan": ("plan_frames", requests.plan_frames, lambda info, *_: info.uri == bad),
        "prompt": ("count_prompt_tokens", checkpoint.count_prompt_tokens, lambda p, *_: p == "bad"),
    }[place]
    target = checkpoint if place == "prompt" else requests
    monkeypatch.setattr(target, name, raising(work, belongs))
    items = [InputRow(clip, "a"), InputRow(bad, "bad"), InputRow(clip, "b")]
    job = Job(window_seconds=1000.0)
    pending = RequestStream(items, job, "r", set()).pending(frozenset())
    first, failed, last = (
        one for batch in plan_in_batches(pending, job, checkpoint) for one in batch
    )
    assert isinstance(first, PlannedRequest) and isinstance(last, PlannedRequest)
    assert isinstance(failed, FailedRequest) and failed.error.code == "invalid_request"
    assert type(error).__name__ in failed.error.message and "\n" not in failed.error.message


def test_batches_start_small_and_are_bounded(clip: str, checkpoint: Checkpoint) -> None:
    taken = 0

    def pending() -> Iterator[PendingRequest]:
        nonlocal taken
        for taken in range(1, 3001):
            yield PendingRequest(str(taken), InputRow(clip, "a"))

    batches = plan_in_batches(pending(), Job(), checkpoint)
    sizes = [len(next(batches))]
    assert taken == sizes[0] == FIRST_BATCH
    sizes += [len(batch) for batch in batches]
    assert sum(sizes) == 3000 and max(sizes) <= MAX_BATCH


def test_memory_per_request_is_bounded(tmp_path: Path) -> None:
    """An id is 16 bytes; with Python's overhead a request may keep less than 180."""
    count = 4000
    items = (InputRow(str(tmp_path / "none.mp4"), f"question {i}") for i in range(count))
    requests = RequestStream(items, Job(), "r", set())
    tracemalloc.start()
    for _ in requests.pending(frozenset()):
        pass
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(requests.ids) == count
    assert kept / count < 180
