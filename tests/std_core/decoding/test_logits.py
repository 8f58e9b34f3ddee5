"""Processors for all rows at once against transformers' own, row by row."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from std_core.decoding.logits import LogitsProcessors
from std_core.decoding.token_sampling import ResolvedSampling, process_logits

CPU = torch.device("cpu")


@st.composite
def samplings(draw: st.DrawFn) -> ResolvedSampling | None:
    if draw(st.integers(0, 4)) == 0:
        return None
    asked = [
        RepetitionPenaltyLogitsProcessor(draw(st.sampled_from([0.8, 1.05, 1.3]))),
        MinNewTokensLengthLogitsProcessor(
            5, draw(st.integers(1, 9)), draw(st.sampled_from([[3], [0, 7]]))
        ),
        TemperatureLogitsWarper(draw(st.sampled_from([0.01, 0.7, 1.5]))),
        TopKLogitsWarper(draw(st.sampled_from([1, 5, 40, 500]))),
        TopPLogitsWarper(draw(st.sampled_from([0.001, 0.5, 0.95, 1.0]))),
    ]
    some = [processor for processor in asked if draw(st.booleans())]
    return ResolvedSampling(LogitsProcessorList(some), (3,), True, 1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(samplings(), min_size=1, max_size=4),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_all_rows_at_once_are_transformers_own(
    asked: list[ResolvedSampling | None], width: int, coarse: bool, seed: int
) -> None:
    """Coarse scores have ties."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(asked), width, 60, generator=rng) * 3
    logits = logits.round() if coarse else logits
    history = torch.randint(0, 60, (len(asked), 30), generator=rng)
    lengths = torch.randint(1, 30 - width, (len(asked),), generator=rng)
    logits_processors = LogitsProcessors.of(asked, 60, CPU)
    assert logits_processors is not None
    got = logits_processors.apply(logits.clone(), history, lengths)
    want = process_logits(logits.clone(), asked, history, lengths)
    if coarse:  # of equal scores at the edge of the mass any may be cut
        assert torch.equal(got.sort(-1).values, want.sort(-1).values)
    else:
        assert torch.equal(got, want)


def test_a_processor_that_is_not_known_is_left_to_transformers() -> None:
    other = ResolvedSampling(
        LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)]), (), False, None
    )
    assert LogitsProcessors.of([None, other], 60, CPU) is None
