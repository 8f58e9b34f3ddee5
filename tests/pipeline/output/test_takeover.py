"""Two drivers as processes: one is suspended between a part and its record, and continues after the
other has finished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset

import pipeline
from pipeline.config import ROOT
from pipeline.output.folder import OutputFolder
from pipeline.output.writer import open_output

COUNT = 6
SUSPENDED_DRIVER = """
import os, signal, sys
import pyarrow as pa
from pipeline import storage
from pipeline.output.folder import OutputFolder
from pipeline.output.lease import LeaseLost
from pipeline.output.writer import open_output

put = storage.put_if_absent

def put_and_suspend(uri, data):
    done = put(uri, data)
    if "/part-" in uri and len(storage.list_names(storage.join(sys.argv[1], "_ledger"))) == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return done

storage.put_if_absent = put_and_suspend
output = open_output(OutputFolder(sys.argv[1]), pa.schema([]), rows_per_part=2)
try:
    for i in range(int(sys.argv[2])):
        output.add({"request_id": f"{i:032x}", "status": "success", "text": "by a"})
except LeaseLost:
    sys.exit(7)
"""


def test_a_driver_suspended_between_part_and_record_loses_its_lease(
    tmp_path: Path,
) -> None:
    words = [sys.executable, "-c", SUSPENDED_DRIVER, str(tmp_path), str(COUNT)]
    suspended = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        while Path(f"/proc/{suspended.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert suspended.poll() is None
            time.sleep(0.05)
        assert len(list(tmp_path.glob("part-*"))) == 2
        with open_output(OutputFolder(str(tmp_path)), pa.schema([]), rows_per_part=2) as output:
            assert len(output.done) == 2  # of the part that has its record
            for i in range(COUNT):
                if bytes.fromhex(f"{i:032x}") not in output.done:
                    output.add({"request_id": f"{i:032x}", "status": "success", "text": "by b"})
        suspended.send_signal(signal.SIGCONT)
        assert suspended.wait() == 7
    finally:
        suspended.kill()
        suspended.wait()
    table = pipeline.read(str(tmp_path)).sort_by("request_id")
    assert table["request_id"].to_pylist() == [f"{i:032x}" for i in range(COUNT)]
    assert table["text"].to_pylist() == ["by a"] * 2 + ["by b"] * 4
    assert (
        pyarrow.dataset.dataset(sorted(map(str, tmp_path.glob("part-*.parquet")))).count_rows()
        == COUNT
    )
