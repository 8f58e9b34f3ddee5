"""What makes a request the same request: the content of a video, the prompt, the full model and the
settings that change its text. Draft settings are no part of it, since they change no text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

from pipeline import storage
from pipeline.records import FrameOptions
from std_core.types import Sampling

PREPROCESSING_VERSION = (
    2  # raise it when the same video and options give the model other pixels or other tokens
)


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
    given_id: str | None = None,
    occurrence: int = 0,
    sparse: Mapping[str, object] | None = None,
    window: Mapping[str, object] | None = None,
) -> str:
    """A request's identity, 128 bits as 32 hex digits.

    Args: video_uri: its credentials and signatures are no part of the identity: they differ from
        day to day. size, version: bytes, and ETag or mtime; None where the video could not be
        looked at. model_revision: a hub revision, or the hash of a local folder. dtype: of the full
        model. given_id: the manifest's own `request_id`, if it has one. occurrence: number of the
        row among equal ones (equal `given_id` included), from 0. sparse: the setting of `--mode
        sparse`, whose text is not the full model's; None in the exact modes. window: start, length
        and overlap (s) of the window that it is about; None without windows.
    """
    content = {
        "video": [storage.redact(storage.normalize(video_uri)), size, version],
        "prompt": prompt,
        "model": [model_revision, dtype],
        "frames": _set(asdict(frames)),
        "sampling": {"max_tokens": sampling.max_tokens} | _changed(sampling),
        "preprocessing": PREPROCESSING_VERSION,
        "row": occurrence if given_id is None else [given_id, occurrence],
    }
    if sparse is not None:
        content["sparse"] = _set(sparse)
    if window is not None:
        content["window"] = _set(window)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(canonical.encode("ascii"), digest_size=16).hexdigest()


def _changed(sampling: Sampling) -> dict[str, object]:
    """What is not as it is by default, so that a new option leaves old identities alone."""
    usual = asdict(Sampling())
    return _set({name: value for name, value in asdict(sampling).items() if value != usual[name]})


def _set(options: Mapping[str, object]) -> dict[str, object]:
    """The options that are given; 2 and 2.0 are one value. A new option that is not set leaves old
    identities alone."""
    whole = {
        k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in options.items()
    }
    return {name: value for name, value in whole.items() if value is not None}
