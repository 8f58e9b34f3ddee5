"""Any sequence of commits, retries and crashes leaves every row once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from pipeline import storage
from pipeline.output.writer import OutputWriter
from pipeline.records import RequestError
from tests.pipeline.output.stub_output import (
    Clock,
    crash,
    fail_records,
    hex_id,
    ids,
    opened,
    plain_read,
    row,
)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 11), st.booleans()),
        st.tuples(
            st.sampled_from(
                ["flush", "close", "retry", "crash", "crash in commit", "crash in clean-up"]
            )
        ),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(STEPS, st.integers(1, 4))
def test_after_any_sequence_of_steps_every_row_is_there_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, ...]], rows_per_part: int
) -> None:
    """Rows are added, committed and retried; drivers end between any two writes.

    The model: `kept` are the committed rows, each with its last committed status. Rows that were
    only added may be there or not."""
    uri = str(tmp_path_factory.mktemp("out") / "o")
    clock = Clock()
    output = opened(uri, clock, rows_per_part=rows_per_part)
    added: dict[int, str] = {}

    def reopen(**options: bool) -> OutputWriter:
        return opened(uri, clock, rows_per_part=rows_per_part, **options)

    def committed() -> dict[int, str]:
        table = pipeline.read(uri)
        assert len(set(ids(table))) == len(table)
        return {
            int(i, 16): s
            for i, s in zip(
                table["request_id"].to_pylist(), table["status"].to_pylist(), strict=True
            )
        }

    for step, *arguments in steps:
        kept = committed()
        if step == "add":
            i = arguments[0]
            status = "error" if arguments[1] else "success"
            if bytes.fromhex(hex_id(i)) not in output.done:
                output.add(row(i, status))
                added[i] = status
        elif step == "flush":
            output.flush()
            kept |= added
            assert committed() == kept
        elif step in ("close", "retry"):
            output.close()
            kept |= added
            assert committed() == kept
            assert plain_read(uri) == sorted(kept)
            output = reopen(retry_failed=step == "retry")
            added = {}
        else:
            with pytest.MonkeyPatch.context() as patch:
                if step == "crash in commit":
                    fail_records(patch)
                elif step == "crash in clean-up":
                    patch.setattr(storage, "delete", _raise)
                try:
                    if step != "crash":
                        output.flush()
                except RequestError:
                    pass
                crash(output, clock)
            now = committed()
            assert kept.items() - {(i, s) for i, s in kept.items() if i in added} <= now.items()
            assert set(now) <= set(kept) | set(added)
            output = reopen()
            added = {}
            assert committed() == now
            assert plain_read(uri) == sorted(now)
            assert {int.from_bytes(i, "big") for i in output.done} == set(now)
            assert output.totals["requests"] == len(now)
    final = committed() | added
    output.close()
    assert committed() == final
    assert plain_read(uri) == sorted(final)
    assert output.totals["requests"] == len(final)
    assert output.totals["errors"] == sum(status == "error" for status in final.values())


def _raise(uri: str) -> None:
    raise RequestError("storage_error", f"{uri}: the machine is gone")
