from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from std_core.decoding.token_sampling import ResolvedSampling, SamplingState, sample_tokens

SAMPLINGS = st.one_of(
    st.none(),
    st.just(ResolvedSampling(LogitsProcessorList(), (), False, None)),
    st.just(ResolvedSampling(LogitsProcessorList(), (), True, None)),
    st.integers(0, 2**63 - 1).map(
        lambda seed: ResolvedSampling(LogitsProcessorList(), (), True, seed)
    ),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SAMPLINGS, min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(2, 300),
    st.integers(0, 2**31),
)
def test_each_row_samples_by_its_own_parameters(
    samplings: list[ResolvedSampling | None], width: int, vocabulary: int, seed: int
) -> None:
    """Seeded rows sample the same in any batch, greedy rows and empty slots take the maximum, and
    the tokens of unseeded rows depend on the generator alone.
    """
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(samplings), width, vocabulary, generator=rng)
    places = torch.randint(1000, (len(samplings), width), generator=rng)

    def sampled() -> torch.Tensor:
        state = SamplingState.of(samplings, torch.Generator().manual_seed(seed))
        return sample_tokens(scores, state, places)

    tokens = sampled()
    assert torch.equal(tokens, sampled())
    for row, sampling in enumerate(samplings):
        alone = slice(row, row + 1)
        if sampling is None or not sampling.sample:
            assert torch.equal(tokens[row], scores[row].argmax(-1))
        elif sampling.seed is not None:
            state = SamplingState.of([sampling], rng)
            assert torch.equal(tokens[alone], sample_tokens(scores[alone], state, places[alone]))
