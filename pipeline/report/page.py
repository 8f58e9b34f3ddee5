"""The report: one HTML page without scripts or references to anything outside.

The templates in `templates/` escape every text; a content security policy in the page's head
forbids scripts and requests as well.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline import storage
from pipeline.records import UsageError
from pipeline.report.data import ReportData, load_report_data
from pipeline.report.figures import plots
from pipeline.report.overview import coverage, headline, tiles
from pipeline.report.tables import tables

FILE_NAME = "_report.html"


def write_report(output: str, price_per_hour: float | None = None) -> tuple[str, ReportData]:
    """Write `_report.html` into an output folder.

    Args:
        output: URI of the folder.
        price_per_hour: Price of all machines together, in any currency.

    Returns:
        The page's URI, and the data that it shows.

    Raises:
        UsageError: There is no output in the folder, or the price is negative or infinite.
        RequestError: Storage failed.
    """
    if price_per_hour is not None and not 0 <= price_per_hour < math.inf:
        raise UsageError(f"--price-per-hour is {price_per_hour}: 0 or more is needed")
    output = storage.normalize(output).rstrip("/")
    data = load_report_data(output, price_per_hour)
    uri = storage.join(output, FILE_NAME)
    storage.put(uri, render_page(data).encode())
    return uri, data


def render_page(data: ReportData) -> str:
    """The HTML of the whole page."""
    return render(
        "page.html.j2",
        output=data.output,
        headline=headline(data),
        coverage=coverage(data),
        tiles=tiles(data),
        plots=plots(data),
        tables=tables(data),
    )


def render(template: str, **values: Any) -> str:
    """A template of the report, filled with values."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("pipeline.report"),
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _printable(value: Any) -> Any:
    """Replace control characters in text; markup is left as it is.

    They include the characters that change the direction of the text around them.
    """
    if isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(value))
