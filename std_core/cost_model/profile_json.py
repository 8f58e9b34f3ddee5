"""Profiles as JSON, the format of the files that `jobs/calibrate.py` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from std_core.cost_model.acceptance import AcceptanceCounts, KeepAgreement
from std_core.cost_model.model_size import ModelSize
from std_core.cost_model.profile import (
    PROFILE_VERSION,
    CalibratedDraft,
    Device,
    DraftSetupLatency,
    FitError,
    LatencyModel,
    PredictionSpread,
    PrefillLatency,
    Profile,
    RetrievalScore,
    TextLength,
    UnionFraction,
)
from std_core.types import Draft

# The keys that differ from the names of the fields.
KEYS: dict[type[Any], dict[str, str]] = {
    ModelSize: {
        "tower_rope": "tower_turns",
        "tower_learned_positions": "tower_places",
        "feature_levels": "levels",
    },
    LatencyModel: {"per_token": "token", "per_entry": "entry"},
    AcceptanceCounts: {"rejected": "refused", "sampled": "drawn"},
    RetrievalScore: {"questions": "asked", "dense_correct": "dense", "draft_correct": "sparse"},
    CalibratedDraft: {
        "latency": "cost",
        "setup": "once",
        "second_model": "pair",
        "retrieval_scores": "retrieved",
    },
    Profile: {
        "model_size": "account",
        "latency": "full",
        "vision_s_per_token": "vision",
        "sampling_s_per_token": "noise",
        "union_fractions": "union",
        "text_lengths": "lengths",
    },
}


def to_json(profile: Profile) -> dict[str, Any]:
    """Convert a profile to what `json.dumps` takes."""
    content: dict[str, Any] = _encode(profile)
    return content


def from_json(content: Any) -> Profile:
    """Convert the content of a profile's file to a profile.

    Raises:
        ValueError: it is no profile, or one of another version; the message is a clause without its
            subject ("is no device profile").
    """
    if not isinstance(content, dict) or "version" not in content or "device" not in content:
        raise ValueError("is no device profile")
    if content["version"] != PROFILE_VERSION:
        raise ValueError(f"is of version {content['version']}, version {PROFILE_VERSION} is needed")
    try:
        return _profile(content)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"is no device profile: {error}") from error


def _encode(value: Any) -> Any:
    if is_dataclass(value):
        keys = KEYS.get(type(value), {})
        return {keys.get(f.name, f.name): _encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_encode(element) for element in value]
    return value


def _values(cls: type[Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record's values by the names of its fields. Raises KeyError where one is missing."""
    keys = KEYS.get(cls, {})
    return {f.name: content[keys.get(f.name, f.name)] for f in fields(cls)}


def _profile(content: Mapping[str, Any]) -> Profile:
    values = _values(Profile, content)
    values["device"] = Device(**values["device"])
    values["model_size"] = _model_size(values["model_size"])
    values["latency"] = _latency(values["latency"])
    values["prefill"] = PrefillLatency(*values["prefill"])
    values["drafts"] = tuple(map(_draft, values["drafts"]))
    values["union_fractions"] = tuple(UnionFraction(*u) for u in values["union_fractions"])
    values["text_lengths"] = tuple(TextLength(*length) for length in values["text_lengths"])
    values["spread"] = PredictionSpread(*values["spread"])
    return Profile(**values)


def _draft(content: Mapping[str, Any]) -> CalibratedDraft:
    values = _values(CalibratedDraft, content)
    second_model = values["second_model"]
    values["draft"] = Draft(**values["draft"])
    values["latency"] = _latency(values["latency"])
    values["setup"] = DraftSetupLatency(*values["setup"])
    values["acceptance"] = tuple(map(_acceptance, values["acceptance"]))
    values["second_model"] = None if second_model is None else _model_size(second_model)
    values["retrieval_scores"] = tuple(
        RetrievalScore(**_values(RetrievalScore, score)) for score in values["retrieval_scores"]
    )
    values["keep_agreements"] = tuple(KeepAgreement(**a) for a in values["keep_agreements"])
    return CalibratedDraft(**values)


def _model_size(content: Mapping[str, Any]) -> ModelSize:
    return ModelSize(**_values(ModelSize, content))


def _latency(content: Mapping[str, Any]) -> LatencyModel:
    values = _values(LatencyModel, content)
    values["residual"] = FitError(*values["residual"])
    return LatencyModel(**values)


def _acceptance(content: Mapping[str, Any]) -> AcceptanceCounts:
    values = _values(AcceptanceCounts, content)
    values["accepted"] = tuple(values["accepted"])
    values["rejected"] = tuple(values["rejected"])
    return AcceptanceCounts(**values)
