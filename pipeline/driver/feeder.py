"""Choose the requests that an engine is fed next, and pack them into batches.

Reads the driver's state and changes nothing. An engine decodes with one config at a time: requests
with another config are fed once all batches with the previous one have arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

from pipeline.config import Job
from pipeline.driver.backend import FeedBatch
from pipeline.driver.state import DecodeGroup, DriverLimits, Replica, RunState
from pipeline.driver.suspects import SuspectGroup
from pipeline.records import EngineConfig, Frames, PlannedRequest
from std_core.types import Request


@dataclass
class NextFeed:
    """What a replica takes from the queues of decoded requests.

    Args:
        config: the engine's config from now on.
        requests: to feed to the engine, all with this config.
        undecoded: requests whose frames were lost; they have to be decoded again first.
        taken: how many requests to remove from the `sources`: those above, and those that were
            completed while they waited.
    """

    config: EngineConfig | None
    requests: list[PlannedRequest] = field(default_factory=list)
    undecoded: list[PlannedRequest] = field(default_factory=list)
    taken: int = 0


def sources(state: RunState, replica: Replica) -> list[deque[PlannedRequest]]:
    """The queues that a replica takes requests from, in order of preference.

    They are its own, the requests decoded for engines that died, and the queues of replicas whose
    engine does not run yet.
    """
    idle = [other.decoded for other in state.replicas if not other.engine.running]
    return [replica.decoded, state.returned, *idle]


def next_feed(state: RunState, replica: Replica, limits: DriverLimits) -> NextFeed:
    """Choose decoded requests for a replica whose engine runs."""
    engine = replica.engine
    room = limits.in_engine * replica.slots - len(engine.requests)
    choice = NextFeed(engine.config)
    for request in _waiting(state, replica):
        if len(choice.requests) >= room:
            break
        tracked = state.in_flight.get(request.request_id)
        if tracked is not None and tracked.group.pixels is None:
            choice.undecoded.append(request)
        elif tracked is not None:
            config = replica.within_slots(tracked.group.config)
            if config != choice.config:
                if choice.requests or state.is_being_fed(engine):
                    break
                choice.config = config
            choice.requests.append(request)
        choice.taken += 1
    return choice


def _waiting(state: RunState, replica: Replica) -> Iterator[PlannedRequest]:
    for queue in sources(state, replica):
        yield from queue


def groups_without_frames(state: RunState, suspects: SuspectGroup) -> list[DecodeGroup]:
    """The suspects' decode groups whose frames were lost, each once."""
    groups = {}
    for request_id in suspects.requests:
        group = state.in_flight[request_id].group
        if group.pixels is None:
            groups[id(group)] = group
    return list(groups.values())


def batches(
    state: RunState,
    replica: Replica,
    requests: list[PlannedRequest],
    *,
    job: Job,
    max_model_len: int,
) -> Iterator[FeedBatch]:
    """Pack requests into batches of neighbours that share their decoded frames.

    Args:
        requests: in flight, with frames; fed with the engine's config.
        max_model_len: limit of a request's context and text together, in tokens.
    """
    engine = replica.engine
    assert engine.config is not None
    in_flight = [state.in_flight[request.request_id] for request in requests]
    for _, members in groupby(in_flight, key=lambda member: id(member.group)):
        same_group = list(members)
        group = same_group[0].group
        planned = [member.request for member in same_group]
        frames = [group.frames[request.frames_key] for request in planned]
        yield FeedBatch(
            requests=[
                _engine_request(request, own.frames, job, max_model_len)
                for request, own in zip(planned, frames, strict=True)
            ],
            pixels=group.pixels,
            pixel_indices=[own.pixel_indices for own in frames],
            config_index=engine.config_index,
            config=_with_own_schedule(engine.config, replica.within_slots(group.config)),
        )


def _with_own_schedule(config: EngineConfig, own: EngineConfig) -> EngineConfig:
    """The wave's own config if it equals the engine's, else the engine's.

    `EngineConfig` compares without the gamma schedule, so that an engine continues with the next
    wave without a change of config. Each wave keeps its own schedule.
    """
    return own if own == config else config


def _engine_request(
    planned: PlannedRequest, frames: Frames, job: Job, max_model_len: int
) -> Request:
    max_tokens = min(job.max_tokens, max_model_len - planned.context)
    return Request(
        planned.request_id,
        planned.input_row.prompt,
        frames=None,
        video_id=planned.frames_key,
        fps=frames.fps,
        sampling=replace(job.sampling, max_tokens=max_tokens),
        times=frames.pts,
    )
