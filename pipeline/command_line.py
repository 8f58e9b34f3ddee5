"""Flags and YAML files into frozen dataclasses, parsed by click.

Each field of a dataclass is a flag (`max_tokens` is `--max-tokens`, `--max_tokens` is accepted); a
nested dataclass contributes its own fields. Values are literal: nothing in `dt=2025-01-01/`,
`*.{mp4,mov}` or a prompt that looks like YAML is interpreted, on the command line or in a file.
Every error is one sentence that names the flag or the key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click
import yaml

from pipeline.records import UsageError

FLAG = re.compile(r"--([A-Za-z][\w-]*)")
HELP_WIDTH = 100

Record = TypeVar("Record")
# from the texts of the flags that were given to values that outrank the fields' own defaults
Defaults = Callable[[Mapping[str, str | list[str]]], "YamlValues"]


def flag(default: Any, text: str, group: str = "") -> Any:
    """A dataclass field with its help text, and the heading under which `--help` lists it."""
    return field(default=default, metadata={"help": text, "group": group})


@dataclass(frozen=True)
class YamlValues:
    """Values of fields that a YAML file sets, as text, and where each one stands (`file, line
    n`)."""

    values: Mapping[str, str | list[str]]
    places: Mapping[str, str]

    def over(self, other: YamlValues) -> YamlValues:
        """Both; where they differ, this one's."""
        return YamlValues({**other.values, **self.values}, {**other.places, **self.places})


NOTHING = YamlValues({}, {})


def parse_flags(
    record: type[Record],
    argv: Sequence[str],
    prog: str,
    *,
    description: str = "",
    required: Sequence[str] = (),
    without: Sequence[str] = (),
    defaults: Defaults = lambda raw: NOTHING,
    extra: Sequence[click.Option] = (),
) -> Record:
    """An instance of a dataclass from a command line.

    Args:
        argv: the words after the script's name.
        prog: the script's name, for `--help` and error messages.
        description: text at the top of `--help`, printed as it is.
        required: fields that must be given.
        without: fields for which there is no flag.
        defaults: values that outrank the fields' own defaults, from the texts of the given flags.
        extra: flags that only `defaults` reads.

    Raises:
        UsageError: an unknown flag, a wrong type or value, a missing flag.
        SystemExit: after `--help`.
    """
    options = [*extra, *_options(record, without)]
    command = _Command(
        prog,
        params=list(options),
        help=description,
        context_settings={
            "token_normalize_func": lambda word: word.replace("_", "-"),
            "help_option_names": ["-h", "--help"],
        },
    )
    _check_values_given(argv, options)
    known = NOTHING
    try:
        context = click.Context(command, info_name=prog, resilient_parsing=True)
        raw, _, _ = command.make_parser(context).parse_args(list(argv))
        known = _as_options_take(defaults(_given(raw)), options)
        with command.make_context(
            prog, list(argv), default_map=dict(known.values), max_content_width=HELP_WIDTH
        ) as context:
            values = context.params
    except click.exceptions.Exit as done:
        raise SystemExit(done.exit_code) from None
    except click.UsageError as error:
        raise UsageError(_sentence(error, known)) from error
    for name in required:
        if not values[name]:
            raise UsageError(f"{hyphened(name)} is missing")
    return _build(record, values)


def record_from_yaml(record: type[Record], path: Path, **replaced: Any) -> Record:
    """An instance of a dataclass from a flat YAML file; `replaced` outranks it.

    Raises:
        UsageError: the file cannot be read, or a key or value does not belong to the dataclass.
    """
    known = read_yaml(path, field_names(record))
    parsed = parse_flags(record, (), path.name, defaults=lambda raw: known)
    values = {f.name: getattr(parsed, f.name) for f in fields(record)}  # type: ignore[arg-type]
    return record(**values | replaced)


def read_yaml(path: Path, known: Sequence[str]) -> YamlValues:
    """Keys and values of a flat YAML file, whose scalars are taken literally.

    Args:
        known: keys that the file may have; hyphens and underscores are the same.

    Raises:
        UsageError: the file cannot be read, is not YAML, or has an unknown or nested key.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise UsageError(f"file {str(path)!r} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(
            f"file {str(path)!r} is not YAML: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"file {str(path)!r} does not hold keys and values")
    values: dict[str, str | list[str]] = {}
    places: dict[str, str] = {}
    for key, node in root.value:
        place = f"{path}, line {key.start_mark.line + 1}"
        name = str(key.value).replace("-", "_")
        if name not in known:
            meant = did_you_mean(name, known)
            raise UsageError(f"unknown key {key.value!r} in {place}{meant}")
        values[name] = _literal(node, f"key {key.value!r} in {place}")
        places[name] = place
    return YamlValues(values, places)


def field_names(record: type[Any], without: Sequence[str] = ()) -> list[str]:
    """Names of a dataclass's fields, those of nested dataclasses included."""
    return [f.name for f, _ in _flat_fields(record) if f.name not in without]


def hyphened(name: str) -> str:
    """A field's name as a flag."""
    return "--" + name.replace("_", "-")


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """The end of an error message: the known word that is close to the given one, if there is
    one."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


# --------------------------------------------------------------------- dataclasses to click options


def _flat_fields(record: type[Any]) -> list[tuple[Field[Any], Any]]:
    """Fields and their types, those of nested dataclasses in the place of the field that holds
    them."""
    hints = get_type_hints(record)
    flat: list[tuple[Field[Any], Any]] = []
    for f in fields(record):
        if is_dataclass(hints[f.name]):
            flat += _flat_fields(hints[f.name])
        else:
            flat.append((f, hints[f.name]))
    return flat


def _build(record: type[Record], values: Mapping[str, Any]) -> Record:
    hints = get_type_hints(record)
    given: dict[str, Any] = {}
    for f in fields(record):  # type: ignore[arg-type]
        if is_dataclass(hints[f.name]):
            given[f.name] = _build(hints[f.name], values)
        elif f.name in values:
            given[f.name] = values[f.name]
    return record(**given)


def _options(record: type[Any], without: Sequence[str]) -> list[click.Option]:
    return [_option(f, hint) for f, hint in _flat_fields(record) if f.name not in without]


def _option(f: Field[Any], hint: Any) -> click.Option:
    several = get_origin(hint) is tuple
    default = None if f.default is MISSING else f.default
    settings: dict[str, Any] = {}
    if hint is bool:  # `--dry-run` alone is true; `--dry-run false` is understood too
        settings = {"is_flag": False, "flag_value": "true", "metavar": ""}
    return _Option(
        [hyphened(f.name), f.name],
        type=_click_type(hint),
        multiple=several,
        default=default,
        show_default=not several and default not in (None, "", False),
        help=f.metadata.get("help", ""),
        group=f.metadata.get("group", ""),
        **settings,
    )


def _click_type(hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return click.Choice(get_args(hint))
    kinds = [t for t in get_args(hint) or (hint,) if t not in (type(None), Ellipsis)]
    types = {int: click.INT, float: click.FLOAT, bool: click.BOOL, str: click.STRING}
    return types[kinds[0]]


class _Option(click.Option):
    """An option that belongs to a group of the help."""

    def __init__(self, *args: Any, group: str, **settings: Any):
        super().__init__(*args, **settings)
        self.group = group


class _Command(click.Command):
    """A command whose `--help` lists its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            group = getattr(param, "group", "") or "Options"
            if (line := param.get_help_record(ctx)) is not None:
                groups.setdefault(group, []).append(line)
        for name, lines in groups.items():
            with formatter.section(name):
                formatter.write_dl(lines)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write("\n" + (self.help or "").strip() + "\n")


def _given(raw: Mapping[str, Any]) -> dict[str, str | list[str]]:
    """Texts of the flags on a command line, without click's markers for those that are absent."""
    return {name: value for name, value in raw.items() if isinstance(value, (str, list))}


# ------------------------------------------------------------------------------------------ errors


def _check_values_given(argv: Sequence[str], options: Sequence[click.Option]) -> None:
    """Raises UsageError for a flag whose value would be the next flag; such a value needs
    `--flag=value`."""
    takes_value = {hyphened(str(o.name)): o.type is not click.BOOL for o in options}
    words = [word.replace("_", "-") if FLAG.fullmatch(word) else word for word in argv]
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else None
        if takes_value.get(word) and (following is None or following in takes_value):
            raise UsageError(f"flag {word} needs a value")


def _as_options_take(known: YamlValues, options: Sequence[click.Option]) -> YamlValues:
    """The values as lists for flags that may be given several times.

    Raises:
        UsageError: a list for a flag that takes one value.
    """
    several = {option.name for option in options if option.multiple}
    values: dict[str, str | list[str]] = {}
    for name, value in known.values.items():
        if name in several:
            values[name] = value if isinstance(value, list) else [value]
        elif isinstance(value, list):
            place = known.places[name]
            raise UsageError(f"{hyphened(name)} takes one value, not {len(value)} ({place})")
        else:
            values[name] = value
    return YamlValues(values, known.places)


def _sentence(error: click.UsageError, known: YamlValues) -> str:
    """click's message in one line, with the file and line where a wrong value stands."""
    message = " ".join(error.format_message().split()).rstrip(".")
    name = error.param.name if isinstance(error, click.BadParameter) and error.param else None
    context = error.ctx
    if name in known.places and context is not None:
        source = context.get_parameter_source(str(name))
        if source is click.core.ParameterSource.DEFAULT_MAP:
            message += f" ({known.places[str(name)]})"
    return message


def _literal(node: yaml.Node, name: str) -> str | list[str]:
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    if isinstance(node, yaml.SequenceNode) and all(
        isinstance(n, yaml.ScalarNode) for n in node.value
    ):
        return [str(n.value) for n in node.value]
    raise UsageError(f"{name} is nested: one value or a list of values is needed")
