"""The checks of the suite `gpu`, under pytest: compiled kernels and captured rounds.

The suite itself also runs where pytest is not installed.
"""

from __future__ import annotations

import time

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_every_check_of_the_suite_passes() -> None:
    from jobs.suites.gpu import checks

    results = checks.run("cuda", tiny=False, deadline=time.monotonic() + 600)
    assert not results.skipped
    assert {name: results.outcomes[name]["error"] for name in results.failed} == {}
