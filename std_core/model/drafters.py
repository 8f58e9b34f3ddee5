"""Drafters: models that read fewer weights than the full model.

A drafter is a `Model` whose text stack is a second tree of modules over the same parameters. It
leaves out layers (LayerSkip), input channels (TEAL) or bits (low-bit copies); only the latter copy
weights. Which part of the context it reads is decided elsewhere.
"""

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
from std_core.types import WEIGHT_BITS, Draft

# Logits of tokens that only the full model has.
MISSING_LOGIT = -1e9


def build_drafter(model: Model, draft: Draft, thresholds: Mapping[str, float]) -> Model:
    """Build the model that computes a draft; the model itself if it reads all weights.

    Args:
        thresholds: of `draft.channels`, by the names of `projections`.
    """
    if not draft.reads_fewer_weights:
        return model
    drafter = copy.copy(model)
    drafter.decoder = clone_sharing_parameters(model.decoder)
    if draft.depth < 1:
        _truncate_layers(drafter, draft_layers(draft, model.layers))
    for name, linear in list(projections(drafter.decoder)):
        projection = _draft_projection(linear, draft, thresholds.get(name), model.owns_weights)
        drafter.decoder.set_submodule(name, projection)
    if draft.weights != "full":
        drafter.head = _low_bit_head(model.head)
    return drafter


def pair_drafter(model: Model, second_model: Model) -> Model:
    """Make a smaller model with the same tokenizer the drafter of another.

    Its logits are fitted to the other's vocabulary, since a family's large models pad theirs more.
    """
    drafter = copy.copy(second_model)
    drafter.head = _FittedHead(second_model.head, model.vocab_size)
    if model.tp_group.size > 1:
        drafter.head = BroadcastHead(drafter.head, model.tp_group)
    return drafter


def draft_layers(draft: Draft, layers: int) -> int:
    """Return how many of a model's layers a draft runs."""
    return max(1, round(draft.depth * layers))


def projections(decoder: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Iterate over the linear layers of a text stack (seven per layer) by their names in it."""
    for name, module in decoder.layers.named_modules():
        if isinstance(module, nn.Linear):
            yield f"layers.{name}", module


def step_weight_bytes(drafter: Model) -> int:
    """Return the bytes of weights that one step of one row reads: projections and head."""
    kinds = (nn.Linear, LowBitLinear, SparseLinear)
    modules = [m for m in drafter.decoder.layers.modules() if isinstance(m, kinds)]
    wrapped = {id(m.inner) for m in modules if isinstance(m, SparseLinear)}
    modules = [m for m in modules if id(m) not in wrapped]
    return sum(_weight_bytes(module) for module in [*modules, drafter.head])


def _weight_bytes(module: Any) -> int:
    if isinstance(module, SparseLinear):
        return round(_weight_bytes(module.inner) * module.keep)
    if isinstance(module, LowBitLinear):
        return module.packed.nbytes
    if isinstance(module, (_FittedHead, BroadcastHead, VocabParallelHead)):
        return _weight_bytes(module.inner)
    return module.weight.numel() * module.weight.element_size()


def _truncate_layers(model: Model, layers: int) -> None:
    """Keep the first layers only (early exit)."""
    model.decoder.layers = model.decoder.layers[:layers]
    model.decoder.config.num_hidden_layers = layers
    model.layers = layers


# -------------------------------------------------------------------------------------- projections


class SparseLinear(nn.Module):
    """A projection over the input channels whose magnitude exceeds a threshold (TEAL)."""

    def __init__(self, inner: Any, threshold: float, keep: float, shares_layout: bool = False):
        """
        Args:
            inner: a linear layer, or its low-bit copy.
            keep: the share of channels that exceeded the threshold in its calibration.
            shares_layout: give the layer's own weight the kernel's layout too, which all that share
                the weight see.
        """
        super().__init__()
        self.inner = inner
        self.threshold = threshold
        self.keep = keep
        self.weight: torch.Tensor | None = None
        if isinstance(inner, nn.Linear):
            self.weight = kernel_layout(inner.weight.detach())
            if shares_layout:
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


class _FittedHead(nn.Module):
    """A head whose logits are truncated or padded to a vocabulary."""

    def __init__(self, inner: nn.Module, vocab_size: int):
        super().__init__()
        self.inner = inner
        self.out_features = vocab_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.inner(x)[..., : self.out_features]
        return F.pad(logits, (0, self.out_features - logits.shape[-1]), value=MISSING_LOGIT)


def _draft_projection(
    linear: nn.Linear, draft: Draft, threshold: float | None, owns_weights: bool
) -> nn.Module:
    module: nn.Module = linear
    if draft.weights != "full":
        module = _low_bit(linear, WEIGHT_BITS[draft.weights])
    if threshold is not None:
        # dense products on a GPU take the kernel's layout as well: one copy serves both
        shares = owns_weights and linear.weight.device.type != "cpu"
        module = SparseLinear(module, threshold, draft.channels, shares_layout=shares)
    return module


def _low_bit(linear: nn.Linear, bits: int) -> nn.Module:
    """Pack a projection, with 8 bits where 4 do not support its shape."""
    return LowBitLinear(linear, bits if can_pack(linear.weight, bits) else 8)


def _low_bit_head(head: Any) -> nn.Module:
    """Pack a head with 8 bits. A 4-bit head alone took SmolLM2's acceptance from 0.89 to 0.56."""
    if isinstance(head, VocabParallelHead):
        return VocabParallelHead(_low_bit_head(head.inner), head.out_features, head.ranks)
    return _low_bit(head, 8)
