"""From logits to tokens, per row and per position.

Logits processors are transformers' own list, made from the checkpoint's generation configuration
and the request's sampling exactly as `generate` makes it. Sampling is ours: a row with a seed adds
Gumbel noise that is a pure function of (seed, place in the output, token) and takes the maximum.
Draft and full model add the same noise, so equality decides acceptance, and the text depends on
neither policy, γ, batch nor restarts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList

from std_core.decoding.generation_fields import neutralize
from std_core.decoding.row_errors import isolated
from std_core.kernels.gumbel_noise import (
    gumbel_from_uniform,
    keyed_noise,
    keyed_sample,
    noisy_argmax,
)
from std_core.types import RequestError, Sampling


@dataclass(frozen=True)
class ResolvedSampling:
    """A request's sampling, with the checkpoint's defaults filled in, for one prompt.

    Args:
        sample: else greedy.
        keeps_scores: the result has the scores and logits of its tokens.
    """

    processors: LogitsProcessorList
    stop_ids: tuple[int, ...]
    sample: bool
    seed: int | None
    keeps_scores: bool = False

    @property
    def unseeded(self) -> bool:
        """Whether its tokens are drawn without a seed."""
        return self.sample and self.seed is None


def resolve_sampling(
    hf: Any, sampling: Sampling, prompt: torch.Tensor, vocabulary: int
) -> ResolvedSampling:
    """Combine a request's sampling with the checkpoint's generation configuration.

    Ids of the generation configuration that the vocabulary lacks are ignored, as in `generate`: no
    output has them. So are its fields that ask for what is not supported (`Engine.load` logs them).

    Args:
        hf: the Hugging Face model.
        prompt: (n,) ids, placeholders included.
        vocabulary: ids that the model can generate.

    Raises:
        RequestError: `invalid_request`: a stop id of the request is not in the vocabulary.
    """
    for stop_id in sampling.stop_token_ids:
        if not 0 <= stop_id < vocabulary:
            raise RequestError(
                "invalid_request",
                f"stop_token_ids has {stop_id}: the vocabulary's ids are 0 to {vocabulary - 1}",
            )
    requested: dict[str, Any] = {
        "temperature": sampling.temperature or None,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_penalty": sampling.repetition_penalty,
        "min_new_tokens": sampling.min_tokens or None,
        "do_sample": None if sampling.temperature is None else sampling.temperature > 0,
    }
    changes = {name: value for name, value in requested.items() if value is not None}
    config, _ = hf._prepare_generation_config(None, **changes)
    neutralize(config)
    config.max_length = len(prompt) + sampling.max_tokens
    default_stop_ids = (i for i in _as_tuple(config.eos_token_id) if 0 <= i < vocabulary)
    stop_ids = (*default_stop_ids, *sampling.stop_token_ids)
    # so that `min_new_tokens` suppresses the request's own stop ids as well
    config.eos_token_id = list(stop_ids) or None
    hf._prepare_special_tokens(config, True, device=prompt.device)
    processors = hf._get_logits_processor(
        config,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=prompt[None],
        device=prompt.device,
    )
    seed = sampling.seed if config.do_sample else None
    return ResolvedSampling(processors, stop_ids, bool(config.do_sample), seed)


def _as_tuple(ids: int | list[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def process_logits(
    logits: torch.Tensor,
    samplings: list[ResolvedSampling | None],
    history: torch.Tensor,
    lengths: torch.Tensor,
    errors: dict[int, RequestError] | None = None,
) -> torch.Tensor:
    """Apply each row's logits processors; returns float32 scores.

    Args:
        logits: (B, T, vocabulary).
        samplings: of each row; None for an empty slot.
        history: (B, capacity) ids of prompt, output and draft.
        lengths: (B,) tokens of the history before the first position; each further position has
            one more.
        errors: by row, filled with what processors raise; such a row's scores mean nothing. If
            None, the error is raised.

    Raises:
        RequestError: `invalid_request`: a processor has failed.
    """
    scores = logits.float()
    for row, sampling in enumerate(samplings):
        if sampling is None or not sampling.processors:
            continue
        try:
            with isolated("a logits processor"):
                _process_row(scores[row], sampling.processors, history[row], int(lengths[row]))
        except RequestError as error:
            if errors is None:
                raise
            errors[row] = error
    return scores


def _process_row(
    scores: torch.Tensor, processors: LogitsProcessorList, history: torch.Tensor, length: int
) -> None:
    """Process one row's scores (T, vocabulary) in place."""
    for t in range(len(scores)):
        ids: Any = history[None, : length + t]
        scores[t] = processors(ids, scores[t : t + 1])[0]


def sample_tokens(scores: torch.Tensor, state: SamplingState, places: torch.Tensor) -> torch.Tensor:
    """Choose tokens (B, T): the maximum of scores plus noise; without noise in greedy rows.

    Args:
        scores: (B, T, vocabulary).
        places: (B, T) place of each token in its row's output, from 0.
    """
    if not state.sampled:
        return scores.argmax(-1)
    if not state.fresh:
        return keyed_sample(scores, state.seeds, state.seeded, places)
    return noisy_argmax(scores, places, state.noise)


@dataclass(frozen=True)
class SamplingState:
    """How the rows of a batch sample; rebuilt when a row enters or leaves.

    Args:
        seeds: (B,) of rows with a seed, else 0.
        seeded: (B,) bool, rows that sample with a seed.
        unseeded: (B,) bool, rows that sample without one. Rows that are neither are greedy.
        sampled: any row samples.
        fresh: any row samples without a seed.
    """

    seeds: torch.Tensor
    seeded: torch.Tensor
    unseeded: torch.Tensor
    generator: torch.Generator
    sampled: bool
    fresh: bool

    @classmethod
    def of(
        cls, samplings: list[ResolvedSampling | None], generator: torch.Generator
    ) -> SamplingState:
        """Collect the rows' sampling; None for an empty slot."""
        device = generator.device
        seeds = [s.seed if s is not None else None for s in samplings]
        seeded = [seed is not None for seed in seeds]
        unseeded = [s is not None and s.unseeded for s in samplings]
        return cls(
            seeds=torch.tensor([seed or 0 for seed in seeds]).to(device),
            seeded=torch.tensor(seeded).to(device),
            unseeded=torch.tensor(unseeded).to(device),
            generator=generator,
            sampled=any(seeded) or any(unseeded),
            fresh=any(unseeded),
        )

    def noise(self, places: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """(B, T, vocabulary) Gumbel noise: keyed by seed and place, fresh, or 0 in greedy rows."""
        keyed = keyed_noise(self.seeds, self.seeded, places, vocabulary)
        uniform = torch.rand(keyed.shape, generator=self.generator, device=keyed.device)
        return keyed + gumbel_from_uniform(uniform.clamp_(min=1e-20)) * self.unseeded[:, None, None]
