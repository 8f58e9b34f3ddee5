"""Perplexity of a known continuation through a draft's view of the context."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from jobs.suites.shared.workload import Workload
from std_core.engine.engine import Engine
from std_core.types import Draft, Sampling


@torch.inference_mode()
def perplexity(engine: Engine, workload: Workload, draft: Draft) -> float:
    """Perplexity of the continuations.

    The prompts are prefilled densely; the draft scores each continuation in one step. Its first
    token is left out: the prefill's logits predict it, not the draft's.
    """
    engine = replace(engine, max_num_seqs=len(workload.requests))
    batch = engine.new_batch(draft, workload.prepare)
    sampling = Sampling(2, temperature=0.0)  # with one token a row would end at its prefill
    batch.prefill_slots([replace(request, sampling=sampling) for request in workload.requests])
    slots = batch.slots
    text = torch.tensor([workload.continuations[r.request_id] for r in workload.requests])
    fed = text[:, :-1]
    expected = text[:, 1:]
    slots.reserve(fed.shape[1])
    positions = slots.position[:, None] + torch.arange(fed.shape[1])
    logits = engine.draft_models.get(draft).step(fed, positions, slots.draft_step_kv(0))
    return float(F.cross_entropy(logits.flatten(0, 1).float(), expected.flatten()).exp())
