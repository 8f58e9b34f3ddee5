"""From logits to the choice of a token, per row and per position.

What bends the logits is transformers' own list of processors, made from the checkpoint's generation
configuration and the request's sampling, exactly as `generate` makes it; so penalties, filters and
minimum lengths are theirs. What draws is ours: a row with a seed adds Gumbel noise that is a pure
function of (seed, place in the output, token), and takes the maximum; draft and full model add the
same noise, so equality decides acceptance, and the text depends on neither policy, γ, batch nor
restarts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList

from std_core.kernels.gumbel_noise import (
    gumbel_from_uniform,
    keyed_noise,
    keyed_sample,
    noisy_argmax,
)
from std_core.types import Sampling


@dataclass(frozen=True)
class ResolvedSampling:
    """A request's sampling, settled for one checkpoint and one prompt."""

    processors: LogitsProcessorList
    stop_ids: tuple[int, ...]
    sample: bool  # else greedy
    seed: int | None


def resolve_sampling(hf: Any, sampling: Sampling, prompt: torch.Tensor) -> ResolvedSampling:
    """What a request's sampling comes to with a checkpoint's generation configuration.

    Args:
        hf: the Hugging Face model.
        prompt: (n,) ids, placeholders included.
    """
    wanted: dict[str, Any] = {
        "temperature": sampling.temperature or None,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_penalty": sampling.repetition_penalty,
        "min_new_tokens": sampling.min_tokens or None,
        "do_sample": None if sampling.temperature is None else sampling.temperature > 0,
    }
    config, _ = hf._prepare_generation_config(
        None, **{k: v for k, v in wanted.items() if v is not None}
    )
    eos = config.eos_token_id
    stop_ids = (
        *([] if eos is None else [eos] if isinstance(eos, int) else eos),
        *sampling.stop_token_ids,
    )
    config.eos_token_id = (
        list(stop_ids) or None
    )  # so that `min_new_tokens` holds back the request's own too
    hf._prepare_special_tokens(config, True, device=prompt.device)
    processors = hf._get_logits_processor(
        config,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=prompt[None],
        device=prompt.device,
    )
    return ResolvedSampling(
        processors, stop_ids, bool(config.do_sample), sampling.seed if config.do_sample else None
    )


def process_logits(
    logits: torch.Tensor,
    samplings: list[ResolvedSampling | None],
    history: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """Processed scores, float32.

    Args: logits: (B, T, vocabulary). rules: of each row; None for an empty slot. Rows whose rule
        has no processor are left alone. history: (B, capacity) ids of prompt, output and draft.
        lengths: (B,) how many of them lie before the first position; each further position has one
        more.
    """
    scores = logits.float()
    for row, rule in enumerate(samplings):
        if rule is not None and rule.processors:
            seen = int(lengths[row])
            for t in range(scores.shape[1]):
                ids: Any = history[row : row + 1, : seen + t]
                scores[row, t] = rule.processors(ids, scores[row, t : t + 1])[0]
    return scores


def sample_tokens(
    scores: torch.Tensor, sampling_state: SamplingState, places: torch.Tensor
) -> torch.Tensor:
    """(B, T) tokens: the maximum of scores and noise.

    Args:
        places: (B, T) of the chosen token in its row's output, from 0.
    """
    if not sampling_state.sampled:
        return scores.argmax(-1)
    if not sampling_state.fresh:
        return keyed_sample(scores, sampling_state.seeds, sampling_state.seeded, places)
    return noisy_argmax(scores, places, sampling_state.noise)


@dataclass(frozen=True)
class SamplingState:
    """How the rows of a batch draw; all (B,). Rebuilt when a row enters or leaves."""

    seeds: torch.Tensor
    seeded: torch.Tensor  # bool
    unseeded: torch.Tensor  # bool; neither of the two is greedy
    generator: torch.Generator
    sampled: bool  # any row of the two kinds
    fresh: bool  # any row without a seed

    @classmethod
    def of(
        cls, samplings: list[ResolvedSampling | None], generator: torch.Generator
    ) -> SamplingState:
        device = generator.device
        seeded = [r is not None and r.seed is not None for r in samplings]
        unseeded = [r is not None and r.sample and r.seed is None for r in samplings]
        seeds = torch.tensor(
            [r.seed if r is not None and r.seed is not None else 0 for r in samplings]
        )
        return cls(
            seeds.to(device),
            torch.tensor(seeded).to(device),
            torch.tensor(unseeded).to(device),
            generator,
            any(seeded) or any(unseeded),
            any(unseeded),
        )

    def noise(self, places: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """(B, T, vocabulary) Gumbel noise: keyed for rows with a seed, fresh for the others that
        sample, else none."""
        keyed = keyed_noise(self.seeds, self.seeded, places, vocabulary)
        uniform = torch.rand(keyed.shape, generator=self.generator, device=keyed.device)
        return keyed + gumbel_from_uniform(uniform.clamp_(min=1e-20)) * self.unseeded[:, None, None]
