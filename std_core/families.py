"""Which checkpoints can be driven, told from the configuration alone, before weights are read."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def sees(config: Any) -> bool:
    """Whether a model of this configuration has a vision tower; else it reads text alone."""
    return hasattr(config, "vision_config")


def writer_of(config: Any) -> Any | None:
    """The transformers class that writes text with such a configuration; None if there is none."""
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    return mapping.get(type(config), None)  # the mapping's `get` asks for a default


def refusal(config: Any, writer: Any | None) -> str | None:
    """Why a model of this configuration and class cannot be driven, as the end of a sentence; None if it can, as far as
    a configuration tells."""
    text = config.get_text_config()
    if writer is None:
        return "writes no text"
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"has layers of {', '.join(sorted(kinds - {'full_attention'}))}; all must be of full_attention"
    if not hasattr(text, "layer_types") and (window := windowed(text)):
        return f"attends through a sliding window of {window} tokens; all layers must be of full attention"
    if not getattr(text, "is_decoder", True):
        return "reads in both directions; a token must see only what lies before it"
    if not writer._supports_attention_backend:
        return "has an attention of its own, which cannot be driven"
    return None


def windowed(text: Any) -> int | None:
    """The sliding window, in tokens, of a text configuration; None where it cuts nothing off."""
    window = getattr(text, "sliding_window", None)
    return window if window and window < text.max_position_embeddings else None
