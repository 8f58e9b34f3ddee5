"""Thresholds of activation sparsity."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from std_core.engine.draft_models import DraftModels
from std_core.engine.engine import Engine
from std_core.kernels.sparse_linear import sparsify
from std_core.model.drafters import SparseLinear, build_drafter, projections
from std_core.model.sparsity import calibrate_thresholds, record_projection_inputs
from std_core.types import Draft, Request, Sampling


class _Decoder(nn.Module):
    """Two layers of two projections, of which one matters little."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"big": nn.Linear(64, 96), "small": nn.Linear(64, 32)}) for _ in "12"
        )


@settings(max_examples=20, deadline=None)
@given(st.floats(0.02, 1.0), st.integers(0, 2**31))
def test_a_layer_reads_the_share_that_was_asked_for(keep: float, seed: int) -> None:
    decoder = _Decoder()
    rng = torch.Generator().manual_seed(seed)
    seen = {name: torch.randn(200, 64, generator=rng) for name, _ in projections(decoder)}
    found = calibrate_thresholds(decoder, seen, keep)
    assert set(found) == set(seen)
    for layer in ("0", "1"):
        read = total = 0.0
        for name, linear in projections(decoder):
            if name.split(".")[1] == layer:
                share = float((sparsify(seen[name], found[name]) != 0).float().mean())
                read = read + share * linear.weight.numel()
                total = total + linear.weight.numel()
        assert abs(read / total - keep) < 0.01


def test_channels_are_given_up_where_that_costs_least() -> None:
    """Inputs of one projection are mostly noise far below a few large channels: it can do without
    most of them."""
    decoder = _Decoder()
    seen = {name: torch.randn(200, 64) for name, _ in projections(decoder)}
    for name in seen:
        if name.endswith("big"):
            seen[name][:, 8:] *= 0.01
    found = calibrate_thresholds(decoder, seen, 0.5)
    share = {name: float((x.abs() > found[name]).float().mean()) for name, x in seen.items()}
    assert share["layers.0.big"] < 0.45 < 0.6 < share["layers.0.small"]


def test_activations_are_recorded_and_the_model_stays_as_it_was(engine: Engine) -> None:
    decoder = engine.model.decoder
    with record_projection_inputs(decoder) as seen:
        decoder.layers[0].mlp(torch.randn(1, 3, 192))
    decoder.layers[0].mlp(torch.randn(1, 3, 192))
    assert {name: x.shape[0] for name, x in seen.items()} == {
        f"layers.0.mlp.{p}_proj": 3 for p in ("gate", "up", "down")
    }
    names = [name for name, _ in projections(decoder)]
    cheap = build_drafter(
        engine.model, Draft("full", channels=0.5, depth=0.4), dict.fromkeys(names, 0.1)
    )
    assert len(names) == 7 * 5 and [name for name, _ in projections(decoder)] == names
    assert {id(p) for p in cheap.decoder.parameters()} <= {id(p) for p in decoder.parameters()}


def test_an_early_exit_leaves_channels_out_too(engine: Engine) -> None:
    """Thresholds are known only when the first prompt has been read; no drafter is made before."""
    draft = Draft("full", depth=0.5, channels=0.5)
    engine = replace(engine, draft_models=DraftModels(engine.model, engine.checkpoint))
    result = next(engine.run([Request("a", "Describe this.", sampling=Sampling(3))], draft))
    made = [
        m for m in engine.draft_models.get(draft).decoder.modules() if isinstance(m, SparseLinear)
    ]
    assert len(made) == 7 * engine.draft_models.get(draft).layers and result.error is None
    assert result.weight_keep < engine.draft_models.weight_keep(Draft("full", depth=0.5))
