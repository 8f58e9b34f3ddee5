"""Tensor parallelism: one model over several processes, the ranks.

Each rank holds its share of the attention heads and of the MLP channels. All ranks run the same
steps with the same rows at the same time.

transformers' plan states how each module is sharded, and its loader reads only a rank's own shard
of the weights. After loading, sharded weights become plain tensors again, and the communication
between ranks is in modules of ours around them. So the drafts' module trees, packed weights and
sparse channels work on a shard as they do on the whole.

The ranks are the processes of torch's default group, on machines of one kind. What is not sharded
(vision tower, norms, embedding) every rank computes for itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers import DistributedConfig

from std_core.types import GammaSchedule, Request

# Seconds between two polls for a request that rank 0 has already.
POLL_INTERVAL = 0.005
# For ranks that are still reading their weights.
TIMEOUT = timedelta(hours=2)
# The plan for the layers of a family that transformers has none for.
DEFAULT_PLAN = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}
# The end of a request stream. A value that is the same object in every process.
END = False

Event = Request | GammaSchedule | None


@dataclass(frozen=True)
class TensorParallelGroup:
    """The ranks that share a model.

    Args:
        size: number of ranks.
        rank: of this process.
    """

    size: int = 1
    rank: int = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        if self.size > 1:
            x = x.contiguous()
            dist.all_reduce(x)
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor; `x` has its shape."""
        if self.size > 1:
            x = x.contiguous()
            dist.broadcast(x, 0)
        return x

    def synchronize_requests(self, events: Iterator[Event]) -> Iterator[Event]:
        """Return the events of rank 0's stream, on every rank.

        Rank 0 decides when a request is admitted, when no request is available yet (None), which
        schedule of γ holds, and when the stream ends. The other ranks take the same requests, by
        their ids, from their own streams.

        Raises:
            ValueError: a rank's own stream ends without a request that rank 0 has.
        """
        if self.size == 1:
            yield from events
            return
        early: list[Request] = []
        while (event := self._next_of_rank_0(events)) is not END:
            yield _find_request(event, events, early) if isinstance(event, str) else event

    def _next_of_rank_0(self, events: Iterator[Event]) -> Any:
        """Return rank 0's next event or `END`; on other ranks a request's id in its place."""
        event = next(events, END) if self.rank == 0 else None
        message = [event.request_id if isinstance(event, Request) else event]
        dist.broadcast_object_list(message, 0, device=torch.device("cpu"))
        return event if self.rank == 0 else message[0]


SINGLE_RANK = TensorParallelGroup()


def _find_request(request_id: str, events: Iterator[Event], early: list[Request]) -> Request:
    """Return the request with an id.

    Args:
        early: requests that this rank's stream had before rank 0's; updated.
    """
    while True:
        for index, request in enumerate(early):
            if request.request_id == request_id:
                return early.pop(index)
        event = next(events, END)
        if event is END:
            raise ValueError(f"request {request_id!r} was given to rank 0 but not to all ranks")
        if isinstance(event, Request):
            early.append(event)
        elif event is None:
            time.sleep(POLL_INTERVAL)


def join_group(size: int, rank: int, address: str, device: str) -> TensorParallelGroup:
    """Join torch's default group, or make it; wait until all ranks have joined.

    Args:
        address: where rank 0 listens, `tcp://host:port`; ignored where the group exists already.
        device: of this rank.

    Raises:
        ValueError: the group exists and has another size.
    """
    cuda = torch.device(device).type == "cuda"
    if cuda:
        index = torch.device(device).index or 0
        torch.cuda.set_device(index)
        os.environ["LOCAL_RANK"] = str(index)  # transformers loads weights to this device
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(
            backend, init_method=address, rank=rank, world_size=size, timeout=TIMEOUT
        )
    if dist.get_world_size() != size:
        raise ValueError(
            f"tensor_parallel_size is {size}, but torch's default group has "
            f"{dist.get_world_size()} processes"
        )
    return TensorParallelGroup(size, dist.get_rank())


# ----------------------------------------------------------------------------------------- sharding


def unshardable_reason(config: Any, size: int) -> str | None:
    """Return why `size` ranks cannot share a model, as a sentence; None if they can."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    counts = {
        "KV heads": getattr(text, "num_key_value_heads", None) or heads,
        "query heads": heads,
        "MLP channels": getattr(text, "intermediate_size", None) or size,
    }
    indivisible = [f"{count} {name}" for name, count in counts.items() if count % size]
    if not indivisible:
        return None
    return f"the model's {' and '.join(indivisible)} cannot be divided by {size}"


def sharding_kwargs(model_class: Any, config: Any, group: TensorParallelGroup) -> dict[str, Any]:
    """Return the keywords of `from_pretrained` that make a rank read its shard."""
    if group.size == 1:
        return {}
    plan = _sharding_plan(model_class, config)
    return {"distributed_config": DistributedConfig(tp_size=group.size, tp_plan=plan)}


def _sharding_plan(model_class: Any, config: Any) -> dict[str, str]:
    """Return transformers' plan for the layers, or `DEFAULT_PLAN`, and ours for the rest.

    Every rank has the whole embedding. A head that is tied to it is sharded by `localize_shards`.
    """
    with torch.device("meta"):
        hf = model_class(config)
    names = {id(module): name for name, module in hf.named_modules()}
    layers = names[id(hf.get_decoder().layers)] + ".*."
    plan = {name: style for name, style in hf.tp_plan.items() if name.startswith(layers)}
    if not plan:
        plan = {layers + name: style for name, style in DEFAULT_PLAN.items()}
    plan[names[id(hf.get_input_embeddings())]] = "replicate"
    head = "replicate" if _has_tied_head(hf) else "colwise_gather_output"
    plan[names[id(hf.get_output_embeddings())]] = head
    return plan


def _has_tied_head(hf: Any) -> bool:
    return hf.get_output_embeddings().weight is hf.get_input_embeddings().weight


def localize_shards(hf: Any, device: str, group: TensorParallelGroup) -> Any:
    """Replace the distributed tensors of a loaded model by plain ones, and their communication by
    modules of ours.

    Raises:
        ValueError: a module other than a linear layer is sharded.
    """
    for name, module in list(hf.named_modules()):
        # transformers replaced `forward` by one for distributed tensors; take the class's again
        vars(module).pop("forward", None)
        sharded = [p for p in module.parameters(recurse=False) if isinstance(p, DTensor)]
        if not sharded:
            continue
        placement = sharded[0].placements[0]
        if not isinstance(module, nn.Linear) or type(placement) is not Shard:
            raise ValueError(f"its {name} cannot be shared by ranks")
        for key, parameter in list(module.named_parameters(recurse=False)):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            setattr(module, key, nn.Parameter(local.to(device), requires_grad=False))
        module.out_features, module.in_features = module.weight.shape
        if placement.dim == 1:
            hf.set_submodule(name, RowParallelLinear(module))
    hf.to(device)
    vocab_size = hf.get_input_embeddings().num_embeddings
    hf.set_output_embeddings(VocabParallelHead(_local_head(hf, group), vocab_size, group.size))
    return hf


def _local_head(hf: Any, group: TensorParallelGroup) -> nn.Linear:
    """Return this rank's shard of the head; of a tied one, a view of the embedding's rows."""
    head = hf.get_output_embeddings()
    if _has_tied_head(hf):
        rows = head.weight.detach().chunk(group.size)[group.rank]
        head.weight = nn.Parameter(rows, requires_grad=False)
        head.out_features = len(rows)
    return head


# ------------------------------------------------------------------------------------------ modules


class RowParallelLinear(nn.Module):
    """A linear layer with sharded input channels: the ranks' products are summed."""

    def __init__(self, inner: nn.Linear):
        super().__init__()
        self.inner = inner
        self.bias = inner.bias  # added once, after the sum
        inner.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        dist.all_reduce(y)
        return y if self.bias is None else y + self.bias


class VocabParallelHead(nn.Module):
    """An output head with a sharded vocabulary. All ranks get all logits, bitwise equal, so they
    choose the same tokens.
    """

    def __init__(self, inner: nn.Module, out_features: int, ranks: int):
        super().__init__()
        self.inner = inner
        self.out_features = out_features
        self.ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shard = self.inner(x)
        shard_size = -(-self.out_features // self.ranks)  # the last rank's may be smaller
        shard = F.pad(shard, (0, shard_size - shard.shape[-1])).contiguous()
        shards = [torch.empty_like(shard) for _ in range(self.ranks)]
        dist.all_gather(shards, shard)
        return torch.cat(shards, dim=-1)[..., : self.out_features]


class BroadcastHead(nn.Module):
    """The head of a model that every rank holds whole. All ranks get rank 0's logits, so they
    choose the same tokens.
    """

    def __init__(self, inner: Any, group: TensorParallelGroup):
        super().__init__()
        self.inner = inner
        self.out_features = inner.out_features
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.broadcast(self.inner(x))
