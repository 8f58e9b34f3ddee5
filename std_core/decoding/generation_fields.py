"""The fields of transformers' `GenerationConfig`, and what becomes of them here.

Every field is in exactly one of three groups: honoured, without effect on tokens in the supported
modes, or refused unless it has a neutral value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import GenerationConfig


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


HONOURED = _names(
    # lengths and ends
    "max_length max_new_tokens min_length min_new_tokens max_time stop_strings"
    " pad_token_id bos_token_id eos_token_id"
    # sampling
    " do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff"
    " num_return_sequences"
    # logits processors
    " repetition_penalty encoder_repetition_penalty no_repeat_ngram_size"
    " encoder_no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id"
    " forced_eos_token_id remove_invalid_values exponential_decay_length_penalty"
    " suppress_tokens begin_suppress_tokens sequence_bias watermarking_config"
    # outputs
    " output_scores output_logits return_dict_in_generate"
)

# `generate` reads these with beams, an assistant model, an encoder or a compiled cache alone, or
# they change how a prompt is computed but not the tokens.
WITHOUT_EFFECT = _names(
    # beam search
    "early_stopping length_penalty diversity_penalty num_beam_groups low_memory"
    # assisted generation
    " num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold"
    " max_matching_ngram_size assistant_lookbehind target_lookbehind"
    " assistant_ensemble_weight speculation_type"
    # encoder-decoder models
    " decoder_start_token_id"
    # the engine has caches of its own, and always uses them
    " use_cache cache_config max_cache_len prefill_chunk_size"
    # compilation, other methods than `generate`, metadata
    " compile_config disable_compile continuous_batching_config _from_model_config"
    " transformers_version"
)


class Refusal(NamedTuple):
    """Values of a field that are accepted, and why others are not."""

    neutral: tuple[Any, ...]
    reason: str


ASSISTED = "drafts are chosen by sparse_to_dense(model, draft), not by the call"
_MOVED_TO_HUB = "transformers runs it with code from the hub, which the engine does not"
REFUSED = {
    "num_beams": Refusal((None, 1), "beam search is not supported"),
    "constraints": Refusal((None,), "constrained beam search is not supported"),
    "force_words_ids": Refusal((None,), "constrained beam search is not supported"),
    "penalty_alpha": Refusal((None, 0), f"contrastive search is not supported: {_MOVED_TO_HUB}"),
    "dola_layers": Refusal((None,), f"DoLa is not supported: {_MOVED_TO_HUB}"),
    "guidance_scale": Refusal(
        (None, 1), "classifier-free guidance is not supported: it needs a second forward pass"
    ),
    "token_healing": Refusal((None, False), "token healing is not supported: it changes prompts"),
    "prompt_lookup_num_tokens": Refusal((None,), f'{ASSISTED}: prompt lookup is Draft("ngram")'),
    "assistant_early_exit": Refusal((None,), f'{ASSISTED}: early exit is Draft("full", depth=…)'),
    "use_mtp": Refusal((None, False), f"{ASSISTED}, and multi-token prediction is none of them"),
    "is_assistant": Refusal((None, False), "the engine does not draft for other models"),
    "cache_implementation": Refusal(
        (None, "dynamic", "static"), "the engine has caches of its own, on the model's device"
    ),
    "output_attentions": Refusal((None, False), "attention weights are not kept"),
    "output_hidden_states": Refusal((None, False), "hidden states are not kept"),
}
# only together with `return_dict_in_generate` does transformers return these
EXTRA_OUTPUTS = ("output_attentions", "output_hidden_states")

_FIELDS = vars(GenerationConfig())
_DEFAULTS = GenerationConfig._get_default_generation_params()


def refusals(config: GenerationConfig) -> dict[str, str]:
    """Return the fields that ask for what is not supported, each with a sentence."""
    known = HONOURED | WITHOUT_EFFECT | set(REFUSED)
    refused = {}
    for name, value in vars(config).items():
        unread = name in EXTRA_OUTPUTS and not config.return_dict_in_generate
        if name in REFUSED and not unread and not _is_any(value, REFUSED[name].neutral):
            refused[name] = f"{name} = {value!r}: {REFUSED[name].reason}"
        is_new = name in _FIELDS and name not in known
        if is_new and not _is_any(value, (_DEFAULTS.get(name), _FIELDS[name])):
            refused[name] = f"{name} = {value!r}: this field of GenerationConfig is not known"
    return refused


def check_config(config: GenerationConfig) -> None:
    """Check that every field is honoured, has no effect, or has a neutral value.

    Raises:
        ValueError: names the field, its value and the reason.
    """
    for sentence in refusals(config).values():
        raise ValueError(sentence)


def neutralize(config: GenerationConfig) -> None:
    """Set the fields that ask for what is not supported to values that ask for nothing."""
    for name in refusals(config):
        setattr(config, name, REFUSED[name].neutral[0] if name in REFUSED else _FIELDS[name])


def _is_any(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(value is each or (each is not None and value == each) for each in neutral)
