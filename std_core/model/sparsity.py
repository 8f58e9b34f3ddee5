"""Calibration of activation sparsity (TEAL): the magnitude above which input channels are kept.

The thresholds are quantiles of a sample of the projections' inputs. Within a layer, projections
keep different shares of their channels: a greedy search takes channels away in steps, always from
the projection whose output error grows least per weight saved, until the layer reads the wanted
share of its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from std_core.kernels.sparse_linear import sparsify
from std_core.model.drafters import projections

# Rows kept of each projection's inputs.
SAMPLE_ROWS = 256
# Share of a projection's channels that one step of the search takes away.
STEP = 0.05


@contextmanager
def record_projection_inputs(decoder: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Record the inputs of all projections while the block runs.

    Yields:
        By the projection's name, (rows, in): the newest `SAMPLE_ROWS` rows.
    """
    inputs: dict[str, torch.Tensor] = {}

    def hook_of(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            rows = args[0].flatten(0, -2)
            if name in inputs:
                inputs[name] = torch.cat([inputs[name], rows])[-SAMPLE_ROWS:]
            else:
                inputs[name] = rows[-SAMPLE_ROWS:].clone()

        return hook

    hooks = [linear.register_forward_pre_hook(hook_of(n)) for n, linear in projections(decoder)]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def calibrate_thresholds(
    decoder: nn.Module, inputs: Mapping[str, torch.Tensor], keep: float
) -> dict[str, float]:
    """Return the thresholds at which a row reads a share `keep` of each layer's weights.

    Args:
        inputs: as `record_projection_inputs` yields them.

    Returns:
        By the projection's name, the magnitude that a kept channel exceeds.
    """
    layers: dict[str, dict[str, nn.Linear]] = {}
    for name, linear in projections(decoder):
        layer = name.split(".")[1]
        layers.setdefault(layer, {})[name] = linear
    thresholds: dict[str, float] = {}
    for linears in layers.values():
        shares = _allocate(linears, inputs, keep)
        thresholds |= {name: _threshold(inputs[name], share) for name, share in shares.items()}
    return thresholds


def _allocate(
    linears: Mapping[str, nn.Linear], inputs: Mapping[str, torch.Tensor], keep: float
) -> dict[str, float]:
    """Return the share of channels that each projection of a layer keeps.

    Their mean, weighted by the projections' sizes, is `keep`.
    """
    if keep <= 2 * STEP:
        return dict.fromkeys(linears, keep)
    sizes = {name: linear.weight.numel() for name, linear in linears.items()}
    shares = dict.fromkeys(linears, 1.0)
    errors = dict.fromkeys(linears, 0.0)  # at `shares`
    next_errors = {name: _error(linears[name], inputs[name], 1 - STEP) for name in linears}
    weights_to_save = sum(sizes.values()) * (1 - keep)
    while weights_to_save > 0:
        candidates = [name for name in linears if shares[name] > STEP]
        name = min(candidates, key=lambda n: (next_errors[n] - errors[n]) / sizes[n])
        cut = min(STEP, weights_to_save / sizes[name])
        weights_to_save -= cut * sizes[name]
        shares[name] -= cut
        errors[name] = next_errors[name]
        next_errors[name] = _error(linears[name], inputs[name], shares[name] - STEP)
    return shares


def _error(linear: nn.Linear, x: torch.Tensor, keep: float) -> float:
    """Return the relative squared error of a projection's output with a share of its channels."""
    dropped = x - sparsify(x, _threshold(x, keep))
    energy = (x @ linear.weight.T).float().square().sum()
    error = (dropped @ linear.weight.T).float().square().sum()
    return float(error / energy.clamp(min=1e-30))


def _threshold(x: torch.Tensor, keep: float) -> float:
    """Return the magnitude that a share `keep` of the entries exceeds."""
    magnitudes = x.abs().float().flatten()
    count = round((1 - keep) * len(magnitudes))
    return float(magnitudes.kthvalue(count).values) if count > 0 else -1.0
