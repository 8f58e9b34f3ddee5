"""Device profiles as files, and which one a job plans with."""

from __future__ import annotations

import json
from dataclasses import replace

from pipeline import storage
from pipeline.records import RequestError, UsageError
from std_core.cost_model.device_specs import estimated_profile
from std_core.cost_model.model_size import ModelSize
from std_core.cost_model.profile import Device, Profile
from std_core.cost_model.profile_json import from_json, to_json
from std_core.types import Draft


def write_profile(uri: str, profile: Profile) -> None:
    storage.put(uri, json.dumps(to_json(profile), indent=1).encode())


def read_profile(uri: str) -> Profile:
    """Raises UsageError where there is none, or one of another version."""
    try:
        return from_json(json.loads(storage.read_bytes(uri)))
    except RequestError as error:
        raise UsageError(f"--profile {uri!r} cannot be read: {error.message}") from error
    except ValueError as error:
        raise UsageError(f"--profile {uri!r} {error}; jobs/calibrate.py writes one") from error


def check(profile: Profile, uri: str, model: str, dtype: str, device: Device) -> None:
    """
    Args:
        device: at hand. A profile of another kind of device is taken to be of where the engines
            will run.

    Raises:
        UsageError: the profile is of another model, precision or device.
    """
    what = ""
    if profile.model != model:
        what = f"of model {profile.model}, not {model}"
    elif profile.dtype != dtype:
        what = f"of {profile.dtype}, not {dtype}"
    elif profile.device.kind == device.kind and profile.device.name != device.name:
        what = f"of {profile.device.name}, this is {device.name}"
    if what:
        raise UsageError(f"--profile {uri!r} is {what}: jobs/calibrate.py measures what is at hand")


def profile_for(
    uri: str, model: str, dtype: str, model_size: ModelSize, at_hand: Device
) -> Profile:
    """What was measured, or without a profile what is published of the device at hand.

    Args:
        uri: empty where none was given.
        model: its checkpoint's revision.

    Raises: UsageError: the profile cannot be read, or is of another version, model, precision or
        device.
    """
    if not uri:
        return estimated_profile(at_hand, model_size, model, dtype)
    profile = read_profile(uri)
    check(profile, uri, model, dtype, device=at_hand)
    return profile


def unfit_alone(profile: Profile, draft: Draft) -> str | None:
    """Why a draft's text should not be taken without verification, as a clause; None if nothing
    speaks against it."""
    found = next(
        (
            t.retrieval_scores
            for t in profile.drafts
            if replace(t.draft, gamma=1) == replace(draft, gamma=1)
        ),
        (),
    )
    if not found:
        return "--profile holds no retrieval test of this draft: jobs/calibrate.py --retrieval true makes one"
    worst = min(found, key=lambda r: r.draft_correct / max(1, r.dense_correct))
    if all(r.passes for r in found):
        return None
    return (
        f"on its own it found {worst.draft_correct} of the {worst.dense_correct} answers that the dense loop found, of {worst.questions}, "
        f"in contexts of {worst.context} tokens"
    )


def provenance(profile: Profile) -> str:
    """Where a plan's figures come from, in one sentence."""
    name = profile.device.name
    if profile.measured:
        return f"times as measured on {name}"
    if profile.drafts:
        return f"times from what is published of {name}, acceptance from other models: --profile has measured ones"
    return f"nothing was measured on {name}, so the draft is the default and times are rough: --profile has measured ones"
