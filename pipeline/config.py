"""A job's flags, its presets and its YAML file, as one frozen record."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import click

from pipeline.command_line import (
    NOTHING,
    YamlValues,
    did_you_mean,
    field_names,
    flag,
    hyphened,
    parse_flags,
    read_yaml,
    record_from_yaml,
)
from pipeline.records import FrameOptions, UsageError
from std_core.types import Draft, Dtype, Sampling

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
DEFAULT_PROMPT = "Describe this video."

# headings of --help
INPUT = "Input and output"
ANSWERS = "Answers"
DRAFTING = "Drafting"
ENGINE = "Engine and cluster"
RUN = "Run and limits"

AT_LEAST_ONE = (
    "max_num_seqs",
    "rows_per_part",
    "max_model_len",
    "limit",
    "max_bytes_in_flight",
    "pipeline_parallel_size",
    "tensor_parallel_size",
    "concurrency",
)
TIMEOUTS = ("decode_timeout", "engine_timeout", "stall_timeout")


@dataclass(frozen=True)
class Job:
    """The configuration of one run; filled by `parse_job`. An empty string or None means "not
    given"."""

    input: str = flag(
        "",
        "folder, bucket prefix, glob, one video, or manifest (.parquet, .jsonl, .csv, .txt)",
        INPUT,
    )
    output: str = flag("", "folder or bucket prefix for the Parquet parts and their ledger", INPUT)
    prompt: tuple[str, ...] = flag(
        (), "question put to each video; may be given several times", INPUT
    )
    prompts: str = flag("", "text file with one prompt per line", INPUT)
    video_column: str = flag(
        "", "manifest column of the videos; default: video, video_uri, url or path", INPUT
    )
    question_column: str = flag(
        "", "manifest column of the questions; default: question or prompt", INPUT
    )
    frames: FrameOptions = field(default_factory=FrameOptions)
    window_seconds: float | None = flag(
        None, "make one request per window of this length of each video", "Frames"
    )
    window_overlap: float = flag(0.0, "seconds that neighbouring windows share", "Frames")
    max_tokens: int = flag(256, "generated tokens per request, at most", ANSWERS)
    min_tokens: int = flag(0, "generated tokens before a stop token is allowed", ANSWERS)
    temperature: float | None = flag(
        None, "0 is greedy; default: the model's generation configuration", ANSWERS
    )
    top_p: float | None = flag(None, "nucleus sampling; default: as for --temperature", ANSWERS)
    top_k: int | None = flag(
        None, "sample from the k most likely tokens; default: as for --temperature", ANSWERS
    )
    repetition_penalty: float | None = flag(
        None, "above 1 discourages repetition; default: as for --temperature", ANSWERS
    )
    seed: int | None = flag(None, "makes sampled texts reproducible", ANSWERS)
    stop: tuple[str, ...] = flag(
        (), "string at which the text ends; may be given several times", ANSWERS
    )
    model: str = flag("demo", "preset of conf/model, Hugging Face hub id, or folder", ENGINE)
    dtype: Dtype = flag("float32", "of weights and KV cache", ENGINE)
    max_model_len: int | None = flag(
        None,
        "prompt, visual and generated tokens of a request, at most; default: the model's",
        ENGINE,
    )
    max_num_seqs: int = flag(8, "requests that an engine decodes together, at most", ENGINE)
    concurrency: int | None = flag(
        None,
        "number of engines; default: one per GPU, or per group of GPUs that share a model; else 1",
        ENGINE,
    )
    pipeline_parallel_size: int = flag(
        1, "GPUs of one machine among which the model's layers are divided", ENGINE
    )
    tensor_parallel_size: int = flag(
        1, "GPUs of one machine that share each layer, divided by heads", ENGINE
    )
    engine_timeout: float = flag(
        600.0, "seconds without a decoding step after which an engine is replaced", ENGINE
    )
    mode: Literal["std", "dense", "sparse"] = flag(
        "std",
        "std: draft sparsely and verify; dense: decode without drafts, same text; sparse: do not "
        "verify, "
        "other text, only for drafts that passed a retrieval test on this model",
        DRAFTING,
    )
    draft: str = flag(
        "auto",
        "preset of conf/draft; auto chooses the fastest for each wave, and dense decoding where "
        "nothing was measured",
        DRAFTING,
    )
    gamma: int | None = flag(None, "drafted tokens per round, instead of the preset's", DRAFTING)
    keep: float | None = flag(
        None,
        "fraction of the visual KV entries that the draft reads, instead of the preset's",
        DRAFTING,
    )
    k: int | None = flag(
        None, "number of visual KV entries that the draft reads, instead of a fraction", DRAFTING
    )
    strict: int = flag(
        0,
        "pad every verification to N tokens per row, so that bfloat16 texts do not depend on the "
        "draft "
        "or the batch; 0: off",
        DRAFTING,
    )
    profile: str = flag(
        "",
        "device profile written by jobs/calibrate.py; default: published figures of the GPU",
        DRAFTING,
    )
    price_per_hour: float | None = flag(
        None, "price of the machine of one engine, in any currency; for the plan's cost", RUN
    )
    limit: int | None = flag(None, "only the first N requests of the input", RUN)
    dry_run: bool = flag(False, "probe and plan only: decode no frame, write nothing", RUN)
    retry_failed: bool = flag(False, "run again the requests whose row is an error", RUN)
    max_error_fraction: float = flag(
        0.05, "fraction of failed requests above which the exit code is 3", RUN
    )
    max_bytes_in_flight: int | None = flag(
        None, "bytes of decoded frames held at once; default: a quarter of Ray's object store", RUN
    )
    decode_timeout: float = flag(120.0, "seconds that decoding one video may take", RUN)
    stall_timeout: float = flag(
        1800.0, "seconds without any progress after which the run ends", RUN
    )
    rows_per_part: int = flag(512, "rows of a Parquet part, at most", RUN)
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "info", "least severe messages that are printed to standard error", RUN
    )

    def __post_init__(self) -> None:
        for name in AT_LEAST_ONE:
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{hyphened(name)} is {value}: at least 1 is needed")
        for name in TIMEOUTS:
            if not (seconds := getattr(self, name)) > 0:
                raise UsageError(f"{hyphened(name)} is {seconds}: seconds above 0 are needed")
        if self.price_per_hour is not None and not self.price_per_hour >= 0:
            raise UsageError(f"--price-per-hour is {self.price_per_hour}: 0 or more is needed")
        if not 0 <= self.max_error_fraction <= 1:
            raise UsageError(
                f"--max-error-fraction is {self.max_error_fraction}: a fraction between 0 and 1 is "
                "needed"
            )
        self._check_parallel()
        self._check_windows()
        self._check_texts()
        try:
            _ = self.sampling
        except ValueError as error:
            raise UsageError(f"--{str(error).replace('_', '-', 1)}") from error

    def _check_parallel(self) -> None:
        if self.tensor_parallel_size > 1 and self.pipeline_parallel_size > 1:
            raise UsageError(
                "--tensor-parallel-size and --pipeline-parallel-size cannot be combined: one of "
                "them must be 1"
            )
        if self.tensor_parallel_size > 2 and self.strict:
            raise UsageError(
                f"--tensor-parallel-size is {self.tensor_parallel_size}: --strict allows 2 at "
                "most, since the "
                "order in which more partial sums are added depends on a row's position in the "
                "batch"
            )

    def _check_texts(self) -> None:
        for name in ("prompt", "stop"):
            for text in getattr(self, name):
                if name == "prompt" and not text:
                    raise UsageError(f"{hyphened(name)} is empty: a text is needed")
                try:
                    text.encode()
                except UnicodeEncodeError as error:
                    raise UsageError(
                        f"{hyphened(name)} {text!a} holds bytes that are not UTF-8"
                    ) from error

    def _check_windows(self) -> None:
        if self.window_seconds is not None and not self.window_seconds > 0:
            raise UsageError(
                f"--window-seconds is {self.window_seconds}: seconds above 0 are needed"
            )
        if self.window_overlap and not 0 <= self.window_overlap < (self.window_seconds or 0):
            raise UsageError(
                f"--window-overlap is {self.window_overlap}: at least 0 and less than "
                "--window-seconds "
                f"({self.window_seconds or 'not given'}) is needed"
            )

    @property
    def sampling(self) -> Sampling:
        """The sampling parameters of every request."""
        names = [f.name for f in fields(Sampling) if hasattr(self, f.name)]
        return Sampling(**{name: getattr(self, name) for name in names})


def parse_job(
    argv: Sequence[str],
    prog: str,
    description: str = "",
    without: Sequence[str] = (),
    required: Sequence[str] = ("input",),
) -> Job:
    """The job that a command line describes.

    A flag outranks the `--config` file, which outranks the model's preset.

    Args:
        argv: the words after the script's name.
        prog: the script's name, for the help.
        description: text at the top of `--help`.
        without: fields for which this script has no flag.
        required: fields that must be given.

    Raises:
        UsageError: an unknown flag, a wrong type or value, an unreadable file.
    """
    known = field_names(Job, without)

    def defaults(raw: Mapping[str, str | list[str]]) -> YamlValues:
        config = read_yaml(Path(str(raw["config"])), known) if "config" in raw else NOTHING
        model = raw.get("model") or config.values.get("model") or Job.model
        return config.over(_model_preset(str(model), known))

    return parse_flags(
        Job,
        argv,
        prog,
        description=description,
        required=required,
        without=without,
        defaults=defaults,
        extra=[click.Option(["--config"], help="YAML file with any of these flags")],
    )


# ------------------------------------------------------------------------------------------ presets


def presets(kind: str) -> list[str]:
    """Names that `--model` or `--draft` takes from `conf/`."""
    found = (CONF / kind).iterdir() if (CONF / kind).is_dir() else ()
    return sorted(p.stem for p in found if p.suffix == ".yaml" or (p / "config.json").is_file())


def _model_preset(model: str, known: Sequence[str]) -> YamlValues:
    """The flags that a model's YAML preset sets."""
    path = CONF / "model" / f"{model}.yaml"
    if "/" in model or not path.is_file():
        return NOTHING
    preset = read_yaml(path, [*known, "model"])
    values = {name: value for name, value in preset.values.items() if name != "model"}
    return YamlValues(values, preset.places)


def model_path(model: str) -> str:
    """The folder or hub id that `--model` names; presets are those of this machine's checkout.

    Raises:
        UsageError: it is neither a preset nor a folder, and cannot be a hub id.
    """
    if "/" not in model and (CONF / "model" / model / "config.json").is_file():
        return str(CONF / "model" / model)
    if "/" not in model and (CONF / "model" / f"{model}.yaml").is_file():
        preset = read_yaml(CONF / "model" / f"{model}.yaml", field_names(Job))
        return str(preset.values["model"])
    if Path(model).is_dir():
        return str(Path(model).resolve())
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return model
    meant = did_you_mean(model, presets("model"))
    raise UsageError(f"model {model!r} is not a preset, a folder or a hub id{meant}")


def draft_of(job: Job) -> Draft | None:
    """The draft that the job names; None for `--mode dense`. For `--draft auto` it is `std`.

    Raises:
        UsageError: an unknown preset, or values that a draft cannot have.
    """
    if job.strict < 0:
        raise UsageError(f"--strict is {job.strict}: 0, or a number of tokens above γ, is needed")
    if job.mode == "dense":
        return None
    name = "std" if job.draft == "auto" else job.draft
    if name not in presets("draft"):
        meant = did_you_mean(name, presets("draft"))
        raise UsageError(f"--draft {name!r} is not a preset of conf/draft{meant}")
    given = {key: getattr(job, key) for key in ("keep", "k", "gamma")}
    replaced = {key: value for key, value in given.items() if value is not None}
    try:
        draft = record_from_yaml(Draft, CONF / "draft" / f"{name}.yaml", **replaced)
        if job.mode == "sparse":
            draft.check_unverified()
    except ValueError as error:
        raise UsageError(str(error)) from error
    if job.strict and job.strict <= draft.gamma:
        raise UsageError(f"--strict is {job.strict}: more than γ = {draft.gamma} tokens are needed")
    return draft
