"""Flags that suites share, and how flags are parsed and checked.

Imports no package but those of `pipeline.config`, for the suite `gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pipeline.command_line import flag, hyphened, parse_flags
from pipeline.config import Job, draft_of
from pipeline.records import UsageError
from std_core.types import Draft, Dtype

SuiteFlags = TypeVar("SuiteFlags")


@dataclass(frozen=True)
class ModelFlags:
    """Flags of a suite that loads a model."""

    model: str = flag(
        "demo", "demo, smollm2, a tiny random family, a preset of conf/model, a folder or a hub id"
    )
    threads: int = flag(2, "CPU threads of PyTorch")


@dataclass(frozen=True)
class EngineFlags(ModelFlags):
    """Flags of a suite that times a model on a device."""

    device: str = flag("cpu", "cpu or cuda")
    dtype: Dtype = flag("float32", "of weights and KV cache")


def parse_suite_flags(
    record: type[SuiteFlags], argv: Sequence[str], suite: str, description: str | None
) -> SuiteFlags:
    """Parse a suite's command line into a dataclass.

    Args:
        description: text at the top of `--help`, the suite's docstring.

    Raises:
        UsageError: a flag is unknown or its value has the wrong type.
    """
    prog = f"benchmark.py --suite {suite}"
    return parse_flags(record, argv, prog, description=description or "")


def require_at_least(flags: Any, **minimum: float) -> None:
    """Check flags against their smallest allowed values; None, "not given", is allowed.

    Raises:
        UsageError: a flag is below its minimum.
    """
    for name, least in minimum.items():
        value = getattr(flags, name)
        if value is not None and value < least:
            raise UsageError(f"{hyphened(name)} is {value}: at least {least} is needed")


def require_positive(flags: Any, *names: str) -> None:
    """Check that flags are above 0.

    Raises:
        UsageError: a flag is 0 or negative.
    """
    for name in names:
        value = getattr(flags, name)
        if value <= 0:
            raise UsageError(f"{hyphened(name)} is {value}: more than 0 is needed")


def require_device(device: str) -> None:
    """Check that this machine has the device.

    Raises:
        UsageError: it has no GPU and `device` is one.
    """
    import torch  # not at the top: suites without a model do not load it

    if device != "cpu" and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: this machine has none")


def parse_numbers(name: str, text: str) -> list[int]:
    """Parse the comma-separated positive whole numbers of flag `name`.

    Raises:
        UsageError: the text is anything else.
    """
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UsageError(
            f"{hyphened(name)} is {text!r}: comma-separated whole numbers above 0 are needed"
        )
    return [int(word) for word in words]


def parse_shares(name: str, text: str) -> tuple[float, ...]:
    """Parse the comma-separated shares, above 0 and at most 1, of flag `name`; may be empty.

    Raises:
        UsageError: the text is anything else.
    """
    try:
        shares = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        shares = (0.0,)
    if not all(0 < share <= 1 for share in shares):
        raise UsageError(
            f"{hyphened(name)} is {text!r}: comma-separated shares above 0 and up to 1 are needed"
        )
    return shares


def parse_drafts(text: str) -> list[Draft]:
    """Load the presets of `conf/draft` that `text` names, separated by commas.

    Raises:
        UsageError: there is no such preset.
    """
    drafts = (draft_of(Job(draft=name.strip())) for name in text.split(","))
    return [draft for draft in drafts if draft is not None]
