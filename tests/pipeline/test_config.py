from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import config
from pipeline.command_line import field_names, hyphened
from pipeline.config import Job, draft_of, model_path, parse_job, presets
from pipeline.records import FrameOptions, UsageError
from std_core.types import Sampling

AWKWARD = [
    "dt=2025-01-01/",
    "*.{mp4,mov}",
    "a#1%20.mp4",
    "a, b: c",
    "{a: 1}",
    "[1, 2]",
    "123",
    "1e3",
    "null",
    "true",
    "~",
    "- x",
    "-5",
    "'quoted'",
    '"quoted"',
    "@file",
    "2025-01-01",
    "",
    "two\nlines",
    "a=b",
    "--a b",
    "&anchor",
    "!!str x",
    "é 視",
]


def parse(*words: str, **kwargs: object) -> Job:
    return parse_job(["--input", "x", *words], "test", **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [v for v in AWKWARD if v])
def test_flag_values_arrive_verbatim(value: str) -> None:
    assert parse_job(["--input", value], "test").input == value
    assert parse_job([f"--input={value}"], "test").input == value
    assert parse("--prompt", value, "--prompt", value).prompt == (value, value)


@settings(deadline=None, max_examples=50)
@given(st.text(min_size=1))
def test_any_prompt_arrives_verbatim(value: str) -> None:
    assert parse(f"--prompt={value}").prompt == (value,)


@pytest.mark.parametrize("value", AWKWARD)
def test_yaml_values_arrive_verbatim(value: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        yaml.safe_dump(
            {"input": "x", "prompt": [value or "?"], "video-column": value}, allow_unicode=True
        )
    )
    job = parse_job(["--config", str(file)], "test")
    assert (job.prompt, job.video_column) == ((value or "?",), value)


def test_plain_yaml_scalars_stay_text(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "input: 2025-01-01\nprompt: [5, true, null]\nmax_tokens: 7\nk: 3\ndry-run: true\nfps: 1\n"
    )
    job = parse_job(["--config", str(file)], "test")
    assert (job.input, job.prompt) == ("2025-01-01", ("5", "true", "null"))
    assert (job.max_tokens, job.k, job.dry_run) == (7, 3, True)
    assert job.frames == FrameOptions(fps=1.0)


def test_flags_outrank_the_file_and_the_file_the_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "CONF", tmp_path / "conf")
    (tmp_path / "conf/model").mkdir(parents=True)
    preset = "model: some/big\ndtype: bfloat16\nmax-model-len: 100\nmax-tokens: 3\n"
    (tmp_path / "conf/model/big.yaml").write_text(preset)
    file = tmp_path / "job.yaml"
    file.write_text("input: x\nmodel: big\nprompt: from file\nmax-model-len: 200\nmax-tokens: 4\n")
    job = parse_job(["--config", str(file), "--prompt", "from flag", "--max-tokens", "5"], "test")
    assert (job.dtype, job.max_model_len, job.max_tokens, job.prompt) == (
        "bfloat16",
        200,
        5,
        ("from flag",),
    )
    assert model_path(job.model) == "some/big"


def test_hyphens_and_underscores_are_the_same() -> None:
    assert parse("--max_tokens", "4", "--min-frames=2").max_tokens == 4
    assert parse("--min_frames", "2").frames.min_frames == 2
    assert parse("--dry-run", "--limit", "3") == parse("--limit=3", "--dry_run=true")
    assert parse("--max-tokens", "1", "--max-tokens", "2").max_tokens == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--max-tokns", "4"], ["--max-tokns", "--max-tokens"]),
        (["--max-tokens", "many"], ["--max-tokens", "'many'", "integer"]),
        (["--max-tokens", "2.5"], ["--max-tokens", "2.5"]),
        (["--max-tokens", "0"], ["--max-tokens", "0"]),
        (["--keep", "x"], ["--keep", "'x'", "float"]),
        (["--mode", "fast"], ["--mode", "'fast'", "'std', 'dense'"]),
        (["--max-tokens"], ["--max-tokens", "value"]),
        (["--prompt", "--dry-run"], ["--prompt", "value"]),
        (["stray"], ["stray"]),
        (["--dry-run", "maybe"], ["maybe"]),
        (["--config", "/nowhere.yaml"], ["/nowhere.yaml"]),
        (["--fps", "-1"], ["fps", "-1"]),
        (["--max-error-fraction", "2"], ["--max-error-fraction"]),
        (["--temperature", "-1"], ["--temperature", "-1"]),
        (["--top-p", "0"], ["--top-p", "0"]),
        (["--repetition-penalty", "0"], ["--repetition-penalty"]),
        (["--seed", "x"], ["--seed", "'x'"]),
    ],
)
def test_wrong_flags_are_named_in_one_sentence(words: list[str], named: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(*words)
    assert all(name in str(caught.value) for name in named), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("\ninptu: x\n", ["job.yaml, line 2", "'inptu'", "did you mean 'input'"]),
        ("zzzzz: x\n", ["job.yaml, line 1", "'zzzzz'"]),
        ("[1]\n", ["job.yaml"]),
        ("input: {b: 1}\n", ["job.yaml, line 1", "'input'", "nested"]),
        ("input: [\n", ["job.yaml"]),
        ("limit: 1\nmax-tokens: many\n", ["job.yaml, line 2", "--max-tokens", "'many'"]),
        ("max-tokens: [1, 2]\n", ["job.yaml, line 1", "--max-tokens"]),
    ],
)
def test_wrong_files_are_named_in_one_sentence(
    content: str, named: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    with pytest.raises(UsageError) as caught:
        parse("--config", str(file))
    assert all(name in str(caught.value) for name in named), str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_close_words_are_suggested() -> None:
    with pytest.raises(UsageError) as caught:
        parse("--zzzzz", "1")
    assert "mean" not in str(caught.value)
    with pytest.raises(UsageError) as caught:
        model_path("zzzzz")
    assert "mean" not in str(caught.value)


def test_help_lists_flags_in_groups_with_examples_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_job(["--help"], "test", "Captions.\n\n    python jobs/caption_archive.py --input x")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    headings = [
        "python jobs/caption_archive.py --input x",
        "Input and output:",
        "Frames:",
        "Answers:",
    ]
    places = [shown.index(heading) for heading in headings]
    assert places == sorted(places)
    assert max(map(len, shown.splitlines())) <= 100
    for name in field_names(Job):
        assert hyphened(name) in shown


def test_sampling_is_what_the_flags_say_and_else_the_checkpoints() -> None:
    assert parse().sampling == Sampling(256)
    words = (
        "--temperature=0.7",
        "--top-k",
        "5",
        "--seed=3",
        "--stop",
        "a, b",
        "--stop=# c",
        "--min-tokens",
        "2",
    )
    wanted = Sampling(256, min_tokens=2, temperature=0.7, top_k=5, seed=3, stop=("a, b", "# c"))
    assert parse(*words).sampling == wanted


def test_a_script_knows_only_its_own_flags() -> None:
    with pytest.raises(UsageError, match=r"No such option.*--question-column"):
        parse("--question-column", "q", without=("question_column",))
    with pytest.raises(UsageError, match="--output is missing"):
        parse(required=("input", "output"))


def test_drafts_come_from_presets_and_flags() -> None:
    std = draft_of(parse())
    assert std is not None
    assert (std.policy, std.keep, std.gamma) == ("std", 0.2, 5)
    random = draft_of(parse("--draft", "random", "--gamma", "3", "--k", "7"))
    assert random is not None
    assert (random.policy, random.gamma, random.k) == ("random", 3, 7)
    assert draft_of(parse("--mode", "dense")) is None
    assert draft_of(parse("--strict", "6")) == std
    wrong = [
        "--draft sdt",
        "--keep 0",
        "--keep 1.01",
        "--k 0",
        "--gamma 0",
        "--strict 5",
        "--strict=-1",
    ]
    for words in map(str.split, wrong):
        with pytest.raises(UsageError):
            draft_of(parse(*words))


@pytest.mark.parametrize("name", presets("draft"))
def test_every_preset_is_a_draft(name: str) -> None:
    assert draft_of(parse("--draft", name)) is not None


def test_only_a_selection_or_sparse_channels_may_go_unverified() -> None:
    assert draft_of(parse("--mode", "sparse", "--draft", "composition")) is not None
    for name in ("ngram", "layerskip", "pair-demo"):
        with pytest.raises(UsageError, match="mode sparse"):
            draft_of(parse("--mode", "sparse", "--draft", name))


def test_models_are_presets_folders_or_hub_ids(tmp_path: Path) -> None:
    assert model_path(str(tmp_path)) == str(tmp_path)
    assert model_path("some/model") == "some/model"
    assert model_path("qwen2-vl-7b") == "Qwen/Qwen2-VL-7B-Instruct"
    assert parse("--model", "qwen2-vl-7b").dtype == "bfloat16"
    with pytest.raises(UsageError, match="qwen2-vl-7b"):
        model_path("qwen2-vl-7")


def test_prompts_that_are_empty_or_not_text_are_refused() -> None:
    with pytest.raises(UsageError, match="--prompt is empty"):
        parse("--prompt", "Who?", "--prompt", "")
    for flag in ("--prompt", "--stop"):
        with pytest.raises(UsageError, match=rf"{flag} .*\\udcff.* holds bytes that are not UTF-8"):
            parse(flag, b"what \xff".decode("utf-8", "surrogateescape"))
