"""The model that drafts: the same weights with fewer of them read, none of them copied but the
low-bit ones.

A drafter is a `Model` whose text stack is a second tree of modules over the same parameters. What
it leaves out is layers (LayerSkip), input channels (TEAL), or bits; what it sees of the context is
not decided here."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from std_core.kernels.low_bit import can_pack, low_bit_linear, pack_weight
from std_core.kernels.sparse_linear import kernel_layout, skips_channels, sparse_linear, sparsify
from std_core.model.cpu_modules import clone_sharing_parameters
from std_core.model.model import Model
from std_core.model.tensor_parallel import BroadcastHead, VocabParallelHead
from std_core.types import Draft

BITS = {"int8": 8, "int4": 4}


def build_drafter(model: Model, draft: Draft, thresholds: Mapping[str, float]) -> Model:
    """The model as a draft computes with it.

    Args:
        thresholds: of `channels`, by the projection's name in `projections`.
    """
    if not draft.reads_fewer_weights:
        return model
    cheap = copy.copy(model)
    cheap.decoder = clone_sharing_parameters(model.decoder)
    if draft.depth < 1:
        _exit_early(cheap, draft_layers(draft, model.layers))
    for name, linear in list(projections(cheap.decoder)):
        _put(cheap.decoder, name, _cheaper(linear, draft, thresholds.get(name)))
    if (
        draft.weights != "full"
    ):  # at 4 bits the head alone took SmolLM2's acceptance from 0.89 to 0.56
        cheap.head = _low_bit_head(model.head)
    return cheap


def draft_layers(draft: Draft, layers: int) -> int:
    """Of a model's layers those that a draft runs through."""
    return max(1, round(draft.depth * layers))


def pair_drafter(model: Model, partner: Model) -> Model:
    """A smaller model as the draft of another: its logits over the other's vocabulary (large models
    of a family pad theirs further)."""
    draft = copy.copy(partner)
    draft.head = _Fitted(partner.head, model.vocab_size)
    if model.tp_group.size > 1:
        draft.head = BroadcastHead(draft.head, model.tp_group)
    return draft


def projections(decoder: Any) -> Iterator[tuple[str, nn.Linear]]:
    """The seven of each layer, by name."""
    return (
        (f"layers.{name}", m)
        for name, m in decoder.layers.named_modules()
        if isinstance(m, nn.Linear)
    )


def step_weight_bytes(drafter: Model) -> int:
    """Bytes of weights that one draft step reads for a single row: projections and head."""
    leaves = [
        m
        for m in drafter.decoder.layers.modules()
        if isinstance(m, (nn.Linear, LowBitLinear, SparseLinear))
    ]
    inner = {id(m.inner) for m in leaves if isinstance(m, SparseLinear)}
    return sum(_bytes(m) for m in [*leaves, drafter.head] if id(m) not in inner)


def _bytes(module: Any) -> int:
    if isinstance(module, SparseLinear):
        return round(_bytes(module.inner) * module.keep)
    if isinstance(module, LowBitLinear):
        return module.packed.nbytes
    if isinstance(module, (_Fitted, BroadcastHead, VocabParallelHead)):
        return _bytes(module.inner)
    return module.weight.numel() * module.weight.element_size()


# -------------------------------------------------------------------------------------- projections


class SparseLinear(nn.Module):
    """`inner` over the input channels above a magnitude; `keep` is their share in the sample that
    set the threshold."""

    def __init__(self, inner: Any, threshold: float, keep: float):
        super().__init__()
        self.inner = inner
        self.threshold = threshold
        self.keep = keep
        self.weight: torch.Tensor | None = None
        if isinstance(inner, nn.Linear):
            self.weight = kernel_layout(inner.weight.detach())
            if (
                inner.weight.device.type != "cpu"
            ):  # dense products there take either layout: no copy is kept
                inner.weight.data = self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight is not None and skips_channels(x):
            return sparse_linear(x, self.weight, self.inner.bias, self.threshold)
        return self.inner(sparsify(x, self.threshold))


class LowBitLinear(nn.Module):
    """A projection with packed weights of its own."""

    def __init__(self, linear: nn.Linear, bits: int):
        super().__init__()
        self.packed = pack_weight(linear.weight, bits)
        self.bias = linear.bias
        self.out_features = linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return low_bit_linear(x, self.packed, self.bias)


class _Fitted(nn.Module):
    """A head whose logits are cut or filled up to a vocabulary."""

    def __init__(self, inner: nn.Module, vocabulary: int):
        super().__init__()
        self.inner = inner
        self.out_features = vocabulary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.inner(x)[..., : self.out_features]
        return F.pad(logits, (0, self.out_features - logits.shape[-1]), value=-1e9)


def _cheaper(linear: nn.Linear, draft: Draft, threshold: float | None) -> nn.Module:
    made: nn.Module = linear if draft.weights == "full" else _low_bit(linear, BITS[draft.weights])
    return made if threshold is None else SparseLinear(made, threshold, draft.channels)


def _low_bit(linear: nn.Linear, bits: int) -> nn.Module:
    """8 bits where 4 do not fit the shape."""
    return LowBitLinear(linear, bits if can_pack(linear.weight, bits) else 8)


def _low_bit_head(head: Any) -> nn.Module:
    if isinstance(head, VocabParallelHead):
        return VocabParallelHead(_low_bit_head(head.inner), head.out_features, head.ranks)
    return _low_bit(head, 8)


# -------------------------------------------------------------------------------------------- trees


def _exit_early(model: Model, layers: int) -> None:
    model.decoder.layers = model.decoder.layers[:layers]
    model.decoder.config.num_hidden_layers = layers
    model.layers = layers


def _put(decoder: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(decoder.get_submodule(parent), leaf, module)
