"""Tables of figures on standard error; standard output is left to the JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table


def stderr_console(width: int) -> Console:
    """A console of a fixed width, so that tables are not cut in logs."""
    return Console(stderr=True, width=width)


def figures_table(
    title: str, columns: Sequence[str], rows: Iterable[Mapping[str, object]]
) -> Table:
    """One line per row; a column that a row lacks stays empty."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    return table
