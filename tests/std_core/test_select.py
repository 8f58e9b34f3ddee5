from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from std_core.select import select
from std_core.types import Draft


@given(
    st.sampled_from(["full", "random", "std", "window"]),
    st.integers(1, 4),
    st.integers(1, 60),
    st.integers(1, 80),
    st.integers(0, 9),
)
def test_every_policy_keeps_its_budget_of_different_places(
    policy: str, heads: int, visual: int, k: int, seed: int
) -> None:
    chosen = select(Draft(policy, k=k, seed=seed), torch.rand(heads, visual), layer=3, row_seed=seed)  # type: ignore[arg-type]
    assert chosen.shape == (heads, visual if policy == "full" else min(k, visual))
    assert chosen.min() >= 0 and chosen.max() < visual
    assert (chosen.diff(dim=1) > 0).all()  # ascending, none twice


def test_std_keeps_the_places_that_the_text_looks_at_most() -> None:
    mass = torch.tensor([[0.1, 0.5, 0.2, 0.0], [0.3, 0.0, 0.1, 0.2]])
    assert select(Draft("std", k=2), mass, 0, 0).tolist() == [[1, 2], [0, 3]]


def test_random_differs_between_layers_rows_and_seeds_and_repeats_itself() -> None:
    mass = torch.zeros(1, 1000)
    pick = lambda seed, layer, row: select(Draft("random", k=50, seed=seed), mass, layer, row).tolist()
    assert pick(0, 0, 0) == pick(0, 0, 0)
    assert len({str(pick(*where)) for where in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))}) == 4


@pytest.mark.parametrize("bad", [{"keep": 0.0}, {"keep": 1.5}, {"k": 0}, {"gamma": 0}])
def test_a_draft_out_of_range_is_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Draft(**bad)
