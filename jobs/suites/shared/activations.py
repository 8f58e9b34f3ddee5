"""Activations of a model's projections at decode steps, and the share of projection weights that
several sequences activate together (u_B), under TEAL's thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from jobs.suites.shared.workload import Workload, raise_errors
from std_core.engine.engine import Engine
from std_core.model import sparsity
from std_core.model.drafters import projections
from std_core.types import Sampling

SEQUENCES = 8  # recorded side by side
STEPS = sparsity.SAMPLE_ROWS // SEQUENCES
BATCH_SAMPLES = 64  # batches drawn from the recorded steps
Activations = dict[str, torch.Tensor]  # by a projection's name, (steps, sequences, in features)


def record_activations(engine: Engine, workload: Workload) -> Activations:
    """Inputs of all projections at `STEPS` steps of the dense loop.

    Args:
        workload: `SEQUENCES` requests.

    Raises:
        ValueError: it has more or fewer.
    """
    if len(workload.requests) != SEQUENCES:
        raise ValueError(f"{len(workload.requests)} requests, {SEQUENCES} are needed")
    # all end at the same step, so that no slot is idle before
    sampling = Sampling(STEPS + 1, min_tokens=STEPS + 1, temperature=0.0)
    requests = [replace(request, sampling=sampling) for request in workload.requests]
    own = replace(engine, max_num_seqs=SEQUENCES, prefixes=None, keep_prefixes=False)
    with sparsity.record_projection_inputs(engine.model.decoder) as recorded:
        for _ in raise_errors(own.run(requests, None, workload.prepare)):
            pass
    return {name: rows.view(STEPS, SEQUENCES, -1) for name, rows in recorded.items()}


def fit_thresholds(engine: Engine, activations: Activations, channels: float) -> dict[str, float]:
    """By projection, the magnitude below which an input channel is left out, so that `channels` of
    them, a share, are kept over these steps."""
    flat = {name: x.flatten(0, 1) for name, x in activations.items()}
    return sparsity.calibrate_thresholds(engine.model.decoder, flat, channels)


def joint_weight_shares(
    engine: Engine,
    activations: Activations,
    thresholds: Mapping[str, float],
    batches: Sequence[int],
) -> dict[str, float]:
    """u_B by batch size B: the share of all projection weights whose input channel at least one of
    B sequences activates.

    The sequences of a batch are at different steps, as in slots that are refilled.
    """
    rng = torch.Generator().manual_seed(0)
    steps, sequences = next(iter(activations.values())).shape[:2]
    samples = {}
    for batch in batches:
        step = torch.randint(steps, (BATCH_SAMPLES, batch), generator=rng)
        sequence = torch.rand(BATCH_SAMPLES, sequences, generator=rng).argsort(1)[:, :batch]
        samples[batch] = (step, sequence)
    sizes = {name: linear.weight.numel() for name, linear in projections(engine.model.decoder)}
    weights_read = dict.fromkeys(batches, 0.0)
    for name, size in sizes.items():
        active = activations[name].abs() > thresholds[name]
        for batch, (step, sequence) in samples.items():
            share = float(active[step, sequence].any(1).float().mean())
            weights_read[batch] += share * size
    total = sum(sizes.values())
    return {str(batch): round(read / total, 4) for batch, read in weights_read.items()}
