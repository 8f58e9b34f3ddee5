"""One model over several processes (tensor parallelism): each rank holds its share of the heads and
of the MLP's channels, and all of them go through the same steps with the same rows at the same
time.

transformers' plan says what is divided how, and its loader reads a rank's share of the weights and
no more. What a divided layer then computes is plain PyTorch again, and what it needs of the other
ranks stands around it in a module of its own: so a draft's second tree, packed weights and sparse
channels work on a share as they do on the whole.

Ranks are the processes of torch's default group. They must be machines of one kind: what is not
divided (vision tower, norms, embedding) each of them computes for itself."""

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

IDLE = 0.005  # s between two looks for a request that another rank has already
WAIT = timedelta(hours=2)  # for a rank that is still reading its weights
PLAN = {  # of a family that transformers has no plan for
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}


@dataclass(frozen=True)
class TensorParallelGroup:
    """The processes that share a model, and which of them this is."""

    size: int = 1
    rank: int = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """What all ranks have, summed."""
        if self.size > 1:
            x = x.contiguous()
            dist.all_reduce(x)
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """What rank 0 has, in place of this rank's own, which must be of the same shape."""
        if self.size > 1:
            x = x.contiguous()
            dist.broadcast(x, 0)
        return x

    def synchronize_requests(
        self, waiting: Iterator[Request | GammaSchedule | None]
    ) -> Iterator[Request | GammaSchedule | None]:
        """The stream as rank 0 has it: when a request comes, with which pace, when none is there
        yet, and when the stream ends. The other ranks take the same requests, by their ids, from
        streams of their own.

        Raises:
            ValueError: a rank's own stream ends without a request that rank 0 has.
        """
        if self.size == 1:
            yield from waiting
            return
        early: list[Request] = []
        while (told := self._next_of_rank_0(waiting)) is not _END:
            if isinstance(told, str):
                yield _find(told, waiting, early)
            else:
                yield told

    def _next_of_rank_0(self, waiting: Iterator[Request | GammaSchedule | None]) -> Any:
        """Rank 0's next: a request (to the others its id), a pace, None, or `_END`."""
        offered = next(waiting, _END) if self.rank == 0 else None
        box = [offered.request_id if isinstance(offered, Request) else offered]
        dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
        return offered if self.rank == 0 else box[0]


_END = False  # of a stream; a singleton, since it travels
SINGLE_RANK = TensorParallelGroup()


def _find(
    name: str, waiting: Iterator[Request | GammaSchedule | None], early: list[Request]
) -> Request:
    """The request of that id; `early` keeps what comes before its turn."""
    while True:
        for at, request in enumerate(early):
            if request.request_id == name:
                return early.pop(at)
        offered = next(waiting, _END)
        if offered is _END:
            raise ValueError(f"request {name!r} was given to rank 0 and not to every other")
        if isinstance(offered, Request):
            early.append(offered)
        elif offered is None:
            time.sleep(IDLE)


def join_group(size: int, rank: int, address: str, device: str) -> TensorParallelGroup:
    """Waits until all ranks are there.

    Args: address: where rank 0 listens, `tcp://host:port`; not looked at where torch's default
        group exists already. device: this rank's.

    Raises:
        ValueError: the default group is one of another size.
    """
    cuda = torch.device(device).type == "cuda"
    if cuda:
        index = torch.device(device).index or 0
        torch.cuda.set_device(index)
        os.environ["LOCAL_RANK"] = str(
            index
        )  # where transformers looks up the device that it loads to
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(
            backend, init_method=address, rank=rank, world_size=size, timeout=WAIT
        )
    if dist.get_world_size() != size:
        raise ValueError(
            f"tensor_parallel_size is {size}, but {dist.get_world_size()} processes are in torch's group"
        )
    return TensorParallelGroup(size, dist.get_rank())


# ---------------------------------------------------------------------------------- what is divided


def unshardable_reason(config: Any, size: int) -> str | None:
    """Why a model of this configuration cannot be shared by so many ranks, as a sentence; None if
    it can."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    parts = {
        "KV heads": getattr(text, "num_key_value_heads", None) or heads,
        "query heads": heads,
        "MLP channels": getattr(text, "intermediate_size", None) or size,
    }
    odd = [f"{count} {what}" for what, count in parts.items() if count % size]
    return f"the model's {' and '.join(odd)} cannot be divided by {size}" if odd else None


def sharding_kwargs(writer: Any, config: Any, ranks: TensorParallelGroup) -> dict[str, Any]:
    """What `from_pretrained` is called with, besides the rest, so that a rank reads its share."""
    if ranks.size == 1:
        return {}
    return {
        "distributed_config": DistributedConfig(tp_size=ranks.size, tp_plan=_plan(writer, config))
    }


def _plan(writer: Any, config: Any) -> dict[str, str]:
    """transformers' plan for a model's layers and head, or `PLAN` where it has none for its layers.
    Each rank has the whole embedding, and a head that is tied to it is cut from it later."""
    with torch.device("meta"):
        hf = writer(config)
    names = {id(module): name for name, module in hf.named_modules()}
    layers = names[id(hf.get_decoder().layers)] + ".*."
    plan = {layers + name: how for name, how in PLAN.items()}
    if any(name.startswith(layers) for name in hf.tp_plan):
        plan = {name: how for name, how in hf.tp_plan.items() if name.startswith(layers)}
    head = "replicate" if _tied(hf) else "colwise_gather_output"
    return plan | {
        names[id(hf.get_input_embeddings())]: "replicate",
        names[id(hf.get_output_embeddings())]: head,
    }


def _tied(hf: Any) -> bool:
    return hf.get_output_embeddings().weight is hf.get_input_embeddings().weight


def localize_shards(hf: Any, device: str, ranks: TensorParallelGroup) -> Any:
    """A model as transformers has divided it, with plain tensors for its weights and modules that
    do what has to be done between ranks.

    Raises:
        ValueError: something else than projections is divided.
    """
    for name, module in list(hf.named_modules()):
        vars(module).pop("forward", None)  # transformers' own, over distributed tensors
        divided = [p for p in module.parameters(recurse=False) if isinstance(p, DTensor)]
        if not divided:
            continue
        placed = divided[0].placements[0]
        if not isinstance(module, nn.Linear) or type(placed) is not Shard:
            raise ValueError(f"its {name} cannot be shared by ranks")
        for key, parameter in list(module.named_parameters(recurse=False)):
            whole = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            setattr(module, key, nn.Parameter(whole.to(device), requires_grad=False))
        module.out_features, module.in_features = module.weight.shape
        if placed.dim == 1:
            _put(hf, name, RowParallelLinear(module))
    hf.to(device)
    hf.set_output_embeddings(
        VocabParallelHead(_head_of(hf, ranks), hf.get_input_embeddings().num_embeddings, ranks.size)
    )
    return hf


def _head_of(hf: Any, ranks: TensorParallelGroup) -> nn.Linear:
    """This rank's part of the head: its own rows of the embedding, in place, if the two are
    tied."""
    head = hf.get_output_embeddings()
    if _tied(hf):
        rows = head.weight.detach().chunk(ranks.size)[ranks.rank]
        head.weight = nn.Parameter(rows, requires_grad=False)
        head.out_features = len(rows)
    return head


def _put(hf: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(hf.get_submodule(parent), leaf, module)


# ------------------------------------------------------------------------------------------ modules


class RowParallelLinear(nn.Module):
    """A projection whose input channels are divided: the ranks' products are summed, and the bias
    comes once."""

    def __init__(self, inner: nn.Linear):
        super().__init__()
        self.inner = inner
        self.bias = inner.bias
        inner.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        dist.all_reduce(y)
        return y if self.bias is None else y + self.bias


class VocabParallelHead(nn.Module):
    """A head whose tokens are divided: all ranks get the logits of all, the same bits each, and so
    choose alike."""

    def __init__(self, inner: nn.Module, out_features: int, ranks: int):
        super().__init__()
        self.inner = inner
        self.out_features = out_features
        self.ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.inner(x)
        most = -(-self.out_features // self.ranks)  # the last rank may have fewer
        part = F.pad(part, (0, most - part.shape[-1])).contiguous()
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        dist.all_gather(parts, part)
        return torch.cat(parts, dim=-1)[..., : self.out_features]


class BroadcastHead(nn.Module):
    """A head of a model that every rank has whole: the logits are rank 0's, so that all choose
    alike."""

    def __init__(self, inner: Any, ranks: TensorParallelGroup):
        super().__init__()
        self.inner = inner
        self.out_features = inner.out_features
        self.ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ranks.broadcast(self.inner(x))
