"""Counter-based Gumbel noise, and the C++ sampler against PyTorch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from std_core.kernels.cpu import loader
from std_core.kernels.gumbel_noise import keyed_gumbel, keyed_noise, keyed_sample, noisy_argmax

SEEDS = st.integers(-(2**63), 2**63 - 1)
VOCABULARIES = st.one_of(st.integers(1, 100), st.integers(8150, 8250), st.integers(16_380, 16_450))
ONES = 2**64 - 1


@given(SEEDS, st.integers(0, 10_000), st.integers(2, 50))
def test_noise_depends_on_seed_position_and_token_alone(
    seed: int, position: int, vocabulary: int
) -> None:
    one = keyed_gumbel(torch.tensor([seed]), torch.tensor([[position]]), vocabulary)
    seeds = torch.tensor([1, seed])
    positions = torch.tensor([[7, 8], [position - 1, position]])
    assert torch.equal(keyed_gumbel(seeds, positions, vocabulary + 5)[1, 1, :vocabulary], one[0, 0])
    assert one.isfinite().all()


def test_noise_has_the_gumbel_distribution() -> None:
    """Mean γ, variance π²/6, and the maximum of two independent draws shifted by log 2."""
    noise = keyed_gumbel(torch.arange(50), torch.arange(40).expand(50, -1), 1000).double()
    assert abs(noise.mean() - 0.57722) < 0.003
    assert abs(noise.var() - 1.64493) < 0.01
    for a, b in (
        (noise[:-1], noise[1:]),
        (noise[:, :-1], noise[:, 1:]),
        (noise[..., :-1], noise[..., 1:]),
    ):
        assert abs(torch.maximum(a, b).mean() - 0.57722 - 0.69315) < 0.003
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.003


def test_the_argmax_of_scores_and_noise_samples_the_softmax() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    noise = keyed_gumbel(torch.arange(1000), torch.arange(20).expand(1000, -1), 4)
    drawn = torch.bincount((p.log() + noise).argmax(-1).flatten(), minlength=4).double()
    expected = p.double() * 20_000
    assert ((drawn - expected) ** 2 / expected).sum() < 11.3  # χ²(3), p = 0.01; the noise is fixed


# ---------------------------------------------------------------- the C++ version against PyTorch's


@pytest.fixture
def compiled() -> None:
    if not loader.supports("draw", torch.empty(0)):
        pytest.skip("no compiler, or the CPU lacks the instructions")


def by_pytorch(
    scores: torch.Tensor, seeds: torch.Tensor, seeded: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    return noisy_argmax(scores, positions, lambda column, n: keyed_noise(seeds, seeded, column, n))


@settings(max_examples=120, deadline=None)
@given(
    st.data(),
    st.lists(st.tuples(SEEDS, st.booleans()), min_size=1, max_size=4),
    st.integers(1, 3),
    VOCABULARIES,
)
@pytest.mark.usefixtures("compiled")
def test_the_cpp_sampler_equals_pytorchs(
    data: st.DataObject, rows: list[tuple[int, bool]], width: int, vocabulary: int
) -> None:
    """Flat and widely spread scores, few or no tokens left after filtering, sums with ties after
    rounding, a dominant score, and a non-contiguous slice.
    """
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    scale = data.draw(st.sampled_from([0, 1e-6, 0.1, 1, 3, 30, 1e4]))
    scores = torch.randn(len(rows), width + 1, vocabulary, generator=rng)[:, :width] * scale
    scores += data.draw(st.sampled_from([0, -1e3, 1e7, -1e30]))
    scores[
        torch.rand(scores.shape, generator=rng) < data.draw(st.sampled_from([0, 0.5, 0.999, 1]))
    ] = -torch.inf
    if data.draw(st.booleans()):
        scores[..., data.draw(st.integers(0, vocabulary - 1))] = data.draw(
            st.sampled_from([9.0, 40.0, 1e5, torch.inf])
        )
    seeds, seeded = (torch.tensor(column) for column in zip(*rows, strict=True))
    positions = torch.randint(100_000, (len(rows), width), generator=rng)
    assert torch.equal(
        keyed_sample(scores, seeds, seeded, positions), by_pytorch(scores, seeds, seeded, positions)
    )


@pytest.mark.usefixtures("compiled")
def test_the_number_of_threads_changes_no_token() -> None:
    scores = torch.randn(3, 2, 20_000)
    positions = torch.arange(6).view(3, 2)
    seeds = torch.arange(3)
    seeded = torch.tensor([True, False, True])
    before = torch.get_num_threads()
    drawn = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        drawn.append(keyed_sample(scores, seeds, seeded, positions))
    torch.set_num_threads(before)
    assert all(
        torch.equal(tokens, by_pytorch(scores, seeds, seeded, positions)) for tokens in drawn
    )


@settings(max_examples=40, deadline=None)
@given(SEEDS, VOCABULARIES, st.data())
@pytest.mark.usefixtures("compiled")
def test_nan_counts_as_the_maximum(seed: int, vocabulary: int, data: st.DataObject) -> None:
    """The engine detects a broken draft by the NaN score of its token."""
    scores = torch.randn(2, 1, vocabulary)
    scores[:, :, data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=1))] = torch.nan
    scores[:, :, data.draw(st.lists(st.integers(0, vocabulary - 1)))] = torch.inf
    where = (
        torch.tensor([seed, 0]),
        torch.tensor([True, False]),
        torch.zeros(2, 1, dtype=torch.long),
    )
    assert torch.equal(keyed_sample(scores, *where), by_pytorch(scores, *where))


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 64),
    st.one_of(st.just(0), st.just(ONES), st.integers(0, ONES)),
    st.integers(0, 69),
    st.data(),
)
@pytest.mark.usefixtures("compiled")
def test_tokens_with_rare_noise_are_not_skipped(
    leading: int, rest: int, token: int, data: st.DataObject
) -> None:
    """Bits with any number of leading ones, up to infinite noise, at scores around the best sum of
    the others: the C++ version must not skip a token that wins.
    """
    bits = ONES ^ ONES >> leading | rest & ONES >> min(leading + 1, 64)
    seeds = torch.tensor([seed_of(bits, token, 5)])
    positions = torch.tensor([[5]])
    seeded = torch.tensor([True])
    noise = keyed_gumbel(seeds, positions, 70)
    scores = torch.randn(1, 1, 70) * data.draw(st.sampled_from([0, 1, 10])) + data.draw(
        st.sampled_from([0, 99, 1e6])
    )
    others = (scores + noise)[torch.arange(70)[None, None] != token].max()
    if leading >= 53:
        assert noise[0, 0, token] == torch.inf
        scores[0, 0, token] = -1e30
    else:
        scores[0, 0, token] = (
            others - noise[0, 0, token] + data.draw(st.sampled_from([-1e-6, 0, 1e-6]))
        )
    assert torch.equal(
        keyed_sample(scores, seeds, seeded, positions), by_pytorch(scores, seeds, seeded, positions)
    )


def seed_of(bits: int, token: int, position: int) -> int:
    """The seed whose noise at a position and token has these 64 bits, by inverting the mixer."""
    golden = 0x9E3779B97F4A7C15
    key = unmixed(unmixed(bits) - token * golden)
    seed = (unmixed(key - position * golden) - 1) * pow(golden, -1, 2**64) % 2**64
    return seed - 2**64 if seed >= 2**63 else seed


def unmixed(x: int) -> int:
    x = unshifted(x % 2**64, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    return unshifted(unshifted(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64, 30)


def unshifted(x: int, by: int) -> int:
    return x ^ x >> by ^ x >> 2 * by
