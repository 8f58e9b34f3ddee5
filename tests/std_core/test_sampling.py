from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from std_core.sampling import keyed_gumbel

SEEDS = st.integers(-(2**63), 2**63 - 1)


@given(SEEDS, st.integers(0, 10_000), st.integers(2, 50))
def test_noise_depends_on_seed_place_and_token_alone(seed: int, place: int, vocabulary: int) -> None:
    one = keyed_gumbel(torch.tensor([seed]), torch.tensor([[place]]), vocabulary)
    seeds, places = torch.tensor([1, seed]), torch.tensor([[7, 8], [place - 1, place]])
    assert torch.equal(keyed_gumbel(seeds, places, vocabulary + 5)[1, 1, :vocabulary], one[0, 0])
    assert one.isfinite().all()


def test_noise_is_gumbels() -> None:
    """Mean γ, variance π²/6, and the maximum of two independent draws shifted by log 2."""
    noise = keyed_gumbel(torch.arange(50), torch.arange(40).expand(50, -1), 1000).double()
    assert abs(noise.mean() - 0.57722) < 0.003
    assert abs(noise.var() - 1.64493) < 0.01
    for a, b in ((noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:]), (noise[..., :-1], noise[..., 1:])):
        assert abs(torch.maximum(a, b).mean() - 0.57722 - 0.69315) < 0.003
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.003


def test_the_maximum_of_scores_and_noise_is_a_draw() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    noise = keyed_gumbel(torch.arange(1000), torch.arange(20).expand(1000, -1), 4)
    drawn = torch.bincount((p.log() + noise).argmax(-1).flatten(), minlength=4).double()
    expected = p.double() * 20_000
    assert ((drawn - expected) ** 2 / expected).sum() < 11.3  # χ²(3), p = 0.01; the noise is fixed
