"""The arguments of `generate`: read as transformers reads them, honoured or refused by name.

What transformers derives from arguments (the merged generation configuration, lengths, special
tokens, attention mask, logits processors, stopping criteria) is made by its own functions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation import logits_process

from std_core.decoding.generation_fields import ASSISTED, EXTRA_OUTPUTS, REFUSED, check_config
from std_core.decoding.token_sampling import ResolvedSampling

# Arguments of `generate` and inputs of models that have no equivalent.
REFUSED_ARGUMENTS = {
    "assistant_model": ASSISTED,
    "assistant_tokenizer": ASSISTED,
    "synced_gpus": "the engine does not run under FSDP or DeepSpeed",
    "negative_prompt_ids": REFUSED["guidance_scale"].reason,
    "negative_prompt_attention_mask": REFUSED["guidance_scale"].reason,
    "custom_generate": "decoding loops other than the engine's are not supported",
    "inputs_embeds": "prompts are token ids",
    "position_ids": "positions are computed from the prompt",
    "cache": "every call prefills its whole prompt",
    "past_key_values": "every call prefills its whole prompt",
    "mm_encoder_outputs": "videos and images are given as pixels",
    "encoder_outputs": "the model has no encoder",
    "decoder_input_ids": "the model has no encoder",
}

# Processors whose result for a row is a function of that row's ids and scores alone. A drafted
# token that is rejected, and the number of rows in a call, then make no difference.
PURE_PROCESSORS = frozenset(
    (
        logits_process.MinLengthLogitsProcessor,
        logits_process.MinNewTokensLengthLogitsProcessor,
        logits_process.TemperatureLogitsWarper,
        logits_process.TopPLogitsWarper,
        logits_process.TopKLogitsWarper,
        logits_process.TopHLogitsWarper,
        logits_process.MinPLogitsWarper,
        logits_process.TypicalLogitsWarper,
        logits_process.EpsilonLogitsWarper,
        logits_process.EtaLogitsWarper,
        logits_process.RepetitionPenaltyLogitsProcessor,
        logits_process.NoRepeatNGramLogitsProcessor,
        logits_process.SequenceBiasLogitsProcessor,
        logits_process.NoBadWordsLogitsProcessor,
        logits_process.ForcedBOSTokenLogitsProcessor,
        logits_process.ForcedEOSTokenLogitsProcessor,
        logits_process.InfNanRemoveLogitsProcessor,
        logits_process.ExponentialDecayLengthPenalty,
        logits_process.LogitNormalization,
        logits_process.SuppressTokensAtBeginLogitsProcessor,
        logits_process.SuppressTokensLogitsProcessor,
        logits_process.WatermarkLogitsProcessor,
    )
)
# These hold the ids of a prompt. Made from the configuration, of a single row's.
_PROMPT_PROCESSORS = frozenset(
    (
        logits_process.EncoderRepetitionPenaltyLogitsProcessor,
        logits_process.EncoderNoRepeatNGramLogitsProcessor,
    )
)


@dataclass(frozen=True)
class Call:
    """The named parameters of `generate`, as transformers has them.

    Args:
        options: fields of `GenerationConfig`, and inputs of the model.
    """

    inputs: torch.Tensor | None = None
    generation_config: GenerationConfig | None = None
    logits_processor: LogitsProcessorList | None = None
    stopping_criteria: StoppingCriteriaList | None = None
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None
    streamer: Any = None
    tokenizer: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, hf: Any) -> Any:
        """Return what the model's own `generate` returns."""
        named = {name: value for name, value in vars(self).items() if name != "options"}
        given = {name: value for name, value in named.items() if value is not None}
        return hf.generate(**given, **self.options)


@dataclass(frozen=True)
class GenerationArguments:
    """A call of `generate`, parsed. B: rows of the batch.

    Args:
        config: the model's generation configuration, the call's and its keywords, merged; with the
            special tokens as tensors, and lengths in tokens of prompt and output.
        input_ids: (B, n), padding included.
        attention_mask: (B, n), given or inferred from the padding.
        visual_inputs: the model's other inputs.
        custom_processors: logits processors of the call.
        criteria: stopping criteria of the configuration and of the call.
    """

    hf: Any
    config: GenerationConfig
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    visual_inputs: dict[str, Any]
    custom_processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    streamer: Any

    @classmethod
    def parse(cls, hf: Any, call: Call) -> GenerationArguments:
        """Read a call's arguments.

        Raises:
            ValueError: an argument is not supported, or transformers refuses it.
        """
        options = dict(call.options)
        options.pop("trust_remote_code", None)  # read with `custom_generate` only
        for name, reason in REFUSED_ARGUMENTS.items():
            value = options.pop(name, None)
            if value is not None and value is not False:
                raise ValueError(f"{name} is given: {reason}")
        # None is a value for it: `eos_token_id=None` ends no row
        config, inputs = hf._prepare_generation_config(call.generation_config, **options)
        check_config(config)
        inputs = {
            name: value
            for name, value in inputs.items()
            if value is not None and name not in EXTRA_OUTPUTS
        }
        hf._validate_model_kwargs(dict(inputs))
        ids, _, inputs = hf._prepare_model_inputs(call.inputs, config.bos_token_id, inputs)
        if ids.ndim != 2:
            raise ValueError(f"input_ids have the shape {tuple(ids.shape)}: (rows, n) is needed")
        if not ids.numel():
            raise ValueError(f"input_ids have the shape {tuple(ids.shape)}: there is no prompt")
        mask = inputs.pop("attention_mask", None)
        hf._prepare_special_tokens(config, mask is not None, device=ids.device, batch_size=len(ids))
        if mask is None:
            mask = hf._prepare_attention_mask_for_generation(ids, config, {})
        if mask.shape != ids.shape:
            raise ValueError(
                f"attention_mask has the shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}"
            )
        _set_lengths(hf, config, call, ids)
        custom_criteria = StoppingCriteriaList(call.stopping_criteria or [])
        return cls(
            hf,
            config,
            input_ids=ids,
            attention_mask=mask,
            visual_inputs=inputs,
            custom_processors=LogitsProcessorList(call.logits_processor or []),
            criteria=hf._get_stopping_criteria(config, custom_criteria, call.tokenizer),
            streamer=call.streamer,
        )

    @property
    def copies(self) -> int:
        """Rows of the output per row of the input."""
        return self.config.num_return_sequences or 1

    @property
    def max_new_tokens(self) -> int:
        """Most new tokens, by the criterion on the length in force (a call's replaces the
        configuration's)."""
        max_length = self.criteria.max_length
        assert max_length is not None  # `_set_lengths` has set one
        return max(1, max_length - self.input_ids.shape[1])

    @property
    def pad_token_id(self) -> int:
        """What follows a row that ends before others; 0 where no row does."""
        pad = self.config._pad_token_tensor
        return 0 if pad is None else int(pad)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a row: the configuration's, or those of the call's own criterion."""
        ids: tuple[int, ...] = ()
        for criterion in self.criteria:
            if type(criterion) is EosTokenCriteria:
                ids = (*ids, *criterion.eos_token_id.tolist())
        return ids

    @property
    def watches_steps(self) -> bool:
        """Whether anything is called step by step: a streamer, or a criterion on more than a row's
        length and last token."""
        simple = (MaxLengthCriteria, EosTokenCriteria)
        return self.streamer is not None or any(type(c) not in simple for c in self.criteria)

    @property
    def keeps_scores(self) -> bool:
        """Whether scores or logits are returned."""
        config = self.config
        return bool(
            config.return_dict_in_generate and (config.output_scores or config.output_logits)
        )

    def stateful_processor(self) -> LogitsProcessor | None:
        """Return a processor that may not be called with drafted tokens or single rows, if any.

        Unknown classes are taken for such; one may declare `is_pure = True`.
        """
        for processor in self._processors(0):
            pure = type(processor) in PURE_PROCESSORS or getattr(processor, "is_pure", False)
            if getattr(processor, "prompt_ignore_length", None) is not None:
                pure = False  # of all rows of a batch
            if not any(processor is own for own in self.custom_processors):
                pure = pure or type(processor) in _PROMPT_PROCESSORS
            if not pure:
                return processor
        return None

    def row_sampling(self, row: int, seed: int | None) -> ResolvedSampling:
        """How the tokens of a row of the input are chosen.

        Raises:
            ValueError: transformers refuses a parameter.
        """
        padding = self._left_padding(row)
        processors = LogitsProcessorList()
        for processor in self._processors(row):
            custom = any(processor is own for own in self.custom_processors)
            processors.append(
                _OnPadded(processor, padding) if custom and len(padding) else processor
            )
        sample = bool(self.config.do_sample)
        return ResolvedSampling(
            processors,
            stop_ids=self.stop_ids,
            sample=sample,
            seed=seed if sample else None,
            keeps_scores=self.keeps_scores,
        )

    def _processors(self, row: int) -> LogitsProcessorList:
        """Logits processors for a row of which the engine has no padding."""
        length = int(self.attention_mask[row].sum())
        padding = self.input_ids.shape[1] - length
        config = copy.copy(self.config)
        config.max_length = self.config.max_length - padding
        config.min_length = self.config.min_length - padding
        config._eos_token_tensor = self._generated_stop_ids()
        if not self.custom_processors:
            # the same minimum in the form that is computed for all rows at once
            config.min_new_tokens = config.min_length - length
            config.min_length = 0
        return self.hf._get_logits_processor(
            config,
            input_ids_seq_length=length,
            encoder_input_ids=self.input_ids[row : row + 1],
            logits_processor=self.custom_processors,
            device=self.input_ids.device,
        )

    def _generated_stop_ids(self) -> torch.Tensor | None:
        """The configuration's stop ids that the vocabulary has; no output has the others."""
        ids = self.config._eos_token_tensor
        if ids is None:
            return None
        vocabulary = self.hf.get_output_embeddings().weight.shape[0]
        ids = ids[(ids >= 0) & (ids < vocabulary)]
        return ids if len(ids) else None

    def _left_padding(self, row: int) -> torch.Tensor:
        """(p,) ids in front of a row's prompt."""
        first = int(self.attention_mask[row].argmax())
        return self.input_ids[row, :first]


def _set_lengths(hf: Any, config: GenerationConfig, call: Call, ids: torch.Tensor) -> None:
    """Set the configuration's lengths in tokens of prompt and output, as `generate` does."""

    def is_default(name: str) -> bool:
        configs = (call.generation_config, hf.generation_config)
        values = (call.options.get(name), *(getattr(config, name, None) for config in configs))
        return all(value is None for value in values)

    length = ids.shape[1]
    default_max_length = is_default("max_length")
    hf._prepare_generated_length(
        generation_config=config,
        has_default_max_length=default_max_length,
        has_default_min_length=is_default("min_length"),
        model_input_name="input_ids",
        inputs_tensor=ids,
        input_ids_length=length,
    )
    hf._validate_generated_length(config, length, default_max_length)


class _OnPadded(LogitsProcessor):
    """A processor of the call, which counts the padding of its row as `generate` does."""

    def __init__(self, inner: LogitsProcessor, padding: torch.Tensor):
        self.inner = inner
        self.padding = padding[None]

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        padding = self.padding.to(input_ids.device)
        return self.inner(torch.cat([padding, input_ids], dim=1), scores)
