"""The id of a request: a hash of the video's content, the prompt, the full model and every setting
that changes the text. Draft settings change no text, so they are not part of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

from pipeline import storage
from pipeline.records import FrameOptions
from std_core.types import Sampling

# raise it when the same video and options give the model other pixels or other tokens
PREPROCESSING_VERSION = 2


def request_id(
    *,
    video_uri: str,
    size: int | None,
    version: str | None,
    prompt: str,
    model_revision: str,
    frames: FrameOptions,
    sampling: Sampling,
    dtype: str,
    max_model_len: int | None = None,
    given_id: str | None = None,
    occurrence: int = 0,
    sparse: Mapping[str, object] | None = None,
    window: Mapping[str, object] | None = None,
) -> str:
    """Hashes what identifies a request to 128 bits, as 32 hex digits.

    Args:
        video_uri: hashed in its canonical form, without signatures, which change from day to day.
        size: of the video in bytes; None if it cannot be read.
        version: ETag or mtime of the video; None if it cannot be read.
        model_revision: a hub revision, or the hash of a local folder.
        dtype: of the full model.
        max_model_len: the job's limit of prompt and text together, which may cut the text; None for
            the model's own, so that ids made without the option stay.
        given_id: the manifest's own `request_id`, if it has one.
        occurrence: number of the row among equal rows (with equal `given_id`), from 0.
        sparse: settings of `--mode sparse`, whose text is not the full model's; None in the exact
            modes.
        window: start, length and overlap (s) of the window of the video; None without windows.
    """
    content = {
        "video": [storage.canonical(video_uri), size, version],
        "prompt": prompt,
        "model": [model_revision, dtype],
        "frames": _without_unset(asdict(frames)),
        "sampling": {"max_tokens": sampling.max_tokens} | _non_default(sampling),
        "preprocessing": PREPROCESSING_VERSION,
        "row": occurrence if given_id is None else [given_id, occurrence],
    }
    if max_model_len is not None:
        content["max_model_len"] = max_model_len
    if sparse is not None:
        content["sparse"] = _without_unset(sparse)
    if window is not None:
        content["window"] = _without_unset(window)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(canonical.encode("ascii"), digest_size=16).hexdigest()


def _non_default(sampling: Sampling) -> dict[str, object]:
    """The options that differ from their defaults, so that a new option changes no existing id."""
    defaults = asdict(Sampling())
    changed = {name: value for name, value in asdict(sampling).items() if value != defaults[name]}
    return _without_unset(changed)


def _without_unset(options: Mapping[str, object]) -> dict[str, object]:
    """The options that are not None, so that a new option changes no existing id. Whole floats
    become integers, so that 2 and 2.0 give the same id."""
    result: dict[str, object] = {}
    for name, value in options.items():
        if value is None:
            continue
        is_whole = isinstance(value, float) and value.is_integer()
        result[name] = int(value) if is_whole else value  # type: ignore[call-overload]
    return result
