"""Device profiles as files, and the profile that a job plans with."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from pipeline import storage
from pipeline.records import RequestError, UsageError
from std_core.cost_model.device_specs import estimated_profile
from std_core.cost_model.model_size import ModelSize
from std_core.cost_model.profile import Device, Profile
from std_core.cost_model.profile_json import from_json, to_json
from std_core.types import Draft


def write_profile(uri: str, profile: Profile) -> None:
    """Raises RequestError where storage fails."""
    storage.put(uri, json.dumps(to_json(profile), indent=1).encode())


def read_profile(uri: str) -> Profile:
    """Raises UsageError where there is no profile, or one of another version."""
    try:
        return from_json(json.loads(storage.read_bytes(uri)))
    except RequestError as error:
        raise UsageError(f"--profile {uri!r} cannot be read: {error.message}") from error
    except ValueError as error:
        raise UsageError(f"--profile {uri!r} {error}; jobs/calibrate.py writes one") from error


@dataclass(frozen=True)
class ProfileSource:
    """The profiles of a job's model: one file or, without it, published figures.

    Args:
        uri: of a profile file; empty if none was given.
        revision: of the model's checkpoint.
    """

    uri: str
    revision: str
    dtype: str
    model_size: ModelSize

    def on(self, device: Device) -> Profile:
        """The profile to plan with on a device. A calibrated one may be of another kind of device
        (`cpu`, `cuda`): a driver without a GPU plans for engines with one.

        Raises:
            UsageError: the profile cannot be read, or is of another version, model, precision or
                device.
        """
        if not self.uri:
            return estimated_profile(device, self.model_size, self.revision, self.dtype)
        profile = read_profile(self.uri)
        if difference := self._difference(profile, device):
            raise UsageError(
                f"--profile {self.uri!r} is {difference}: jobs/calibrate.py measures what is at "
                "hand"
            )
        return profile

    def _difference(self, profile: Profile, device: Device) -> str:
        """How a profile differs from what is needed, as a clause; empty if it does not."""
        if profile.model != self.revision:
            return f"of model {profile.model}, not {self.revision}"
        if profile.dtype != self.dtype:
            return f"of {profile.dtype}, not {self.dtype}"
        if profile.device.kind == device.kind and profile.device.name != device.name:
            return f"of {profile.device.name}, this is {device.name}"
        return ""


def sparse_mode_objection(profile: Profile, draft: Draft) -> str | None:
    """Why a draft's text should not be used without verification (`--mode sparse`), as a clause;
    None if its retrieval test was passed."""
    tests = next(
        (
            calibrated.retrieval_scores
            for calibrated in profile.drafts
            if replace(calibrated.draft, gamma=1) == replace(draft, gamma=1)
        ),
        (),
    )
    if not tests:
        return (
            "--profile holds no retrieval test of this draft: "
            "jobs/calibrate.py --retrieval true makes one"
        )
    if all(test.passes for test in tests):
        return None
    worst = min(tests, key=lambda test: test.draft_correct / max(1, test.dense_correct))
    return (
        f"on its own it found {worst.draft_correct} of the {worst.dense_correct} answers that the "
        f"dense loop found, of {worst.questions}, in contexts of {worst.context} tokens"
    )


def describe_source(profile: Profile) -> str:
    """Where a plan's figures come from, in one sentence."""
    name = profile.device.name
    if profile.measured:
        return f"times as measured on {name}"
    if profile.device.kind == "cuda":
        return (
            f"times from what is published of {name}, acceptance from other models: "
            "--profile has measured ones"
        )
    return (
        f"nothing was measured on {name}, so waves decode densely until one has shown that a draft "
        "pays, and times are rough: --profile has measured ones"
    )
