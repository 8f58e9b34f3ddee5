"""Which driver may write to an output: the one with the highest epoch in `_lease/`.

The holder renews its lease every 3 s. A lease that was not renewed for 10 s has expired, and the
next driver takes the output over with a higher epoch.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from pipeline.output.folder import OutputFolder, lease_file
from pipeline.records import RequestError, RunError, UsageError

RENEW_S = 3.0
EXPIRE_S = 10.0
POLL_S = 1.0  # between two reads of a lease that may expire


class LeaseLost(RunError):
    """Another driver has taken the output over; this one must not write to it any more."""


class Lease:
    """A driver's lease of an output, renewed in a thread of its own."""

    def __init__(self, output: OutputFolder, epoch: int, clock: Callable[[], float]):
        self._output = output
        self.epoch = epoch
        self._clock = clock
        self._owner = f"{socket.gethostname()} process {os.getpid()} {uuid.uuid4().hex}"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep_renewing, name="lease", daemon=True)

    def take(self) -> bool:
        """Takes the lease if its epoch is free, and then removes those of older epochs. False if
        another driver has taken the epoch."""
        if not self._output.put_if_absent(lease_file(self.epoch), self._content()):
            return False
        for epoch in self._output.lease_epochs():
            if epoch < self.epoch:
                self._output.delete(lease_file(epoch))
        self._thread.start()
        return True

    def check(self) -> None:
        """Raises LeaseLost if another driver has taken the output over."""
        if max(self._output.lease_epochs(), default=0) != self.epoch:
            raise LeaseLost(f"another driver has taken over {self._output}: this one stops writing")

    def stop(self) -> None:
        """Stops renewing; the lease then expires."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(EXPIRE_S)

    def release(self) -> None:
        """Stops renewing and ends the lease at once."""
        self.stop()
        self._output.put(lease_file(self.epoch), self._content(released=True))

    def _keep_renewing(self) -> None:
        while not self._stopped.wait(RENEW_S):
            try:
                self._output.put(lease_file(self.epoch), self._content())
            except RequestError:
                # the next renewal is in 3 s; if that is too late, `check` stops the next write
                continue

    def _content(self, released: bool = False) -> bytes:
        content = {
            "epoch": self.epoch,
            "owner": self._owner,
            "renewed": self._clock(),
            "released": released,
        }
        return json.dumps(content).encode()


def acquire(
    output: OutputFolder,
    newest_epoch: int,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease:
    """Takes the lease of an output, once the present one has expired or was released.

    Args:
        newest_epoch: of the output's parts; the lease's epoch is higher than this and than all
            leases before it.

    Raises:
        UsageError: another driver is writing to the output.
        RequestError: storage fails.
    """
    while True:
        expired_epoch = wait_until_free(output, clock, sleep)
        lease = Lease(output, max(expired_epoch, newest_epoch) + 1, clock)
        if lease.take():
            return lease


def wait_until_free(
    output: OutputFolder,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Waits until the newest lease is released or expired, and returns its epoch; 0 if there is
    none. Writes nothing. Raises as `acquire`.

    Clocks of two machines may differ, so a lease also counts as expired when it did not change for
    10 s of this machine's clock.
    """
    epoch = max(output.lease_epochs(), default=0)
    first = _read_lease(output, epoch)
    start = clock()
    while (lease := _read_lease(output, epoch)) and not lease["released"]:
        if first and lease["renewed"] != first["renewed"]:
            owner = lease["owner"].rpartition(" ")[0]
            raise UsageError(f"{output}: another driver ({owner}) is writing to this output")
        if clock() - min(lease["renewed"], start) > EXPIRE_S:
            break
        sleep(POLL_S)
    return epoch


def _read_lease(output: OutputFolder, epoch: int) -> dict[str, Any] | None:
    """None if there is no such lease, or the file was not written by a driver."""
    try:
        content = json.loads(output.read(lease_file(epoch)))
        return content if {"owner", "renewed", "released"} <= content.keys() else None
    except (ValueError, AttributeError):
        return None
    except RequestError as error:
        if error.code == "not_found":
            return None
        raise
