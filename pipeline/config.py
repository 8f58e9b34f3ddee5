"""A job's flags, its presets and its YAML file, as one frozen record.

Values are literal: nothing in `dt=2025-01-01/`, `*.{mp4,mov}` or a prompt that looks like YAML is
read as syntax, on the command line or in a file. A flag outranks the `--config` file, which
outranks what the model's preset sets."""

from __future__ import annotations

import difflib
import re
from argparse import ArgumentError
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser

from pipeline.records import FrameOptions, UsageError
from std_core.types import Draft, Sampling

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
DEFAULT_PROMPT = "Describe this video."


def _flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Job:
    """What one run is to do; filled by `parse_job`. Empty strings and None stand for "not
    given"."""

    input: str = _flag(
        "", "folder, bucket prefix, glob, one video, or manifest (.parquet, .jsonl, .csv, .txt)"
    )
    output: str = _flag("", "folder or bucket prefix for Parquet parts and ledger")
    model: str = _flag("demo", "preset of conf/model, hub id, or folder")
    draft: str = _flag(
        "auto",
        "preset of conf/draft; auto: the fastest for each wave, as expected, or std where nothing is known",
    )
    profile: str = _flag(
        "", "device profile that jobs/calibrate.py wrote; default: what is published of the device"
    )
    price_per_hour: float | None = _flag(
        None, "of the machine of one engine, in any currency; for a plan"
    )
    mode: Literal["std", "dense", "sparse"] = _flag(
        "std",
        "std drafts sparsely and verifies; dense is the plain loop, with the same text; sparse does not verify: "
        "another text, for drafts that have passed a retrieval test on the model at hand",
    )
    gamma: int | None = _flag(None, "tokens drafted per round, in place of the preset's")
    keep: float | None = _flag(
        None, "share of the visual entries that the draft reads, in place of the preset's"
    )
    k: int | None = _flag(None, "visual entries that the draft reads, in place of a share")
    prompt: tuple[str, ...] = _flag((), "asked of each video; may be given several times")
    prompts: str = _flag("", "file with one prompt a line")
    video_column: str = _flag(
        "", "the manifest's column of videos; default: video, video_uri, url or path"
    )
    question_column: str = _flag(
        "", "the manifest's column of questions; default: question or prompt"
    )
    frames: FrameOptions = field(default_factory=FrameOptions)
    window_seconds: float | None = _flag(
        None, "one request per window of so many seconds of each video"
    )
    window_overlap: float = _flag(
        0.0, "seconds by which a window begins before the one before it ends"
    )
    max_tokens: int = _flag(256, "tokens written at most")
    min_tokens: int = _flag(0, "tokens written before the text may end")
    temperature: float | None = _flag(
        None, "0 is greedy; default: as the model's generation configuration has it"
    )
    top_p: float | None = _flag(
        None, "draw from the likeliest tokens of this mass; default as above"
    )
    top_k: int | None = _flag(None, "draw from so many tokens; default as above")
    repetition_penalty: float | None = _flag(None, "above 1 against repetition; default as above")
    seed: int | None = _flag(
        None, "of texts that are drawn: the same again on every run; without one they are not"
    )
    stop: tuple[str, ...] = _flag((), "text at which the output ends; may be given several times")
    max_num_seqs: int = _flag(8, "rows that decode together in an engine")
    max_model_len: int | None = _flag(
        None, "prompt, visual tokens and text together at most; default: the model's own"
    )
    dtype: Literal["float32", "bfloat16"] = _flag("float32", "of weights and cache")
    strict: int = _flag(
        0, "pad verifications to N tokens a row: one text in bfloat16, whatever drafts; 0: don't"
    )
    pipeline_parallel_size: int = _flag(
        1, "GPUs of one machine over which an engine spreads the model's layers"
    )
    tensor_parallel_size: int = _flag(
        1, "GPUs of one machine that share each layer of an engine's model, by its heads"
    )
    concurrency: int | None = _flag(
        None, "engines; default: one per GPU (per so many as one is spread over), else 1"
    )
    engine_timeout: float = _flag(600.0, "seconds without a step after which an engine is replaced")
    stall_timeout: float = _flag(
        1800.0, "seconds without anything happening after which the run ends"
    )
    limit: int | None = _flag(None, "only the first N requests of the input")
    dry_run: bool = _flag(False, "probe and plan only: no frame is decoded, nothing is written")
    retry_failed: bool = _flag(False, "run again what earlier runs left as error rows")
    max_error_fraction: float = _flag(
        0.05, "share of failed requests from which on the exit code is 3"
    )
    max_bytes_in_flight: int | None = _flag(
        None, "bytes of frames held at once; default: 1/4 of the object store"
    )
    decode_timeout: float = _flag(120.0, "seconds that decoding a video may take")
    rows_per_part: int = _flag(512, "rows in a Parquet part at most")

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "rows_per_part",
            "max_model_len",
            "limit",
            "max_bytes_in_flight",
            "pipeline_parallel_size",
            "tensor_parallel_size",
            "concurrency",
        ):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{_hyphened(name)} is {value}: at least 1 is needed")
        if self.tensor_parallel_size > 1 and self.pipeline_parallel_size > 1:
            raise UsageError(
                "--tensor-parallel-size and --pipeline-parallel-size do not go together: one of them is 1"
            )
        if self.tensor_parallel_size > 2 and self.strict:
            raise UsageError(
                f"--tensor-parallel-size is {self.tensor_parallel_size}: --strict goes with 2 at most, since the order "
                "in which more parts are summed depends on a row's place in the batch"
            )
        if self.price_per_hour is not None and not self.price_per_hour >= 0:
            raise UsageError(f"--price-per-hour is {self.price_per_hour}: 0 or more is needed")
        if not 0 <= self.max_error_fraction <= 1:
            raise UsageError(
                f"--max-error-fraction is {self.max_error_fraction}: a share between 0 and 1 is needed"
            )
        if self.window_seconds is not None and not self.window_seconds > 0:
            raise UsageError(
                f"--window-seconds is {self.window_seconds}: seconds above 0 are needed"
            )
        if self.window_overlap and not 0 <= self.window_overlap < (self.window_seconds or 0):
            raise UsageError(
                f"--window-overlap is {self.window_overlap}: from 0 to less than --window-seconds, which is "
                f"{self.window_seconds or 'not given'}, is needed"
            )
        for name in ("decode_timeout", "engine_timeout", "stall_timeout"):
            if not (seconds := getattr(self, name)) > 0:
                raise UsageError(f"{_hyphened(name)} is {seconds}: seconds above 0 are needed")
        try:
            _ = self.sampling
        except ValueError as error:
            raise UsageError(f"--{str(error).replace('_', '-', 1)}") from error

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen, in one record."""
        return Sampling(
            **{f.name: getattr(self, f.name) for f in fields(Sampling) if hasattr(self, f.name)}
        )


def parse_job(
    argv: Sequence[str], prog: str, without: Sequence[str] = (), needs: Sequence[str] = ("input",)
) -> Job:
    """The job that a command line asks for.

    Args:
        argv: the words behind the script's name.
        prog: the script's name, for the help.
        without: fields that this script has no flag for.
        needs: fields that must be given.

    Raises: UsageError: an unknown flag, a wrong type or value, an unreadable file; one sentence
        that names it.
    """
    hints = {name: hint for name, hint in _hints().items() if name not in without}
    if {"-h", "--help"} & set(argv):
        _parser(hints, prog).print_help()
        raise SystemExit(0)
    given = _words(argv, hints)
    if "config" in given:
        given = _read_yaml(Path(given.pop("config")[-1]), hints) | given
    given = _preset(given.get("model", ["demo"])[-1], hints) | given
    values = _typed(given, hints, prog)
    for name in needs:
        if not values.get(name):
            raise UsageError(f"{_hyphened(name)} is missing")
    options = {f.name: values.pop(f.name) for f in fields(FrameOptions) if f.name in values}
    return Job(**{k: v for k, v in values.items() if k != "config"}, frames=FrameOptions(**options))


def parse_flags(cls: type[Any], argv: Sequence[str], prog: str) -> Any:
    """A flat dataclass from its flags, with the same rules and errors as a job's."""
    hints = get_type_hints(cls)
    if {"-h", "--help"} & set(argv):
        _parser(hints, prog, cls).print_help()
        raise SystemExit(0)
    return cls(**_typed(_words(argv, hints), hints, prog, cls))


# ---------------------------------------------------------------------------------- words to values


def _hints() -> dict[str, Any]:
    own = get_type_hints(Job)
    own.pop("frames")
    return own | get_type_hints(FrameOptions) | {"config": str}


def _hyphened(name: str) -> str:
    return "--" + name.replace("_", "-")


def nearest(word: str, known: Sequence[str]) -> str:
    """What was probably meant, as the tail of an error message."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.0)
    return f"; the nearest known is {close[0]}" if close else ""


def _key(word: str, hints: dict[str, Any], where: str = "") -> str:
    name = word.replace("-", "_")
    if name not in hints:
        known = [_hyphened(k) if not where else k for k in hints]
        shown = f"flag --{word}" if not where else f"key {word!r} in {where}"
        raise UsageError(f"unknown {shown}{nearest(shown.split()[1].strip(chr(39)), known)}")
    return name


def _words(argv: Sequence[str], hints: dict[str, Any]) -> dict[str, list[str]]:
    """Field names and the texts given for them. A value may begin with `-`; one that looks like a
    flag needs `=`."""
    given: dict[str, list[str]] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        match = FLAG.fullmatch(word)
        if not match:
            raise UsageError(f"{word!r} belongs to no flag")
        name = _key(match[1], hints)
        value = match[2]
        if value is None and hints[name] is bool:
            value = rest.pop(0) if rest and rest[0].lower() in ("true", "false") else "true"
        if value is None:
            if not rest or FLAG.fullmatch(rest[0]):
                raise UsageError(f"flag {_hyphened(name)} needs a value")
            value = rest.pop(0)
        before = (
            given.get(name, []) if get_origin(hints[name]) is tuple else []
        )  # else the last one counts
        given[name] = [*before, value]
    return given


def _read_yaml(path: Path, hints: dict[str, Any]) -> dict[str, list[str]]:
    """As `_words`, from a flat YAML file whose scalars are taken as they stand."""
    try:
        content = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
    except OSError as error:
        raise UsageError(f"file {str(path)!r} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(
            f"file {str(path)!r} is not YAML: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(content, dict):
        raise UsageError(f"file {str(path)!r} does not hold keys and values")
    given = {}
    for word, value in content.items():
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(v, str) for v in values):
            raise UsageError(
                f"key {word!r} in {path} is nested: one value or a list of values is needed"
            )
        given[_key(word, hints, str(path))] = values
    return given


def _typed(
    given: dict[str, list[str]], hints: dict[str, Any], prog: str, cls: type[Any] = Job
) -> dict[str, Any]:
    """Field names and typed values; what was not given is left out."""
    for name, texts in given.items():
        if len(texts) > 1 and get_origin(hints[name]) is not tuple:
            raise UsageError(f"{_hyphened(name)} takes one value, not {len(texts)}")
    words = [f"{_hyphened(name)}={text}" for name, texts in given.items() for text in texts]
    try:
        parsed = _parser(hints, prog, cls).parse_args(words).as_dict()
    except ArgumentError as error:
        key = re.search(r'key "(\w+)"', str(error))
        name = key[1] if key else ""
        if name not in given:
            raise
        raise UsageError(
            f"{_hyphened(name)} is {given[name][0]!r}: {_expected(hints[name])} is needed"
        ) from error
    return {
        name: tuple(parsed[name]) if get_origin(hints[name]) is tuple else parsed[name]
        for name in given
    }


def _expected(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    kind = next((t for t in get_args(hint) if t is not type(None)), hint)
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")


def _parser(hints: dict[str, Any], prog: str, cls: type[Any] = Job) -> ArgumentParser:
    frames = {f.name: "which frames are looked at, by Qwen's name" for f in fields(FrameOptions)}
    known = {f.name: f for f in (*fields(cls), *fields(FrameOptions))}
    parser = ArgumentParser(prog=prog, exit_on_error=False)
    for name, hint in hints.items():
        told = known.get(name)
        text = (
            told.metadata.get("help", frames.get(name))
            if told
            else "YAML file with any of these flags"
        )
        default = None if told is None or told.default is MISSING else told.default
        many: dict[str, Any] = (
            {"action": "append"} if get_origin(hint) is tuple else {"default": default}
        )
        parser.add_argument(
            _hyphened(name), dest=name, type=str if many.get("action") else hint, help=text, **many
        )
    return parser


# ------------------------------------------------------------------------------------------ presets


def presets(kind: str) -> list[str]:
    """Names that `--model` or `--draft` takes from `conf/`."""
    found = (CONF / kind).iterdir() if (CONF / kind).is_dir() else ()
    return sorted(p.stem for p in found if p.suffix == ".yaml" or (p / "config.json").is_file())


def _preset(model: str, hints: dict[str, Any]) -> dict[str, list[str]]:
    """What a model's YAML preset sets."""
    path = CONF / "model" / f"{model}.yaml"
    if "/" in model or not path.is_file():
        return {}
    given = _read_yaml(path, hints | {"model": str})
    return {name: value for name, value in given.items() if name in hints and name != "model"}


def model_path(model: str) -> str:
    """The folder or hub id behind `--model`; on any machine that has a checkout, presets are found
    in that checkout.

    Raises:
        UsageError: it is none of the presets, no folder, and cannot be a hub id.
    """
    if "/" not in model and (CONF / "model" / model / "config.json").is_file():
        return str(CONF / "model" / model)
    if "/" not in model and (CONF / "model" / f"{model}.yaml").is_file():
        return _read_yaml(CONF / "model" / f"{model}.yaml", _hints())["model"][0]
    if Path(model).is_dir():
        return str(Path(model).resolve())
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return model
    raise UsageError(
        f"model {model!r} is no preset, folder or hub id{nearest(model, presets('model'))}"
    )


def draft_of(job: Job) -> Draft | None:
    """The draft that the job asks for; None where it is to decode densely.

    Raises:
        UsageError: an unknown preset, or values that no draft can have.
    """
    if job.strict < 0:
        raise UsageError(f"--strict is {job.strict}: 0, or a number of tokens above γ, is needed")
    if job.mode == "dense":
        return None
    name = "std" if job.draft == "auto" else job.draft
    if name not in presets("draft"):
        raise UsageError(
            f"--draft {name!r} is no preset of conf/draft{nearest(name, presets('draft'))}"
        )
    hints = get_type_hints(Draft)
    values = _typed(_read_yaml(CONF / "draft" / f"{name}.yaml", hints), hints, "draft", Draft)
    values |= {
        key: value for key in ("keep", "k", "gamma") if (value := getattr(job, key)) is not None
    }
    try:
        draft = Draft(**values)
        if job.mode == "sparse":
            draft.check_unverified()
    except ValueError as error:
        raise UsageError(str(error)) from error
    if job.strict and job.strict <= draft.gamma:
        raise UsageError(f"--strict is {job.strict}: more than γ = {draft.gamma} tokens are needed")
    return draft
