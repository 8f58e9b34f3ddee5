"""bfloat16 tokens that do not depend on the draft or the batch: `strict`, and the CPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from std_core.engine.engine import Engine
from std_core.kernels.cpu import loader
from std_core.types import Draft, Request, Sampling

MakeEngine = Callable[..., Engine]
DRAFTS = (Draft(), Draft("random", k=2, gamma=8), Draft("ngram", gamma=4), Draft("full", gamma=6))


@pytest.fixture(scope="session")
def bfloat16_engine(tiny_model: Path) -> MakeEngine:
    """Engines with other settings and one model."""
    loaded = Engine.load(str(tiny_model), dtype="bfloat16")
    return lambda **settings: Engine(loaded.model, loaded.checkpoint, **settings)


@pytest.fixture
def pytorch_engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """The same with PyTorch's operations alone, whose sums depend on the shapes of their inputs."""
    monkeypatch.setattr(loader, "supports", lambda name, of: False)
    loaded = Engine.load(str(tiny_model), dtype="bfloat16")
    return lambda **settings: Engine(loaded.model, loaded.checkpoint, **settings)


@pytest.fixture(scope="session")
def mixed(requests: list[Request]) -> list[Request]:
    """Clips, and questions on a shared clip; greedy and seeded."""
    captions = [
        replace(r, sampling=replace(r.sampling, max_tokens=24), video_id="") for r in requests
    ]
    questions = [
        Request(
            "",
            prompt=f"What is in scene {i}?",
            frames=requests[4].frames,
            video_id="clip",
            sampling=Sampling(16),
        )
        for i in range(3)
    ]
    seeded = Sampling(24, temperature=0.8, top_p=0.9, repetition_penalty=1.1)
    mixed = [replace(r, request_id=str(i)) for i, r in enumerate([*captions, *questions])]
    for i in range(0, len(mixed), 5):
        mixed[i] = replace(mixed[i], sampling=replace(seeded, seed=i))
    return mixed


def tokens(
    engine: Engine, requests: Iterable[Request], draft: Draft | None
) -> dict[str, list[int]]:
    return {r.request_id: r.token_ids for r in engine.run(requests, draft)}


def test_strict_tokens_equal_the_dense_loops(
    pytorch_engine: MakeEngine, mixed: list[Request]
) -> None:
    """For any draft, order, batch, and whether a video is shared."""
    settings = {"max_num_seqs": 3, "strict": 9}
    dense = tokens(pytorch_engine(**settings), mixed, None)
    for draft in DRAFTS:
        engine = pytorch_engine(**settings)
        assert tokens(engine, reversed(mixed), draft) == dense
        assert engine.counters.vision_passes < len(mixed)
    plain, drafted = (
        tokens(pytorch_engine(max_num_seqs=3), mixed, draft) for draft in (None, DRAFTS[1])
    )
    assert plain != drafted, "nothing differs without `strict`: the test shows nothing"


def test_cpu_kernels_need_no_strict(bfloat16_engine: MakeEngine, mixed: list[Request]) -> None:
    """They sum a row in the same order in any batch and at any width of a step."""
    engine = bfloat16_engine(max_num_seqs=1)
    if not loader.supports("linear", engine.model.embedding.weight):
        pytest.skip("no AVX512_BF16 or no compiler on this machine")
    alone = tokens(engine, mixed, None)
    for draft in (None, *DRAFTS):
        assert tokens(bfloat16_engine(max_num_seqs=3), reversed(mixed), draft) == alone


def test_strict_has_to_exceed_gamma(bfloat16_engine: MakeEngine, requests: list[Request]) -> None:
    with pytest.raises(ValueError, match="γ = 5"):
        next(bfloat16_engine(strict=5).run(requests, Draft(gamma=5)))
