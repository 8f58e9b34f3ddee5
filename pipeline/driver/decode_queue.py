"""Choose the video that is decoded next, and the replica that it is decoded for.

Reads the driver's state and changes nothing. Decoding runs ahead of the engines within two limits:
requests per replica (`DriverLimits.ahead`) and bytes of frames. A group that exceeds the bytes by
itself is decoded while no other frames are kept.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeline.driver.state import DecodeGroup, DriverLimits, Replica, RunState


class NextDecode(NamedTuple):
    """A group to decode, and the replica in whose `undecoded` it is."""

    group: DecodeGroup
    source: Replica


def least_loaded(replicas: list[Replica]) -> Replica:
    """The replica with the fewest requests per slot; among equals, one whose engine runs."""
    return min(
        replicas,
        key=lambda replica: (replica.ahead / replica.slots, not replica.engine.running),
    )


def may_decode_ahead(state: RunState, replica: Replica, limits: DriverLimits) -> bool:
    """Whether another group may be decoded for the replica, as far as requests are concerned."""
    return not state.frame_bytes or replica.ahead < limits.ahead * replica.slots


def next_decode(state: RunState, replica: Replica, max_frame_bytes: int) -> NextDecode | None:
    """The group to decode for a replica; None if there is none or it exceeds the bytes.

    A replica without groups of its own takes the last one of the replica that has the most.
    """
    source = replica
    if not replica.undecoded:
        source = max(state.replicas, key=lambda other: len(other.undecoded))
    if not source.undecoded:
        return None
    group = source.undecoded[0 if source is replica else -1]
    if state.frame_bytes and state.frame_bytes + group.nbytes > max_frame_bytes:
        return None
    return NextDecode(group, source)
