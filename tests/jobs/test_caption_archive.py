from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest

from pipeline import job as job_module
from pipeline import read
from pipeline.config import ROOT, parse_job
from pipeline.intake.survey_process import InProcessSurvey
from pipeline.job import main, run_job
from pipeline.records import RunError

SCRIPT = ROOT / "jobs" / "caption_archive.py"
LONGER = ("--max-tokens=24",)


@pytest.fixture(scope="module")
def run(tiny_model: Path, ray_cluster: None) -> Any:
    """Runs a job in this process, on the tests' cluster, as a command line would."""

    def start(
        source: object, output: object, *words: str, prompt: str = "Describe this video."
    ) -> dict[str, Any]:
        flags = [
            "--input",
            str(source),
            "--output",
            str(output),
            "--model",
            str(tiny_model),
            "--max-tokens",
            "8",
        ]
        return run_job(parse_job([*flags, *words], "test"), prompt, survey=InProcessSurvey)

    return start


@pytest.fixture(scope="module")
def verified(run: Any, shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an undisturbed run over `shelf` that drafts; other runs' texts are compared
    with its."""
    output = tmp_path_factory.mktemp("verified") / "out"
    assert run(shelf, output, "--draft=std", *LONGER)["new"] == 6
    return output


def rows_of(output: object) -> dict[str, dict[str, Any]]:
    """File name → row."""
    return {Path(row["video_uri"]).name: row for row in read(str(output)).to_pylist()}


def texts_of(output: object) -> dict[tuple[str, str], str]:
    return {(row["video_uri"], row["prompt"]): row["text"] for row in read(str(output)).to_pylist()}


def test_bad_files_get_their_rows_and_the_others_captions(
    run: Any, archive: Path, tmp_path: Path
) -> None:
    clip = (archive / "good-2.mp4").read_bytes()
    (archive / "text.mp4").write_text("this is no video\n" * 100)
    (archive / "empty.mp4").write_bytes(b"")
    (archive / "cut.mp4").write_bytes(clip[: len(clip) // 2])
    summary = run(archive, tmp_path / "out", "--draft=std")
    rows = rows_of(tmp_path / "out")
    codes = {name: row["error_code"] for name, row in rows.items() if row["status"] == "error"}
    assert codes == {
        "text.mp4": "not_a_video",
        "empty.mp4": "empty_file",
        "cut.mp4": "truncated_file",
    }
    good = [row for name, row in rows.items() if name.startswith("good")]
    assert len(good) == 6
    assert all(
        row["text"] and row["status"] in ("success", "truncated") and not row["frames_lost"]
        for row in good
    )
    assert all(row["num_visual_tokens"] == row["planned_visual_tokens"] > 0 for row in good)
    assert all(len(row["frame_pts"]) >= 4 and row["draft"] == "std" for row in good)
    # γ, but for what lay behind a row's end
    assert all(0 < row["gamma"] <= 5 for row in good if row["rounds"]) and any(
        row["gamma"] == 5 for row in good
    )
    assert summary["requests"] == summary["new"] == 9
    assert summary["errors"] == 3
    assert summary["tokens"] == sum(row["num_generated_tokens"] for row in good)
    assert summary == json.loads((tmp_path / "out" / "_summary.json").read_text())
    a_second_run_does_what_is_missing(run, archive, tmp_path / "out", summary)


def a_second_run_does_what_is_missing(
    run: Any, archive: Path, output: Path, first: dict[str, Any]
) -> None:
    parts = sorted(output.glob("part-*.parquet"))
    second = run(archive, output)
    assert (first["videos_decoded"], second["videos_decoded"], second["new"]) == (6, 0, 0)
    assert (second["requests"], second["errors"], second["tokens"]) == (9, 3, first["tokens"])
    assert sorted(output.glob("part-*.parquet")) == parts
    (archive / "text.mp4").write_bytes((archive / "good-2.mp4").read_bytes())
    third = run(archive, output)
    assert (third["requests"], third["new"], third["errors"], third["videos_decoded"]) == (
        9,
        1,
        2,
        1,
    )


def test_a_video_is_decoded_once_for_all_its_prompts(
    run: Any, archive: Path, tmp_path: Path
) -> None:
    prompts = (
        "--prompt=Describe this video.",
        "--prompt=How many scenes are there?",
        "--prompt=a, b: {c}",
    )
    summary = run(archive, tmp_path / "out", *prompts, "--max-num-seqs", "2", "--limit", "17")
    assert (summary["requests"], summary["errors"], summary["videos_decoded"]) == (17, 0, 6)
    assert len(texts_of(tmp_path / "out")) == 17


def test_dense_and_std_write_the_same_with_memory_for_one_video_at_a_time(
    run: Any, shelf: Path, verified: Path, tmp_path: Path
) -> None:
    tight = ("--max-bytes-in-flight=1", "--rows-per-part=2")
    dense = run(shelf, tmp_path / "dense", "--mode=dense", *LONGER, *tight)
    assert texts_of(verified) == texts_of(tmp_path / "dense")
    assert (dense["requests"], dense["errors"], dense["kv_keep"]) == (6, 0, 1.0)
    assert {row["draft"] for row in read(str(tmp_path / "dense")).to_pylist()} == {"dense"}
    assert len(list((tmp_path / "dense").glob("part-*.parquet"))) >= 3


def test_a_pair_writes_what_its_larger_model_would(run: Any, archive: Path, tmp_path: Path) -> None:
    demo = ("--model=demo", "--max-tokens=48")
    pair = run(archive, tmp_path / "pair", *demo, "--draft=pair-demo")
    run(archive, tmp_path / "dense", *demo, "--mode=dense")
    assert texts_of(tmp_path / "pair") == texts_of(tmp_path / "dense")
    assert pair["errors"] == 0 and pair["accepted_per_round"] > 0 and pair["kv_keep"] < 1
    assert all(row["weight_keep"] < 0.35 for row in rows_of(tmp_path / "pair").values())


def test_unverified_texts_are_requests_of_their_own(
    run: Any, shelf: Path, verified: Path, tmp_path: Path
) -> None:
    words = ("--mode=sparse", "--draft=random", "--keep=0.05", *LONGER)
    output = tmp_path / "out"
    shutil.copytree(verified, output)
    assert run(shelf, output, *words)["new"] == 6
    both = read(str(output)).to_pylist()
    sparse = {(r["video_uri"], r["prompt"]): r["text"] for r in both if r["proposed"] == 0}
    known = texts_of(verified)
    assert len(both) == 12 and set(sparse) == set(known) and sparse != known
    assert run(shelf, output, *words)["new"] == 0


def test_failures_are_retried_on_demand(run: Any, archive: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    short = ("--max-model-len", "20")
    failed = run(archive, output, *short)
    assert (failed["requests"], failed["errors"], failed["videos_decoded"]) == (6, 6, 0)
    assert {row["error_code"] for row in rows_of(output).values()} == {"context_too_long"}
    again = run(archive, output, *short)
    assert (again["requests"], again["errors"], again["new"]) == (6, 6, 0)
    retried = run(archive, output, *short, "--retry-failed")
    assert (retried["requests"], retried["errors"], retried["new"]) == (6, 6, 6)
    assert read(str(output)).num_rows == 6
    # the window may change a text, so requests with another one are others
    longer = run(archive, output)
    assert (longer["requests"], longer["errors"], longer["new"]) == (6, 0, 6)
    assert read(str(output)).num_rows == 12


def test_from_a_bucket_into_a_bucket(run: Any, s3: Any, clips: list[bytes]) -> None:
    bucket = s3.bucket.removeprefix("s3://")
    for name, content in (
        ("dt=2025-01-01/a#1%20.mp4", clips[0]),
        ("b, c.mp4", clips[1]),
        ("d.mp4", b""),
    ):
        s3.client().put_object(Bucket=bucket, Key=f"in/{name}", Body=content)
    summary = run(f"{s3.bucket}/in", f"{s3.bucket}/out")
    assert (summary["requests"], summary["errors"], summary["videos_decoded"]) == (3, 1, 2)
    assert {name for name, row in rows_of(f"{s3.bucket}/out").items() if row["text"]} == {
        "a#1%20.mp4",
        "b, c.mp4",
    }
    assert run(f"{s3.bucket}/in", f"{s3.bucket}/out")["new"] == 0


def test_engines_that_are_killed_are_replaced_and_change_no_text(
    run: Any, shelf: Path, verified: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = job_module._Recorder.completed
    rows = []

    def kill_now_and_then(self: Any, *row: Any) -> None:
        answered(self, *row)
        rows.append(row)
        if len(rows) in (1, 3):
            for process in engines():
                os.kill(process, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(job_module._Recorder, "completed", kill_now_and_then)
        summary = run(shelf, tmp_path / "out", "--max-num-seqs=1", *LONGER)
    assert (summary["requests"], summary["new"], summary["errors"]) == (6, 6, 0)
    assert texts_of(tmp_path / "out") == texts_of(verified)
    assert max(row["attempts"] for row in rows_of(tmp_path / "out").values()) >= 2


def engines() -> list[int]:
    """Process ids of the engines that descend from this process."""
    parents = {}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it ended meanwhile
        parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
        if b"ray::EngineActor" in command:
            found.append(int(folder.name))

    def ours(process: int) -> bool:
        return process == os.getpid() or (process in parents and ours(parents[process]))

    return [process for process in found if ours(process)]


def test_a_model_without_weights_ends_the_run_in_one_sentence(
    run: Any, archive: Path, tmp_path: Path, tiny_model: Path
) -> None:
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (hollow / file.name).write_bytes(file.read_bytes())
    with pytest.raises(RunError, match="could not start") as caught:
        run(archive, tmp_path / "out", "--model", str(hollow))
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ as a user's process, on its own


def command(tiny_model: Path, source: Path, output: Path, *words: str) -> list[str]:
    flags = ["--input", str(source), "--output", str(output), "--model", str(tiny_model), *words]
    return [sys.executable, str(SCRIPT), *flags]


SLOW = (
    "--max-tokens",
    "64",
    "--max-num-seqs",
    "1",
    "--prompt",
    "a",
    "--prompt",
    "b",
    "--prompt",
    "c",
    "--prompt",
    "d",
)


def test_killed_half_way_and_run_again_every_request_has_one_row(
    ray_cluster: None,
    tiny_model: Path,
    archive: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first time in a process of its own; the second one in this process, on the tests'
    cluster."""
    output = tmp_path / "out"
    words = command(tiny_model, archive, output, *SLOW, "--rows-per-part", "1")
    driver = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(list(output.glob("_ledger/*.json"))) < 3:
        assert driver.poll() is None
        time.sleep(0.02)
    driver.kill()
    driver.wait()
    begun = read(str(output)).num_rows
    assert 3 <= begun < 24
    assert main([*words[2:], "--max-num-seqs", "8"], SCRIPT.name, survey=InProcessSurvey) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["requests"], summary["errors"], summary["new"]) == (24, 0, 24 - begun)
    ids = read(str(output))["request_id"].to_pylist()
    assert len(ids) == len(set(ids)) == 24
    assert pyarrow.dataset.dataset(sorted(output.glob("part-*.parquet"))).count_rows() == 24


def test_stopped_by_a_signal_it_keeps_what_is_finished(
    tiny_model: Path, archive: Path, tmp_path: Path
) -> None:
    words = command(tiny_model, archive, tmp_path / "out", *SLOW, "--max-tokens=256")
    driver = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert driver.stderr is not None
    for line in driver.stderr:
        if re.search(r"\b[1-9]\d* answered", line):
            break
    driver.send_signal(signal.SIGTERM)
    last = driver.stderr.read().strip().splitlines()[-1]
    assert driver.wait() == 1
    assert re.fullmatch(r"caption_archive.py: stopped by SIGTERM; .*resumes", last)
    assert 1 <= read(str(tmp_path / "out")).num_rows < 24


WRONG = {
    "unknown flag": (["--inptu", "x"], "--inptu"),
    "wrong type": (["--input", "{videos}", "--max-tokens", "many"], "many"),
    "no input": (["--output", "{out}"], "--input is missing"),
    "no output": (["--input", "{videos}"], "--output is missing"),
    "missing input": (["--input", "{tmp}/nowhere", "--output", "{out}"], "nowhere"),
    "empty folder": (["--input", "{tmp}/void", "--output", "{out}"], "void"),
    "unknown model": (["--input", "{videos}", "--output", "{out}", "--model", "dmeo"], "dmeo"),
    "unknown draft": (["--input", "{videos}", "--output", "{out}", "--draft", "sdt"], "std"),
    "no draft's share": (["--input", "{videos}", "--output", "{out}", "--keep", "2"], "keep"),
    "foreign output": (["--input", "{videos}", "--output", "{tmp}/foreign"], "foreign"),
    "window": (
        ["--input", "{videos}", "--output", "{out}", "--max-model-len", "99999999"],
        "--max-model-len",
    ),
    "prompts": (
        ["--input", "{videos}", "--output", "{out}", "--prompts", "{tmp}/none.txt"],
        "none.txt",
    ),
}
PROBE = """
import json, sys
from pipeline.job import main
from pipeline.intake.survey_process import InProcessSurvey
for words in json.load(sys.stdin):
    print("code", main(words, "test", survey=InProcessSurvey), "ray" in sys.modules, flush=True)
    print("end", file=sys.stderr, flush=True)
"""


def test_what_is_wrong_is_said_in_one_sentence_before_ray_starts(
    tiny_model: Path, archive: Path, tmp_path: Path
) -> None:
    (tmp_path / "void").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "part-0.parquet").write_bytes(b"somebody's")
    places = {"videos": archive, "out": tmp_path / "out", "tmp": tmp_path}
    lines = []
    for words, _ in WRONG.values():
        model = [] if "--model" in words else ["--model", str(tiny_model)]
        lines.append([word.format(**places) for word in words] + model)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", PROBE]
    done = subprocess.run(
        words, input=json.dumps(lines), capture_output=True, text=True, env=environment
    )
    assert done.stdout.splitlines() == ["code 2 False"] * len(WRONG), done.stderr
    for said, (name, (_, named)) in zip(done.stderr.split("end\n"), WRONG.items(), strict=False):
        assert len(said.splitlines()) == 1, (name, said)
        assert said.startswith("test: ")
        assert named in said, (name, said)
    assert not (tmp_path / "out").exists()
