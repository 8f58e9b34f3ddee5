from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from std_core.decoding.token_sampling import ResolvedSampling, SamplingState, sample_tokens

RULES = st.one_of(
    st.none(),
    st.just(ResolvedSampling(LogitsProcessorList(), (), False, None)),
    st.just(ResolvedSampling(LogitsProcessorList(), (), True, None)),
    st.integers(0, 2**63 - 1).map(
        lambda seed: ResolvedSampling(LogitsProcessorList(), (), True, seed)
    ),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(RULES, min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(2, 300),
    st.integers(0, 2**31),
)
def test_each_row_draws_as_its_rule_has_it(
    samplings: list[ResolvedSampling | None], width: int, vocabulary: int, seed: int
) -> None:
    """Rows with a seed draw the same in any company; greedy ones and empty slots take the maximum;
    the others' tokens depend on the generator alone."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(samplings), width, vocabulary, generator=rng)
    places = torch.randint(1000, (len(samplings), width), generator=rng)
    tokens, again = (
        sample_tokens(
            scores, SamplingState.of(samplings, torch.Generator().manual_seed(generator)), places
        )
        for generator in (seed, seed)
    )
    assert torch.equal(tokens, again)
    for row, rule in enumerate(samplings):
        alone = slice(row, row + 1)
        if rule is None or not rule.sample:
            assert torch.equal(tokens[row], scores[row].argmax(-1))
        elif rule.seed is not None:
            assert torch.equal(
                tokens[alone],
                sample_tokens(scores[alone], SamplingState.of([rule], rng), places[alone]),
            )
