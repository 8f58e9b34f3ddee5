"""Thresholds of activation sparsity (TEAL): which input channels of each projection count, at a
given share.

Calibrated on a sample of a projection's inputs, and allotted among the projections of a layer: they
give up channels in turn, always the one whose output then departs least for the weights it no
longer reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from std_core.kernels.sparse_linear import sparsify
from std_core.model.drafters import projections

SAMPLE_ROWS = 256  # rows kept of each projection's inputs
STEP = 0.05  # of a projection's channels that are given up in a turn


@contextmanager
def record_projection_inputs(decoder: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Inputs of all projections, (rows, in), while the block runs: the newest `SAMPLE_ROWS` of them."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            rows = args[0].flatten(0, -2)
            seen[name] = (
                torch.cat([seen[name], rows])[-SAMPLE_ROWS:]
                if name in seen
                else rows[-SAMPLE_ROWS:].clone()
            )

        return hook

    hooks = [linear.register_forward_pre_hook(keep(name)) for name, linear in projections(decoder)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def calibrate_thresholds(
    decoder: nn.Module, seen: Mapping[str, torch.Tensor], keep: float
) -> dict[str, float]:
    """By a projection's name the magnitude above which its input channels count, so that a share
    `keep` of each layer's weights is read for a row like those that were seen."""
    layers: dict[str, dict[str, nn.Linear]] = {}
    for name, linear in projections(decoder):
        layers.setdefault(name.split(".")[1], {})[name] = linear
    found: dict[str, float] = {}
    for linears in layers.values():
        shares = _allot(linears, seen, keep)
        found |= {name: _threshold(seen[name], share) for name, share in shares.items()}
    return found


def _allot(
    linears: Mapping[str, nn.Linear], seen: Mapping[str, torch.Tensor], keep: float
) -> dict[str, float]:
    """Shares of channels kept per projection; their mean, weighted by size, is `keep`."""
    if keep <= 2 * STEP:
        return dict.fromkeys(linears, keep)
    sizes = {name: linear.weight.numel() for name, linear in linears.items()}
    shares = dict.fromkeys(linears, 1.0)
    errors = dict.fromkeys(linears, 0.0)
    steps = {name: _error(linears[name], seen[name], 1 - STEP) for name in linears}
    spare = sum(sizes.values()) * (1 - keep)
    while spare > 0:
        open_ = [name for name in linears if shares[name] > STEP]
        name = min(open_, key=lambda n: (steps[n] - errors[n]) / sizes[n])
        cut = min(STEP, spare / sizes[name])
        spare -= cut * sizes[name]
        shares[name] -= cut
        errors[name] = steps[name]
        steps[name] = _error(linears[name], seen[name], shares[name] - STEP)
    return shares


def _error(linear: nn.Linear, x: torch.Tensor, keep: float) -> float:
    """Of a projection's output, relative, when a share of its channels is kept."""
    left_out = x - sparsify(x, _threshold(x, keep))
    whole, gone = ((y @ linear.weight.T).float().square().sum() for y in (x, left_out))
    return float(gone / whole.clamp(min=1e-30))


def _threshold(x: torch.Tensor, keep: float) -> float:
    """The magnitude that a share `keep` of the entries exceeds."""
    magnitudes = x.abs().float().flatten()
    count = round((1 - keep) * len(magnitudes))
    return float(magnitudes.kthvalue(count).values) if count > 0 else -1.0
