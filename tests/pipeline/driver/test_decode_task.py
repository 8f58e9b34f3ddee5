from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import pipeline.driver.decode_task
print({"torch", "transformers", "pyarrow"} & set(sys.modules))
"""


def test_decoding_processes_do_not_import_pytorch() -> None:
    """There are many of them on a machine, and each would take half a gigabyte."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
