"""The report: one page of HTML with everything in it, made from what a run wrote and put beside it.

No script runs in it and nothing outside is asked for; a policy in its head says so to the browser
too. Every word that comes from rows (names, prompts, captions, messages) passes `text`."""

from __future__ import annotations

import math

from pipeline import storage
from pipeline.records import UsageError
from pipeline.report import data
from pipeline.report.data import ReportData
from pipeline.report.drawing import Plot
from pipeline.report.figures import plots
from pipeline.report.monitor import duration, number
from pipeline.report.tables import count, tables, text

NAME = "_report.html"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
STYLE = """
:root { color-scheme: light; --ink: #1f2933; --soft: #5b6875; --line: #d9dfe5; --bad: #a33a33; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1.25rem 4rem; color: var(--ink); background: #fff;
       font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.05rem; color: var(--soft); font-weight: 600; margin: 0 0 .75rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
.headline { font-size: 1.4rem; line-height: 1.4; margin: 0 0 .5rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem; margin: 1.5rem 0; }
.tiles div { border: 1px solid var(--line); border-radius: 6px; padding: .55rem .75rem; }
.tiles b { display: block; font-size: 1.35rem; font-weight: 600; }
.tiles span, figcaption, .note { color: var(--soft); font-size: .9rem; }
figure { margin: 0; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { margin-top: .35rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem .35rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; white-space: nowrap; }
td.n, th.n { text-align: right; white-space: nowrap; }
td { overflow-wrap: anywhere; min-width: 4rem; }
.code { color: var(--bad); white-space: nowrap; }
"""


def write_report(output: str, price: float | None = None) -> tuple[str, ReportData]:
    """Puts `_report.html` into an output folder.

    Args:
        price: of an hour of all machines together, in any currency.

    Returns:
        The page's URI, and the facts that it tells of.

    Raises:
        UsageError: there is no output here, or the price is below 0. RequestError: storage failed.
    """
    if price is not None and not 0 <= price < math.inf:
        raise UsageError(f"--price-per-hour is {price}: 0 or more is needed")
    output = storage.normalize(output).rstrip("/")
    facts = data.gather(output, price)
    uri = storage.join(output, NAME)
    storage.put(uri, page(facts).encode())
    return uri, facts


def page(facts: ReportData) -> str:
    """The whole page."""
    body = [
        f"<h1>{text(facts.output)}</h1>",
        f'<p class="headline">{text(headline(facts))}</p>',
        f'<p class="note">{text(_behind(facts))}</p>',
        _tiles(facts),
        *map(_figure, plots(facts)),
        *(_section(title, note, table) for title, note, table in tables(facts)),
    ]
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>Report: {text(facts.output)}</title><style>{STYLE}</style>"
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


# -------------------------------------------------------------------------------------------- words


def headline(facts: ReportData) -> str:
    """How many, how fast, what failed and why, and what drafting gained."""
    rows = facts.table.num_rows
    good = int(facts.good.sum())
    if not rows:
        return "Nothing was captioned: this output has no rows yet."
    took = f"in {duration(facts.running)}"
    if not good:
        first = f"None of {count(rows, 'request')} was answered ({took})."
    else:
        tokens = facts.real("num_generated_tokens").sum() / facts.running
        speed = f"{_pace(good / facts.running)}, {number(tokens)} tokens a second"
        first = f"{good:,} of {count(rows, 'request')} answered {took}: {speed}."
    return " ".join(filter(None, (first, _failed(facts), _gain(facts))))


def _pace(per_second: float) -> str:
    if per_second >= 1:
        return f"{number(per_second)} a second"
    per_minute = 60 * per_second
    return (
        f"{number(per_minute)} a minute"
        if per_minute >= 1
        else f"{number(60 * per_minute)} an hour"
    )


def _failed(facts: ReportData) -> str:
    found = facts.failures
    if not found:
        return "None failed."
    named = ", ".join(f"{count:,} {code}" for code, count in list(found.items())[:4])
    more = f" and {len(found) - 4} other codes" if len(found) > 4 else ""
    return f"{sum(found.values()):,} failed: {named}{more}."


def _gain(facts: ReportData) -> str:
    rounds = facts.real("rounds").sum()
    accepted = facts.real("accepted").sum()
    if not facts.real("proposed").sum():
        return ""
    keep = facts.real("kv_keep")[facts.good & (facts.real("proposed") > 0)].mean()
    return (
        f"Drafting read {keep:.0%} of the context and had {accepted / rounds:.2f} tokens accepted per round, so a pass "
        f"of the full model yielded {1 + accepted / rounds:.2f} tokens instead of 1."
    )


def _behind(facts: ReportData) -> str:
    """What the page covers."""
    rows, errors = facts.everything
    said = []
    if len(facts.runs) > 1:
        said.append(f"{len(facts.runs)} runs, less than an hour apart, are shown as one.")
    if not facts.runs and rows:
        said.append("No run left a record here, so time is counted from the first row to the last.")
    if rows > facts.table.num_rows:
        said.append(
            f"Earlier runs' rows are in the folder too: {rows:,} in all, {errors:,} of them errors."
        )
    if facts.runs and facts.runs[-1].outcome != "finished":
        said.append("The last run did not finish; the same command resumes it.")
    elif "requests" in facts.summary:
        total = facts.summary["requests"]
        failed = facts.summary.get("errors", 0)
        said.append(
            f"All {count(total, 'request')} of the input have their rows, {failed:,} of them errors."
        )
    return " ".join(said)


def _tiles(facts: ReportData) -> str:
    good = int(facts.good.sum())
    written = facts.real("num_generated_tokens").sum()
    spoken = facts.hours
    tiles = [
        (f"{good:,}", "answered"),
        (f"{facts.table.num_rows - good:,}", "failed"),
        (number(written / facts.running), "tokens a second"),
        (
            f"{facts.engine_s.sum() / facts.engines / facts.running:.0%}",
            "of the time engines worked",
        ),
    ]
    if rounds := facts.real("rounds").sum():
        tiles.append((f"{facts.real('accepted').sum() / rounds:.2f}", "accepted per round"))
    tiles.append((f"{number(spoken)} h", "of footage"))
    if facts.price is not None:
        money = facts.price * facts.running / 3600
        tiles.append((number(money), "cost"))
        tiles += [(number(money * of / units), what) for units, of, what in (
            (good, 1000, "per 1,000 answers"), (written, 1e6, "per million tokens"), (spoken, 1, "per hour of footage"),
        ) if units]  # fmt: skip
    return (
        '<div class="tiles">'
        + "".join(f"<div><b>{v}</b><span>{w}</span></div>" for v, w in tiles)
        + "</div>"
    )


# ------------------------------------------------------------------------------------------- blocks


def _figure(plot: Plot) -> str:
    """A plot under its title, with what to look for; where there is none, why."""
    if not plot.svg:
        return f'<h2 id="{plot.name}">{text(plot.title)}</h2><p class="note">{text(plot.look)}</p>'
    drawn = plot.svg.replace("<svg", f'<svg role="img" aria-label="{text(plot.title)}"', 1)
    look = f"<figcaption>{text(plot.look)}</figcaption>"
    return f'<h2 id="{plot.name}">{text(plot.title)}</h2><figure>{drawn}{look}</figure>'


def _section(title: str, note: str, table: str) -> str:
    return f'<h2>{text(title)}</h2><p class="note">{text(note)}</p><div class="wide">{table}</div>'
