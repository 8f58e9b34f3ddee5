"""What the suite `acceptance` measures besides acceptance: how many projection weights several
sequences activate together, and how well a draft's view foretells a text that is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from jobs.suites.acceptance.subjects import Subject
from std_core.engine.batch import Batch
from std_core.engine.engine import Engine
from std_core.engine.row import Row
from std_core.model import sparsity
from std_core.model.drafters import projections
from std_core.types import Draft, Sampling

SEQUENCES = 8
STEPS = sparsity.SAMPLE_ROWS // SEQUENCES
DRAWS = 64  # batches that are put together of the recorded steps
Activations = dict[str, torch.Tensor]  # by a projection's name, (steps, sequences, in)


def at_decode(engine: Engine, asked: Subject) -> Activations:
    """Inputs of all projections at the dense loop's steps of `SEQUENCES` requests that run side by
    side."""
    if len(asked.requests) != SEQUENCES:
        raise ValueError(f"{len(asked.requests)} requests, {SEQUENCES} are needed")
    sampling = Sampling(
        STEPS + 1, min_tokens=STEPS + 1, temperature=0.0
    )  # all end at once, no slot is idle before
    alone = replace(engine, max_num_seqs=SEQUENCES, prefixes=None, keep_prefixes=False)
    with sparsity.record_projection_inputs(engine.model.decoder) as seen:
        for result in alone.run(
            [replace(r, sampling=sampling) for r in asked.requests], None, asked.prepare
        ):
            if result.error is not None:
                raise result.error
    return {name: rows.view(STEPS, SEQUENCES, -1) for name, rows in seen.items()}


def calibrated(engine: Engine, seen: Activations, keep: float) -> dict[str, float]:
    """Thresholds by a sample of decode steps."""
    return sparsity.calibrate_thresholds(
        engine.model.decoder, {name: x.flatten(0, 1) for name, x in seen.items()}, keep
    )


def joint_shares(
    engine: Engine, seen: Activations, thresholds: Mapping[str, float], batches: Sequence[int]
) -> dict[str, float]:
    """u_B: of all projection weights the share whose input channel at least one of B sequences
    activates.

    Sequences of a batch stand at steps of their own, as they do where slots refill.
    """
    random = torch.Generator().manual_seed(0)
    steps, sequences = next(iter(seen.values())).shape[:2]
    drawn = {
        size: (
            torch.randint(steps, (DRAWS, size), generator=random),
            torch.rand(DRAWS, sequences, generator=random).argsort(1)[:, :size],
        )
        for size in batches
    }
    sizes = {name: linear.weight.numel() for name, linear in projections(engine.model.decoder)}
    read = dict.fromkeys(batches, 0.0)
    for name, weights in sizes.items():
        active = seen[name].abs() > thresholds[name]
        for size, (step, sequence) in drawn.items():
            read[size] += float(active[step, sequence].any(1).float().mean()) * weights
    return {str(size): round(sum_ / sum(sizes.values()), 4) for size, sum_ in read.items()}


@torch.inference_mode()
def perplexity(engine: Engine, asked: Subject, draft: Draft) -> float:
    """Of what follows the prompts, which are prefilled densely, through a draft's view, all of it
    in one step."""
    engine = replace(engine, max_num_seqs=len(asked.requests))
    batch = Batch(engine, draft, asked.prepare)
    for slot, request in enumerate(asked.requests):
        batch.rows[slot] = _admitted(
            batch, slot, replace(request, sampling=Sampling(2, temperature=0.0))
        )
    batch.update_slots()
    slots = batch.slots
    text = torch.tensor([asked.following[request.request_id] for request in asked.requests])
    # the first is foretold by the prefill
    fed = text[:, :-1]
    expected = text[:, 1:]
    slots.reserve(fed.shape[1])
    positions = slots.position[:, None] + torch.arange(fed.shape[1])
    logits = engine.drafter(draft).step(fed, positions, slots.draft_step_kv(0))
    return float(F.cross_entropy(logits.flatten(0, 1).float(), expected.flatten()).exp())


def _admitted(batch: Batch, slot: int, request: object) -> Row:
    pieces = batch.prefill.admit(request, slot)  # type: ignore[arg-type]
    while (arrived := batch._chunk(pieces)) is None:
        pass
    if not isinstance(arrived, Row):
        raise arrived.error or ValueError("a prompt that ends before it is scored")
    return arrived
