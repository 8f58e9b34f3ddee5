from __future__ import annotations

import pytest

from tests.pipeline.output.stub_output import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()
