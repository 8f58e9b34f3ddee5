"""What only a GPU can show: kernels as they are compiled, captured rounds. The checks are those of
the benchmark suite `gpu`, which runs where pytest is not installed."""

from __future__ import annotations

import time

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_every_check_of_the_suite() -> None:
    from jobs.suites.gpu import checks

    done, late = checks.run("cuda", False, time.monotonic() + 600)
    assert not late
    assert {name: check["error"] for name, check in done.items() if not check["ok"]} == {}
