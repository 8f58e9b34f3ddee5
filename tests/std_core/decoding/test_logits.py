"""Batched logits processors against transformers' own, row by row."""

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
    processors = [
        RepetitionPenaltyLogitsProcessor(draw(st.sampled_from([0.8, 1.05, 1.3]))),
        MinNewTokensLengthLogitsProcessor(
            5, draw(st.integers(1, 9)), draw(st.sampled_from([[3], [0, 7]]))
        ),
        TemperatureLogitsWarper(draw(st.sampled_from([0.01, 0.7, 1.5]))),
        TopKLogitsWarper(draw(st.sampled_from([1, 5, 40, 500]))),
        TopPLogitsWarper(draw(st.sampled_from([0.001, 0.5, 0.95, 1.0]))),
    ]
    some = [processor for processor in processors if draw(st.booleans())]
    return ResolvedSampling(LogitsProcessorList(some), (3,), True, 1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(samplings(), min_size=1, max_size=4),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_batched_scores_equal_transformers(
    rows: list[ResolvedSampling | None], width: int, coarse: bool, seed: int
) -> None:
    """Coarse scores have ties."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), width, 60, generator=rng) * 3
    logits = logits.round() if coarse else logits
    history = torch.randint(0, 60, (len(rows), 30), generator=rng)
    lengths = torch.randint(1, 30 - width, (len(rows),), generator=rng)
    processors = LogitsProcessors.of(rows, 60, CPU)
    assert processors is not None
    scores = processors.apply(logits.clone(), history, lengths)
    expected = process_logits(logits.clone(), rows, history, lengths)
    if coarse:  # of equal scores at the edge of the mass any may be cut
        assert torch.equal(scores.sort(-1).values, expected.sort(-1).values)
    else:
        assert torch.equal(scores, expected)


def test_a_row_with_an_unsupported_processor_falls_back_to_transformers() -> None:
    other = ResolvedSampling(
        LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)]), (), False, None
    )
    assert LogitsProcessors.of([None, other], 60, CPU) is None
