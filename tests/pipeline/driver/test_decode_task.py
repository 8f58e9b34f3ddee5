from __future__ import annotations

import subprocess
import sys


def test_processes_that_decode_load_no_pytorch() -> None:
    """There are many of them on a machine, and each would take half a gigabyte."""
    script = "import sys, pipeline.driver.decode_task; print({'torch', 'transformers', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
