"""The columns of an output; the same whether all rows succeed or all fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

_TEXT = pa.string()
_REAL = pa.float64()
_COUNT = pa.int32()

RESULT_SCHEMA = pa.schema(
    {
        "request_id": _TEXT,
        "video_uri": _TEXT,
        "video_start": _REAL,  # s
        "video_end": _REAL,  # s
        "prompt": _TEXT,
        "status": _TEXT,  # success, truncated, error
        "text": _TEXT,
        "finish_reason": _TEXT,  # stop, length, error
        "error_code": _TEXT,
        "error_message": _TEXT,
        "attempts": _COUNT,
        "num_prompt_tokens": _COUNT,
        "num_visual_tokens": _COUNT,
        "planned_visual_tokens": _COUNT,
        "num_generated_tokens": _COUNT,
        "frame_pts": pa.list_(_REAL),  # s
        "sampled_fps": _REAL,
        "frames_lost": _COUNT,
        "rotation": _COUNT,  # degrees
        "decoder": _TEXT,
        "model": _TEXT,
        "model_revision": _TEXT,
        "draft": _TEXT,
        "kv_keep": _REAL,  # kept over context entries
        "weight_keep": _REAL,
        "gamma": _REAL,  # mean
        "rounds": _COUNT,
        "proposed": _COUNT,
        "accepted": _COUNT,  # bonus tokens excluded
        "vision_s": _REAL,
        "prefill_s": _REAL,
        "decode_s": _REAL,
        "created_at": pa.timestamp("us", tz="UTC"),
    }
)


def carried_name(column: str, columns: Iterable[str]) -> str:
    """The output's name of an input column: its own, or `input_<name>` where that is taken."""
    taken = {*RESULT_SCHEMA.names, *columns} - {column}
    name = column
    while name in RESULT_SCHEMA.names or name in taken:
        name = f"input_{name}"
    return name


def output_schema(input_schema: pa.Schema) -> pa.Schema:
    """The schema of every part: the results' columns, then the input's under their output
    names."""
    return pa.schema([*RESULT_SCHEMA, *input_schema])


def to_table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Rows as a table; missing columns are null."""
    arrays = [_array([row.get(column.name) for row in rows], column.type) for column in schema]
    return pa.table(arrays, schema=schema)


def _array(values: list[Any], data_type: pa.DataType) -> pa.Array:
    """Text that is not valid Unicode, such as a file name, is written with escapes."""
    try:
        return pa.array(values, data_type)
    except UnicodeEncodeError:
        return pa.array([_escaped(value) for value in values], data_type)


def _escaped(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return value.encode("utf-8", "backslashreplace").decode()
