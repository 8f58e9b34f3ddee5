"""Calibration of activation sparsity, and drafters that use it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from std_core.engine.draft_models import DraftModels
from std_core.engine.engine import Engine
from std_core.kernels.sparse_linear import channel_major, sparsify
from std_core.model import drafters
from std_core.model.drafters import SparseLinear, build_drafter, projections
from std_core.model.model import Model
from std_core.model.sparsity import calibrate_thresholds, record_projection_inputs
from std_core.types import Draft, Request, Sampling


class _Decoder(nn.Module):
    """Two layers of two projections of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"big": nn.Linear(64, 96), "small": nn.Linear(64, 32)}) for _ in "12"
        )


@settings(max_examples=20, deadline=None)
@given(st.floats(0.02, 1.0), st.integers(0, 2**31))
def test_a_layer_reads_the_wanted_share_of_its_weights(keep: float, seed: int) -> None:
    decoder = _Decoder()
    rng = torch.Generator().manual_seed(seed)
    inputs = {name: torch.randn(200, 64, generator=rng) for name, _ in projections(decoder)}
    thresholds = calibrate_thresholds(decoder, inputs, keep)
    assert set(thresholds) == set(inputs)
    for layer in ("0", "1"):
        read = total = 0.0
        for name, linear in projections(decoder):
            if name.split(".")[1] == layer:
                share = float((sparsify(inputs[name], thresholds[name]) != 0).float().mean())
                read = read + share * linear.weight.numel()
                total = total + linear.weight.numel()
        assert abs(read / total - keep) < 0.01


def test_channels_are_dropped_where_the_output_error_is_least() -> None:
    """The inputs of one projection are small noise except in eight channels, so it keeps fewer."""
    decoder = _Decoder()
    inputs = {name: torch.randn(200, 64) for name, _ in projections(decoder)}
    for name in inputs:
        if name.endswith("big"):
            inputs[name][:, 8:] *= 0.01
    thresholds = calibrate_thresholds(decoder, inputs, 0.5)
    share = {name: float((x.abs() > thresholds[name]).float().mean()) for name, x in inputs.items()}
    assert share["layers.0.big"] < 0.45 < 0.6 < share["layers.0.small"]


def test_recording_inputs_and_building_a_drafter_leave_the_model_unchanged(engine: Engine) -> None:
    decoder = engine.model.decoder
    with record_projection_inputs(decoder) as inputs:
        decoder.layers[0].mlp(torch.randn(1, 3, 192))
    decoder.layers[0].mlp(torch.randn(1, 3, 192))
    assert {name: x.shape[0] for name, x in inputs.items()} == {
        f"layers.0.mlp.{p}_proj": 3 for p in ("gate", "up", "down")
    }
    names = [name for name, _ in projections(decoder)]
    drafter = build_drafter(
        engine.model, Draft("full", channels=0.5, depth=0.4), dict.fromkeys(names, 0.1)
    )
    assert len(names) == 7 * 5 and [name for name, _ in projections(decoder)] == names
    assert {id(p) for p in drafter.decoder.parameters()} <= {id(p) for p in decoder.parameters()}


def test_an_early_exit_draft_can_have_sparse_channels(engine: Engine) -> None:
    """Thresholds come from the first prompt's prefill, so the drafter is built after it."""
    draft = Draft("full", depth=0.5, channels=0.5)
    engine = replace(engine, draft_models=DraftModels(engine.model, engine.checkpoint))
    result = next(engine.run([Request("a", "Describe this.", sampling=Sampling(3))], draft))
    drafter = engine.draft_models.get(draft)
    sparse = [m for m in drafter.decoder.modules() if isinstance(m, SparseLinear)]
    assert len(sparse) == 7 * drafter.layers and result.error is None
    assert result.weight_keep < engine.draft_models.weight_keep(Draft("full", depth=0.5))


def test_only_the_engines_own_weights_get_the_kernels_layout(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafters, "kernel_layout", channel_major)  # as on a GPU
    for shares in (False, True):
        linear = torch.nn.Linear(8, 4)
        sparse = SparseLinear(linear, threshold=0.0, keep=1.0, shares_layout=shares)
        assert sparse.weight is not None and torch.equal(sparse.weight, linear.weight)
        assert linear.weight.is_contiguous() is not shares
        assert (linear.weight.data_ptr() == sparse.weight.data_ptr()) is shares
    assert engine.model.owns_weights
    assert not Model(engine.model.hf).owns_weights
