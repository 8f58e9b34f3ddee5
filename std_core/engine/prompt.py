"""A request as the model takes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from std_core.engine.prefixes import PrefixKey
from std_core.model.checkpoint import ModelInputs
from std_core.model.model import Model
from std_core.types import Request, RequestError


@dataclass(frozen=True)
class Prompt:
    """Token ids, pixels and positions of a request; n tokens, visual ones included."""

    request: Request
    inputs: ModelInputs
    ids: torch.Tensor  # (n,) on the model's device
    positions: torch.Tensor  # (1 or 3, 1, n)
    next_position: int  # of the first generated token

    @classmethod
    def of(cls, request: Request, inputs: ModelInputs, model: Model, max_model_len: int) -> Prompt:
        """Place a request's inputs on the model's device, with positions.

        Raises:
            RequestError: `context_too_long`, or `invalid_request`: the prompt is empty, has ids
                that the model does not know, or no text follows the video.
        """
        _check_ids(inputs, model.embedding.num_embeddings)
        ids = inputs.ids[0].to(model.device)
        if len(ids) >= max_model_len:
            raise RequestError(
                "context_too_long",
                f"{len(ids)} tokens of context, the model's window is {max_model_len}",
            )
        if inputs.prefix_length == len(ids):
            raise RequestError(
                "invalid_request",
                "the prompt ends with a visual token: there is no question behind it",
            )
        positions, next_position = model.position_ids(inputs)
        return cls(request, inputs, ids, positions, next_position)

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def prefix_length(self) -> int:
        """Tokens before the question, which requests on the same video can share."""
        return self.inputs.prefix_length

    @property
    def visual_tokens(self) -> int:
        return len(self.inputs.visual_positions)

    @property
    def prefix_key(self) -> PrefixKey | None:
        """Identity of the prefix; None if the request shares nothing."""
        if not self.request.video_id:
            return None
        token_ids = self.inputs.ids[0, : self.prefix_length].tolist()
        return PrefixKey(self.request.video_id, self.request.fps, tuple(token_ids))


def _check_ids(inputs: ModelInputs, known: int) -> None:
    """Check a prompt's ids before they reach a device, where an unknown id ends the process.

    Args:
        known: number of ids that have an embedding.

    Raises:
        RequestError: `invalid_request`.
    """
    ids = inputs.ids
    if ids.ndim != 2 or len(ids) != 1 or ids.shape != inputs.token_types.shape:
        raise RequestError(
            "invalid_request",
            f"ids and token types have the shapes {tuple(ids.shape)} and"
            f" {tuple(inputs.token_types.shape)}: both are (1, tokens)",
        )
    if not ids.numel():
        raise RequestError("invalid_request", "the prompt has no tokens")
    lowest, highest = ids.aminmax()
    if lowest < 0 or highest >= known:
        unknown = int(lowest if lowest < 0 else highest)
        raise RequestError(
            "invalid_request",
            f"the prompt has the token id {unknown}: the model's ids are 0 to {known - 1}",
        )
