from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

import pipeline
from pipeline import storage
from pipeline.output import lease
from pipeline.output.folder import OutputFolder
from pipeline.output.lease import LeaseLost
from pipeline.output.writer import open_output, wait_for_output
from pipeline.records import UsageError
from tests.pipeline.output.stub_output import (
    EMPTY,
    Clock,
    crash,
    files,
    ids,
    opened,
    plain_read,
    row,
)


def test_a_second_driver_is_refused(tmp_path: Path, clock: Clock) -> None:
    uri = str(tmp_path)
    with opened(uri, clock) as output:
        file = tmp_path / "_lease" / "1.json"

        def renew(seconds: float) -> None:
            clock.sleep(seconds)
            file.write_text(json.dumps(json.loads(file.read_text()) | {"renewed": clock()}))

        with pytest.raises(UsageError, match="another driver"):
            open_output(OutputFolder(uri), EMPTY, clock=clock, sleep=renew)
        output.add(row(1))
    assert ids(pipeline.read(uri)) == [1]


def test_opening_waits_until_a_dead_drivers_lease_expires(folder: str, clock: Clock) -> None:
    output = opened(folder, clock)
    output.stop()
    start = clock.now
    opened(folder, clock).close()
    assert lease.EXPIRE_S < clock.now - start <= lease.EXPIRE_S + 2


def test_a_dead_driver_whose_clock_is_ahead_is_not_waited_for_longer(
    tmp_path: Path, clock: Clock
) -> None:
    clock.now += 5000
    opened(str(tmp_path), clock).stop()
    clock.now -= 5000
    opened(str(tmp_path), clock).close()
    assert clock.now <= 1000 + lease.EXPIRE_S + 2


def test_waiting_for_a_lease_changes_nothing(folder: str, clock: Clock) -> None:
    """Opening the output afterwards waits for nothing. A new output is free at once."""
    uri = storage.join(folder, "out")
    start = clock.now
    wait_for_output(OutputFolder(uri), clock, clock.sleep)
    opened(uri, clock).stop()
    before = files(uri)
    wait_for_output(OutputFolder(uri), clock, clock.sleep)
    waited = clock.now
    assert lease.EXPIRE_S < waited - start <= lease.EXPIRE_S + 2 and files(uri) == before
    opened(uri, clock).close()
    assert clock.now == waited


def test_a_lease_is_renewed(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed = threading.Event()
    put = storage.put
    monkeypatch.setattr(lease, "RENEW_S", 0.01)

    def seen(uri: str, data: bytes) -> None:
        put(uri, data)
        if json.loads(data).get("renewed") == 1003.0:
            renewed.set()

    monkeypatch.setattr(storage, "put", seen)
    output = opened(str(tmp_path), clock)
    clock.now += 3
    assert renewed.wait(30)
    output.close()


@pytest.mark.parametrize("where", ["before the part", "before the record"])
@pytest.mark.parametrize("grouping", ["same parts", "other parts"])
def test_a_driver_suspended_until_another_has_finished_changes_nothing(
    folder: str, clock: Clock, where: str, grouping: str
) -> None:
    a = opened(folder, clock)
    for i in range(4):
        a.add(row(i, text="by a"))
    put = storage.put_if_absent

    def everything_by_b(uri: str, data: bytes) -> bool:
        """A is suspended here, right after it checked its lease."""
        if ("/part-" in uri) != (where == "before the part"):
            return put(uri, data)
        patch.undo()
        crash(a, clock)
        with opened(folder, clock, rows_per_part=4 if grouping == "same parts" else 3) as b:
            for i in range(4):
                b.add(row(i, text="by b"))
        return put(uri, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "put_if_absent", everything_by_b)
        if where == "before the record" and grouping == "other parts":
            a.flush()  # too late to notice: the record names a part that B removed
        else:
            with pytest.raises(LeaseLost):
                a.flush()
    a.add(row(9))
    with pytest.raises(LeaseLost):
        a.flush()
    table = pipeline.read(folder)
    assert ids(table) == [0, 1, 2, 3]
    assert set(table["text"].to_pylist()) == {"by b"}
    with opened(folder, clock) as c:
        assert len(c.done) == 4
    if not folder.startswith("s3"):
        assert plain_read(folder) == [0, 1, 2, 3]


def test_a_driver_suspended_after_its_part_loses_its_lease(folder: str, clock: Clock) -> None:
    a = opened(folder, clock)
    a.add(row(1, text="by a"))
    put = storage.put_if_absent

    def pause(uri: str, data: bytes) -> bool:
        placed = put(uri, data)
        if "/part-" in uri:
            patch.undo()
            crash(a, clock)
            with opened(folder, clock) as b:
                assert b.done == set()
                b.add(row(1, text="by b"))
        return placed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "put_if_absent", pause)
        with pytest.raises(LeaseLost):
            a.flush()
    assert pipeline.read(folder)["text"].to_pylist() == ["by b"]


def test_late_files_of_an_older_driver_are_replaced(tmp_path: Path, clock: Clock) -> None:
    """A writes files of the same names after B has removed leftovers."""
    uri = str(tmp_path)
    a = opened(uri, clock)
    a.add(row(1, text="by a"))
    a.flush()
    late = {
        path: path.read_bytes() for path in [*tmp_path.glob("part-*"), *tmp_path.glob("_ledger/*")]
    }
    for path in late:
        path.unlink()
    crash(a, clock)
    with opened(uri, clock) as b:
        for path, data in late.items():
            path.write_bytes(data)
        b.add(row(1, text="by b"))
    assert pipeline.read(uri)["text"].to_pylist() == ["by b"]
    assert plain_read(uri) == [1]
