"""How often a draft agrees with the full model, by the share of visual entries that it keeps.

The full model writes a text once. For every keep the draft then reads the whole text in one pass
and predicts each of its tokens from the true ones before it (teacher forcing), so a keep costs one
prefill of the question and one step of many tokens, and no text is written again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from std_core.cost_model.acceptance import KeepAgreement
from std_core.engine.engine import Engine
from std_core.model.checkpoint import ModelInputs
from std_core.types import Draft, Request

STEP_TOKENS = 64  # per row, of a text that the draft reads at a time
IGNORED = -100  # behind the end of a text

Texts = dict[str, list[int]]  # by request id
Prepare = Callable[[Request], ModelInputs]


def can_choose_keep(draft: Draft) -> bool:
    """Whether a draft reads selected entries of the full model, and how many is free."""
    return draft.policy not in ("full", "ngram") and draft.k is None and not draft.model


def write_texts(engine: Engine, requests: Sequence[Request], prepare: Prepare) -> Texts:
    """The full model's texts; those of a single token, which predict nothing, are left out."""
    texts = {r.request_id: r.token_ids for r in engine.run(requests, None, prepare)}
    return {name: text for name, text in texts.items() if len(text) > 1}


def measure_agreement(
    engine: Engine,
    requests: Sequence[Request],
    prepare: Prepare,
    *,
    texts: Texts,
    draft: Draft,
    keep: float,
    context: int,
) -> KeepAgreement:
    """Count agreement on all texts at one keep.

    Args:
        requests: those of `texts`; the prefixes of their prompts should be in the engine's store.
        context: tokens of their prompts, mean.
    """
    with_text = [request for request in requests if request.request_id in texts]
    agreed = 0
    tokens = 0
    for first in range(0, len(with_text), engine.max_num_seqs):
        rows = with_text[first : first + engine.max_num_seqs]
        predicted, true = predict_texts(
            engine,
            rows,
            prepare,
            texts=[texts[request.request_id] for request in rows],
            draft=replace(draft, keep=keep),
        )
        agreed += int((predicted == true).sum())
        tokens += int((true != IGNORED).sum())
    return KeepAgreement(keep, context=context, agreed=agreed, tokens=tokens)


@torch.inference_mode()
def predict_texts(
    engine: Engine,
    requests: Sequence[Request],
    prepare: Prepare,
    *,
    texts: Sequence[Sequence[int]],
    draft: Draft,
    step_tokens: int = STEP_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Predict each token of texts but the first, greedily, from the true tokens before it.

    Args:
        requests: as many as the engine has slots, at most.
        texts: one per request, of 2 tokens and more.

    Returns:
        The draft's tokens and the texts', both (B, longest text − 1); `IGNORED` behind a text's
        end.
    """
    batch = engine.new_batch(draft, prepare)
    batch.prefill_slots(requests)
    slots = batch.slots
    drafter = engine.draft_models.get(draft)
    length = max(map(len, texts)) - 1
    device = slots.total.device
    padded = torch.tensor([[*text, *[0] * (length + 1 - len(text))] for text in texts])
    given = padded.to(device)
    slots.reserve(length + 1)
    places = slots.total[:, None] + torch.arange(length, device=device)
    slots.history.scatter_(1, places, given[:, 1:])
    predicted: list[torch.Tensor] = []
    for start in range(0, length, step_tokens):
        fed = given[:, start : min(length, start + step_tokens)]
        offsets = torch.arange(start, start + fed.shape[1], device=device)
        logits = drafter.step(
            fed, slots.position[:, None] + offsets, slots.draft_step_kv(offset=start)
        )
        predicted.append(slots.process_logits(logits, slots.total + start).argmax(-1))
    lengths = torch.tensor([len(text) - 1 for text in texts], device=device)
    inside = torch.arange(length, device=device) < lengths[:, None]
    true = given[:, 1:].where(inside, IGNORED)
    return torch.cat(predicted, dim=1), true
