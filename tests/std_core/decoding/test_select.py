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
def test_every_policy_keeps_its_budget_of_distinct_indices(
    policy: str, heads: int, visual: int, k: int, nucleus: float, seed: int
) -> None:
    mass = [torch.rand(heads, visual) for _ in range(3)]
    for chosen in select(Draft(policy, k=k, seed=seed, nucleus=nucleus), mass, row_seed=seed):  # type: ignore[arg-type]
        assert chosen.shape == (heads, min(k, visual))
        assert chosen.min() >= 0 and chosen.max() < visual
        assert (chosen.diff(dim=1) > 0).all()  # ascending and distinct


def test_std_keeps_the_entries_with_most_attention() -> None:
    mass = torch.tensor([[0.1, 0.5, 0.2, 0.0], [0.3, 0.0, 0.1, 0.2]])
    for selected in select(Draft("std", k=2), [mass, mass.flip(1)], 0):
        assert selected.tolist() == [[1, 2], [0, 3]]


def test_snapkv_keeps_the_sinks_too() -> None:
    mass = torch.tensor([[0.0, 0.0, 0.1, 0.5, 0.2, 0.9]])
    assert select(Draft("snapkv", k=4, sinks=2), [mass], 0)[0].tolist() == [[0, 1, 3, 5]]


def test_specvlm_is_one_set_of_a_nucleus_and_an_even_sample_of_the_rest() -> None:
    """Entries 3 and 9 hold λ = 0.6 of the mass (mean over layers and heads); four of the other ten
    are an even sample.
    """
    one, other = torch.full((2, 2, 12), 1.0)
    one[0, 3] = 40.0
    other[1, 9] = 30.0
    sets = select(Draft("specvlm", k=6, nucleus=0.6), [one, other], 0)
    assert len({str(s[head].tolist()) for s in sets for head in (0, 1)}) == 1
    assert sets[0][0].tolist() == [1, 3, 4, 7, 9, 10]
    capped = select(Draft("specvlm", k=1, nucleus=0.6), [one, other], 0)
    assert capped[0].tolist() == [[3], [3]]


@given(st.integers(2, 200), st.floats(0.05, 1.0), st.floats(0.05, 1.0), st.integers(0, 2**31))
def test_a_nucleus_is_the_smallest_set_with_its_mass(
    visual: int, nucleus: float, keep: float, seed: int
) -> None:
    mass = torch.rand(1, visual, generator=torch.Generator().manual_seed(seed)) ** 4 + 1e-6
    draft = Draft("specvlm", keep=keep, nucleus=nucleus)
    chosen = set(select(draft, [mass], 0)[0][0].tolist())
    order = mass[0].argsort(descending=True).tolist()
    core = []
    total = 0.0
    while total < nucleus * float(mass.sum()) * (1 - 1e-5) and len(core) < draft.budget(visual):
        core.append(order[len(core)])
        total += float(mass[0, core[-1]])
    assert set(core) <= chosen


def test_random_is_reproducible_and_differs_between_layers_rows_and_seeds() -> None:
    mass = [torch.zeros(1, 1000)] * 2

    def selected(seed: int, layer: int, row_seed: int) -> list[list[int]]:
        return select(Draft("random", k=50, seed=seed), mass, row_seed)[layer].tolist()

    assert selected(0, 0, 0) == selected(0, 0, 0)
    others = [selected(1, 0, 0), selected(0, 1, 0), selected(0, 0, 1)]
    assert len({str(indices) for indices in (selected(0, 0, 0), *others)}) == 4


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
