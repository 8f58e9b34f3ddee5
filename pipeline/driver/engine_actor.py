"""The Ray actors of an engine, one per rank: thin shells around `std_core.engine.engine.Engine`."""

from __future__ import annotations

import itertools
import queue
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipeline.config import model_path
from pipeline.records import EngineConfig, RequestError
from std_core.types import Draft, GammaSchedule, Mode, Request, Result

POLL_SECONDS = 0.005  # between two checks for the next config

# (model path, **settings) → an object with the interface of `std_core.engine.engine.Engine`
EngineLoader = Callable[..., Any]


def load_engine(path: str, **settings: Any) -> Any:
    """`std_core.engine.engine.Engine.load`, imported in the actor: the driver needs no PyTorch."""
    import torch

    from std_core.engine.engine import Engine

    # a new process has torch's constant seed: without this all engines would draw the same numbers
    torch.seed()
    return Engine.load(path, **settings)


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"feed": 1, "watch": 1})  # type: ignore[call-overload]
class EngineActor:
    """One rank of an engine, with a queue of requests per config.

    `run` occupies the actor's main thread; `feed` and `heartbeat` run beside it, in a thread each.

    Args:
        load: builds the engine from a model path and settings.
        model: the value of `--model`; presets are resolved on the actor's machine.
        settings: the other arguments of `load`.
        address: rendezvous address of the ranks of an engine that has several.
    """

    def __init__(self, load: EngineLoader, model: str, settings: dict[str, Any], address: str = ""):
        # frames are read-only views of the object store's shared memory; nothing writes to them
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self.engine = load(model_path(model), address=address, **settings)
        self.queues: dict[int, queue.SimpleQueue[Request | GammaSchedule]] = {}  # by config index
        self.configs: dict[int, EngineConfig] = {}  # by config index, those that have not begun
        self.transferred = 0  # requests given to the engine and results taken from it

    def ready(self) -> str:
        """Return the id of the actor's node; the call returns once the engine is loaded."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    @ray.method(concurrency_group="watch")
    def heartbeat(self) -> int:
        """Return a counter that changes as long as the engine makes progress."""
        counters = self.engine.counters
        return self.transferred + counters.vision_passes + counters.chunks + counters.rounds

    @ray.method(concurrency_group="feed")
    def feed(
        self,
        requests: list[Request],
        pixels: np.ndarray,
        pixel_indices: list[tuple[int, ...]],
        config_index: int,
        config: EngineConfig,
    ) -> None:
        """Queue requests for a config.

        Args:
            requests: without frames.
            pixels: (T, height, width, 3) uint8, decoded frames of all the requests.
            pixel_indices: for each request the indices of its frames in `pixels`.
            config_index: which config; every index from 0 on is used.
            config: how to decode them. Its gamma schedule, if any, holds from these requests on.
        """
        import torch  # not at the top: the driver imports this module without PyTorch

        frames = torch.from_numpy(pixels)
        requests_of_config = self.queues.setdefault(config_index, queue.SimpleQueue())
        if config.gamma_schedule is not None:
            requests_of_config.put(config.gamma_schedule)
        for request, indices in zip(requests, pixel_indices, strict=True):
            all_of_them = len(indices) == len(frames)
            own = frames if all_of_them else frames[list(indices)]
            requests_of_config.put(replace(request, frames=own))
        self.configs[config_index] = config

    def run(self, mode: Mode, is_leader: bool = True) -> Iterator[Result]:
        """Yield results as rows finish, config after config, until the actor is killed.

        Args:
            is_leader: whether this is rank 0, which decides when a config is finished: once its
                queue is empty and requests with the next config have arrived. The engine sends the
                decision to the other ranks.

        Raises:
            RequestError: `out_of_memory`.
        """
        import torch

        try:
            for config_index in itertools.count():
                for result in self._run_config(config_index, mode, is_leader):
                    self.transferred += 1
                    yield result
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise RequestError("out_of_memory", f"the engine ran out of memory: {error}") from error

    def follow(self, mode: Mode) -> None:
        """Run a rank other than 0. Its results equal those of rank 0 and are dropped."""
        for _ in self.run(mode, is_leader=False):
            pass

    def _run_config(self, config_index: int, mode: Mode, is_leader: bool) -> Iterator[Result]:
        while config_index not in self.configs:
            time.sleep(POLL_SECONDS)
        config = self.configs.pop(config_index)
        self.engine.resize(config.max_num_seqs)
        requests = self._requests(config_index, is_leader)
        yield from self.engine.run(requests, _with_local_model(config.draft), mode=mode)
        del self.queues[config_index]

    def _requests(
        self, config_index: int, is_leader: bool
    ) -> Iterator[Request | GammaSchedule | None]:
        """Yield the queued requests of a config.

        Yields None while the queue is empty, so that the engine goes on with its rows: the driver
        may be waiting for one of their results before it can free memory for the next request.
        """
        requests = self.queues[config_index]
        while True:
            # checked before the queue, so that all requests of this config are taken
            is_finished = is_leader and config_index + 1 in self.queues
            try:
                request = requests.get_nowait()
            except queue.Empty:
                if is_finished:
                    return
                yield None
                continue
            self.transferred += 1
            yield request


def _with_local_model(draft: Draft | None) -> Draft | None:
    """The draft with the path of its model on this machine, if it has one."""
    if draft is None or not draft.model:
        return draft
    return replace(draft, model=model_path(draft.model))


@ray.remote(num_cpus=0)
def free_address() -> str:
    """Return a rendezvous address with a free port, for ranks on the machine where this runs."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@dataclass(frozen=True)
class EngineActors:
    """The actors of one engine, one per rank. All get the same calls; rank 0 returns the results.

    Args:
        ranks: actor handles.
        group: the resources that several ranks share on one machine.
    """

    ranks: list[Any]
    group: PlacementGroup | None = None

    @classmethod
    def start(
        cls, load: EngineLoader, model: str, settings: dict[str, Any], options: dict[str, Any]
    ) -> EngineActors:
        """Start `settings["tensor_parallel_size"]` actors.

        Args:
            options: Ray's options for each of them.
        """
        actor: Any = EngineActor
        count = settings["tensor_parallel_size"]
        if count == 1:
            return cls([actor.options(**options).remote(load, model, settings)])
        resources = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0)}
        bundle = {name: amount for name, amount in resources.items() if amount}
        group = placement_group([bundle] * count, strategy="STRICT_PACK")
        bundles = [
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            for rank in range(count)
        ]
        address = free_address.options(scheduling_strategy=bundles[0]).remote()
        ranks = []
        for rank, strategy in enumerate(bundles):
            placed = actor.options(**options, scheduling_strategy=strategy)
            ranks.append(placed.remote(load, model, settings | {"rank": rank}, address))
        return cls(ranks, group)

    def kill(self) -> None:
        """Kill all ranks, since none can continue without the others."""
        for actor in self.ranks:
            ray.kill(actor)
        if self.group is not None:
            remove_placement_group(self.group)
