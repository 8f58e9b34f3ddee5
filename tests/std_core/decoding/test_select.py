from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from std_core.decoding.select import select
from std_core.types import Draft

SELECTIONS = ["random", "std", "window", "specvlm", "snapkv"]


@given(
    st.sampled_from(SELECTIONS),
    st.integers(1, 4),
    st.integers(1, 60),
    st.integers(1, 80),
    st.sampled_from([0.1, 0.5, 1.0]),
    st.integers(0, 9),
)
def test_every_policy_keeps_its_budget_of_different_places(
    policy: str, heads: int, visual: int, k: int, nucleus: float, seed: int
) -> None:
    mass = [torch.rand(heads, visual) for _ in range(3)]
    for chosen in select(Draft(policy, k=k, seed=seed, nucleus=nucleus), mass, row_seed=seed):  # type: ignore[arg-type]
        assert chosen.shape == (heads, min(k, visual))
        assert chosen.min() >= 0 and chosen.max() < visual
        assert (chosen.diff(dim=1) > 0).all()  # ascending, none twice


def test_std_keeps_the_places_that_the_text_looks_at_most() -> None:
    mass = torch.tensor([[0.1, 0.5, 0.2, 0.0], [0.3, 0.0, 0.1, 0.2]])
    assert select(Draft("std", k=2), [mass, mass.flip(1)], 0)[0].tolist() == [[1, 2], [0, 3]]
    assert select(Draft("std", k=2), [mass, mass.flip(1)], 0)[1].tolist() == [[1, 2], [0, 3]]


def test_snapkv_keeps_the_sinks_besides() -> None:
    mass = torch.tensor([[0.0, 0.0, 0.1, 0.5, 0.2, 0.9]])
    assert select(Draft("snapkv", k=4, sinks=2), [mass], 0)[0].tolist() == [[0, 1, 3, 5]]


def test_specvlm_is_one_set_of_a_nucleus_and_an_even_sample_of_the_rest() -> None:
    """λ = 0.6 of the mass lies in places 3 and 9 (mean over layers and heads); four more of the
    other ten are even."""
    one, other = torch.full((2, 2, 12), 1.0)
    one[0, 3] = 40.0
    other[1, 9] = 30.0
    sets = select(Draft("specvlm", k=6, nucleus=0.6), [one, other], 0)
    assert len({str(s[head].tolist()) for s in sets for head in (0, 1)}) == 1
    assert sets[0][0].tolist() == [1, 3, 4, 7, 9, 10]
    assert select(Draft("specvlm", k=1, nucleus=0.6), [one, other], 0)[0].tolist() == [
        [3],
        [3],
    ]  # capped by the budget


@given(st.integers(2, 200), st.floats(0.05, 1.0), st.floats(0.05, 1.0), st.integers(0, 2**31))
def test_a_nucleus_is_the_smallest_set_with_its_mass(
    visual: int, nucleus: float, keep: float, seed: int
) -> None:
    mass = torch.rand(1, visual, generator=torch.Generator().manual_seed(seed)) ** 4 + 1e-6
    draft = Draft("specvlm", keep=keep, nucleus=nucleus)
    chosen = set(select(draft, [mass], 0)[0][0].tolist())
    order = mass[0].argsort(descending=True).tolist()
    needed = []
    total = 0.0
    while total < nucleus * float(mass.sum()) * (1 - 1e-5) and len(needed) < draft.budget(visual):
        needed.append(order[len(needed)])
        total += float(mass[0, needed[-1]])
    assert set(needed) <= chosen


def test_random_differs_between_layers_rows_and_seeds_and_repeats_itself() -> None:
    mass = [torch.zeros(1, 1000)] * 2
    pick = lambda seed, layer, row: select(Draft("random", k=50, seed=seed), mass, row)[
        layer
    ].tolist()
    assert pick(0, 0, 0) == pick(0, 0, 0)
    assert len({str(pick(*where)) for where in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))}) == 4


@pytest.mark.parametrize(
    "bad",
    [
        {"keep": 0.0},
        {"keep": 1.5},
        {"k": 0},
        {"gamma": 0},
        {"nucleus": 0.0},
        {"channels": 1.1},
        {"depth": 0.0},
        {"refresh": -1},
        {"refresh": 2, "policy": "random"},
        {"refresh": 2, "model": "small"},
        {"channels": 0.5, "model": "small"},
        {"depth": 0.5, "policy": "ngram"},
    ],
)
def test_a_draft_out_of_range_is_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Draft(**bad)
