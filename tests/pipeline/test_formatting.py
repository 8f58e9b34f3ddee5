from __future__ import annotations

import pytest

from pipeline.formatting import format_duration, format_number


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (600, "10 min"), (7140, "119 min"), (12_000, "3 h 20 min")],
)
def test_durations_have_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (1.5, "1.5"), (43.51, "43.5"), (123.4, "123"), (12345.6, "12,346")],
)
def test_numbers_have_three_significant_digits_or_all_before_the_point(
    value: float, text: str
) -> None:
    assert format_number(value) == text
