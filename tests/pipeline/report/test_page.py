from __future__ import annotations

import hashlib
import html
import re
import shutil
import subprocess
import threading
import time
from collections import Counter
from datetime import datetime, timezone
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.output.schema import RESULT_SCHEMA, to_table
from pipeline.output.writer import open_output
from pipeline.records import UsageError
from pipeline.report import data
from pipeline.report.data import ReportData
from pipeline.report.page import headline, page, write_report
from pipeline.report.runs import Run, latest_job
from pipeline.report.tables import tables

BEGAN = 1_796_000_000.0  # s since 1970
PLOTS = ("throughput", "engine", "waves", "acceptance", "speedup", "phases", "failures", "cost")
HOSTILE = """"><img src=x onerror=alert(1)><script>alert('$x_1$')</script><b style='--a:url(http://127.0.0.1:1/leak)'>&amp;"""

NAME = """"><img src=x>$x_1$<script>"""  # short enough for a plot


def row(number: int, **values: Any) -> dict[str, Any]:
    """A good row, a second after the one before it."""
    return {
        "request_id": hashlib.md5(str(number).encode()).hexdigest(),
        "video_uri": f"s3://archive/clip-{number}.mp4",
        "video_start": 0.0,
        "video_end": 36.0,
        "prompt": "Describe this video.",
        "status": "success",
        "text": "A red circle moves left.",
        "finish_reason": "stop",
        "attempts": 1,
        "num_prompt_tokens": 40,
        "num_visual_tokens": 600,
        "num_generated_tokens": 60,
        "draft": "std",
        "kv_keep": 0.25,
        "rounds": 12,
        "proposed": 60,
        "accepted": 47,
        "vision_s": 0.1,
        "prefill_s": 0.2,
        "decode_s": 0.3,
        "created_at": datetime.fromtimestamp(BEGAN + 1 + number, timezone.utc),
    } | values


def failed(number: int, code: str, message: str = "it is broken", **values: Any) -> dict[str, Any]:
    kept = {"request_id", "video_uri", "prompt", "created_at", "attempts"}
    told = {
        "status": "error",
        "finish_reason": "error",
        "error_code": code,
        "error_message": message,
    }
    return {name: value for name, value in row(number).items() if name in kept} | told | values


def run_of(seconds: float = 30.0, began: float = BEGAN, **values: Any) -> Run:
    about = {
        "model": "demo",
        "draft": "std",
        "engines": 1,
        "device": "cpu",
        "max_bytes_in_flight": 2e6,
    }
    samples = [[float(s), s, 0, 60 * s, 0.6 * s, 1, 4, 1e6] for s in range(int(seconds))]
    waves = [[0.0, seconds / 2, 20, 400, 640, 6.0], [seconds / 2, seconds, 8, 90, 300, 1.0]]
    told = {"outcome": "finished", "about": about, "samples": samples, "waves": waves, "merged": 1}
    return Run(**{"began": began, "seconds": seconds, **told, **values})


def facts_of(
    rows: list[dict[str, Any]], runs: list[Run] | None = None, **values: Any
) -> ReportData:
    errors = sum(r["status"] == "error" for r in rows)
    told = {"everything": (len(rows), errors), "summary": {}, **values}
    return ReportData(
        "s3://archive/out",
        to_table(rows, RESULT_SCHEMA),
        [run_of()] if runs is None else runs,
        **told,
    )


class Page(HTMLParser):
    """What a browser would make of a page: tags, attributes, and words by the element that they
    stand in."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags = Counter[str]()
        self.attributes = list[tuple[str, str, str]]()
        self.words = [""]
        self.open = [""]
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.open.append(tag)
        self.words.append("")

    def handle_data(self, data: str) -> None:
        self.words[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.words.append("")


def plots_in(text: str) -> dict[str, str]:
    """Plot → its `<svg>`; empty where the page says why there is none."""
    sections = {
        m[1]: m[2] for m in re.finditer(r'<h2 id="(\w+)">(.*?)(?=<h2|</body>)', text, re.DOTALL)
    }
    return {
        name: (re.findall(r"<svg.*?</svg>", section, re.DOTALL) or [""])[0]
        for name, section in sections.items()
    }


def everything() -> ReportData:
    """All that a page can show, and hostile words wherever a row can hold words."""
    hostile = {
        "video_uri": f"s3://archive/{HOSTILE}",
        "prompt": HOSTILE,
        "text": HOSTILE,
        "draft": NAME,
    }
    rows = [row(n, num_visual_tokens=100 * 2 ** (n % 5)) for n in range(20)]
    rows += [
        row(n, draft="dense", proposed=0, accepted=0, rounds=60, decode_s=0.9)
        for n in range(20, 24)
    ]
    rows += [row(24, **hostile), row(25, status="truncated", **hostile)]
    rows += [failed(26, NAME, HOSTILE, video_uri=HOSTILE, prompt=HOSTILE), failed(27, "empty_file")]
    about = {
        "model": HOSTILE,
        "draft": HOSTILE,
        "engines": 1,
        "device": HOSTILE,
        "max_bytes_in_flight": 2e6,
    }
    return facts_of(rows, [run_of(about=about, outcome=HOSTILE)], price=4.2)


@pytest.fixture(scope="module")
def full() -> str:
    return page(everything())


# ------------------------------------------------------------------------------------------- safety


def test_every_plot_is_there_and_nothing_comes_from_outside(full: str) -> None:
    found = plots_in(full)
    assert {name: bool(svg) for name, svg in found.items() if name in PLOTS} == dict.fromkeys(
        PLOTS, True
    )
    seen = Page(full)
    assert seen.tags["svg"] == len(PLOTS)
    allowed = {
        "html",
        "head",
        "meta",
        "link",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "p",
        "div",
        "b",
        "span",
        "figure",
    }
    allowed |= {"figcaption", "table", "thead", "tbody", "tr", "th", "td"}
    allowed |= {"svg", "g", "path", "text", "tspan", "defs", "use", "clippath", "rect"}
    assert set(seen.tags) <= allowed
    for tag, name, value in seen.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "xlink:href", "srcset", "action", "data", "poster"):
            assert value.startswith(("#", "data:,")), (tag, name, value)
    code = " ".join(
        [
            *re.findall(r"<style.*?</style>", full, re.DOTALL),
            *(v for _, n, v in seen.attributes if n != "title"),
        ]
    )
    assert all(target.startswith("#") for target in re.findall(r"url\(\s*['\"]?(.)", code))
    assert "@import" not in code and "<!DOCTYPE html>" in full and full.count("<!DOCTYPE") == 1


def test_a_policy_forbids_what_is_not_there(full: str) -> None:
    head = full[: full.index("<body>")]
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', head)
    assert policy and policy[1].startswith("default-src 'none';") and "script-src" not in policy[1]
    assert head.index("Content-Security-Policy") < head.index("<title>") < head.index("<style>")


def test_hostile_words_stay_words(full: str) -> None:
    seen = Page(full)
    assert HOSTILE not in full
    assert sum(HOSTILE in words for words in seen.words) >= 8
    assert any(
        HOSTILE in value for tag, name, value in seen.attributes if (tag, name) == ("span", "title")
    )
    found = plots_in(full)
    for plot in ("acceptance", "failures"):  # a draft's name in a legend, an error code on an axis
        assert any(NAME in words for words in Page(found[plot]).words), plot


@settings(deadline=None, max_examples=60)
@given(
    words=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=5, max_size=5
    )
)
def test_no_word_becomes_markup(words: list[str]) -> None:

    def shown(uri: str, prompt: str, text: str, code: str, message: str) -> Page:
        rows = [
            row(1, video_uri=uri, prompt=prompt, text=text),
            failed(2, code, message, video_uri=uri, prompt=prompt),
        ]
        return Page("".join(table for _, _, table in tables(facts_of(rows))))

    seen = shown(*words)
    plain = shown("uri", "prompt", "text", "code", message="message")
    assert seen.tags == plain.tags
    assert Counter(a[:2] for a in seen.attributes) == Counter(a[:2] for a in plain.attributes)
    said = "".join("\ufffd" if not (c.isprintable() or c in "\n\t") else c for c in words[2])
    assert said in seen.words


def test_credentials_do_not_get_into_the_page() -> None:
    uri = "https://user:hunter2@cdn.example/v.mp4?X-Amz-Signature=c0ffee"
    text = page(facts_of([row(1, video_uri=uri), failed(2, "not_found", video_uri=uri)]))
    assert "v.mp4" in text and "hunter2" not in text and "c0ffee" not in text


# -------------------------------------------------------------------------------------------- words


def test_the_headline_says_how_many_how_fast_what_failed_and_what_drafting_gained() -> None:
    rows = [
        *(row(n) for n in range(27)),
        failed(27, "empty_file"),
        failed(28, "not_found"),
        failed(29, "not_found"),
    ]
    assert headline(facts_of(rows)) == (
        "27 of 30 requests answered in 30 s: 54 a minute, 54 tokens a second. 3 failed: 2 not_found, 1 empty_file. "
        "Drafting read 25% of the context and had 3.92 tokens accepted per round, so a pass of the full model yielded "
        "4.92 tokens instead of 1."
    )


def test_a_page_without_rows_says_so() -> None:
    text = page(facts_of([], []))
    assert "Nothing was captioned" in text and not any(plots_in(text).values())
    assert len(plots_in(text)) == len(PLOTS)


def test_where_all_failed_the_page_tells_why() -> None:
    facts = facts_of(
        [
            failed(n, "not_a_video" if n % 3 else "empty_file", f"file {n} is none")
            for n in range(40)
        ]
    )
    text = page(facts)
    assert (
        headline(facts)
        == "None of 40 requests was answered (in 30 s). 40 failed: 26 not_a_video, 14 empty_file."
    )
    assert [name for name, svg in plots_in(text).items() if svg] == [
        "throughput",
        "waves",
        "failures",
    ]
    assert "25 of 40, some of each code" in text
    assert (
        text.count('<span class="code">empty_file') == 13
        and text.count('<span class="code">not_a_video') == 12
    )


@pytest.mark.parametrize("runs", [[], [run_of(samples=[], waves=[])], None])
def test_one_row_is_enough_for_a_page(runs: list[Run] | None) -> None:
    facts = facts_of([row(0)], runs, price=3.0)
    found = plots_in(page(facts))
    drawn = {name for name, svg in found.items() if svg}
    assert drawn >= {"throughput", "engine", "acceptance", "phases", "cost"}
    assert ("waves" in drawn) == (runs is None)
    assert headline(facts).startswith("1 of 1 request answered in ")


def test_what_the_rows_do_not_tell_is_left_out_with_a_sentence() -> None:
    text = page(facts_of([row(n) for n in range(5)]))
    found = plots_in(text)
    assert not found["speedup"] and not found["cost"] and not found["failures"]
    assert "none with a context of like length was decoded densely" in html.unescape(text)
    assert (
        "It cannot be more than 4.92×" in text
        and "--price-per-hour" in text
        and "No request failed." in text
    )


def test_dense_rows_alone_draw_no_acceptance() -> None:
    dense = {"draft": "dense", "proposed": 0, "accepted": 0, "rounds": 60}
    facts = facts_of([row(n, **dense) for n in range(5)])
    found = plots_in(page(facts))
    assert not found["acceptance"] and not found["speedup"] and found["phases"]
    assert "Drafting" not in headline(facts)


# ------------------------------------------------------------------------------------------ figures


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(
        st.tuples(st.floats(0.01, 500), st.floats(0, 20), st.floats(0, 20)), min_size=1, max_size=40
    ),
    engines=st.integers(1, 4),
)
def test_engines_are_never_more_than_busy_and_no_work_is_lost(
    rows: list[tuple[float, float, float]], engines: int
) -> None:
    """Provided that there was time for it before each row."""
    table = []
    spent = 0.0
    for number, (pause, prefill, decode) in enumerate(rows):
        spent += pause + prefill + decode
        when = datetime.fromtimestamp(BEGAN + spent, timezone.utc)
        table.append(row(number, created_at=when, vision_s=0.0, prefill_s=prefill, decode_s=decode))
    facts = facts_of(table, [run_of(spent + 1, about={"engines": engines})])
    share = data.busy(facts)
    borders = data.edges(facts)
    assert share.shape == (3, len(borders) - 1)
    assert (share >= 0).all() and (share.sum(0) <= 1 + 1e-9).all()
    done = (share * np.diff(borders)).sum(1) * engines
    assert done == pytest.approx([0.0, sum(r[1] for r in rows), sum(r[2] for r in rows)], abs=1e-3)
    assert (np.diff(borders) >= 0.99).all() and len(borders) <= 61


def test_buckets_add_up_by_context_and_draft() -> None:
    rows = [
        row(0, num_visual_tokens=472, accepted=30),
        row(1, num_visual_tokens=473),
        row(2, num_visual_tokens=900),
    ]
    rows += [
        row(3, draft="dense", proposed=0, accepted=0, rounds=60, decode_s=0.6),
        failed(4, "not_found"),
    ]
    found = data.buckets(facts_of(rows))
    assert [(b.longest, b.draft, b.rows) for b in found] == [
        (512, "std", 1),
        (1024, "dense", 1),
        (1024, "std", 2),
    ]
    assert found[0].acceptance == 0.5 and found[0].error == 0.0
    assert found[2].acceptance == pytest.approx(47 / 60) and found[2].seconds == pytest.approx(
        (0.2, 0.4, 0.6)
    )
    assert data.speedups(found) == [(1024, pytest.approx(2.0), pytest.approx(59 / 12))]


def test_a_job_that_went_on_is_one_job_and_last_nights_is_another() -> None:
    runs = [run_of(600, BEGAN + at) for at in (0, 86_400, 86_400 + 1200, 86_400 + 5000)]
    assert latest_job(runs) == runs[1:]
    assert latest_job(runs[:1]) == runs[:1] and latest_job([]) == []


# ------------------------------------------------------------------------------------- real outputs


def test_a_page_is_written_from_an_output_and_changes_nothing_in_it(folder: str) -> None:
    rows = [row(n) for n in range(3)] + [failed(3, "not_found")]
    with open_output(folder, pa.schema([])) as output:
        for one in rows:
            output.add(one)
        output.flush()
        output.write_summary({"requests": 4, "errors": 1})
    where, facts = write_report(folder, 2.0)
    assert where == f"{folder}/_report.html"
    assert facts.table.num_rows == 4 and facts.failures == {"not_found": 1}
    from pipeline.storage import list_names, read_bytes

    text = read_bytes(where).decode()
    assert "3 of 4 requests" in text and "No run left a record here" in text
    assert "All 4 requests of the input have their rows, 1 of them errors." in text
    before = list_names(folder)
    write_report(folder)
    assert list_names(folder) == before
    with open_output(folder, pa.schema([])) as output:
        assert len(output.done) == 4


def test_only_the_last_job_is_told_of(tmp_path: Path) -> None:
    old = [row(n) for n in range(5)]
    new = [
        row(n, created_at=datetime.fromtimestamp(BEGAN + 90_000 + n, timezone.utc))
        for n in range(5, 7)
    ]
    with open_output(str(tmp_path), pa.schema([])) as output:
        for one in old + new:
            output.add(one)
    from pipeline.report.runs import RunRecorder

    for began in (BEGAN, BEGAN + 89_995):
        log = RunRecorder(str(tmp_path), {"engines": 1}, began)
        log.save("stopped", 30.0)
    _, facts = write_report(str(tmp_path))
    assert facts.table.num_rows == 2 and facts.everything == (7, 0) and len(facts.runs) == 1
    text = (tmp_path / "_report.html").read_text()
    assert "7 in all, 0 of them errors" in text and "The last run did not finish" in text


def test_an_empty_output_has_a_page(tmp_path: Path) -> None:
    with open_output(str(tmp_path), pa.schema([])):
        pass
    _, facts = write_report(str(tmp_path))
    assert facts.table.num_rows == 0
    assert "Nothing was captioned" in (tmp_path / "_report.html").read_text()


def test_no_output_and_no_price_below_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no output here"):
        write_report(str(tmp_path))
    for price in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="--price-per-hour"):
            write_report(str(tmp_path), price)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------- a browser


def test_a_browser_shows_every_plot_and_asks_for_nothing_else(full: str, tmp_path: Path) -> None:
    names = (
        "chromium",
        "chromium-browser",
        "google-chrome",
        "google-chrome-stable",
        "chrome",
        "headless_shell",
    )
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on the path")
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(full.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        dom, picture = _browse(browser, server.server_port, tmp_path)
    finally:
        server.shutdown()
    assert set(asked) == {"/page"}, asked
    assert {name for name, svg in plots_in(dom).items() if svg} == set(PLOTS)
    assert Page(dom).tags["script"] == 0
    from PIL import Image

    pixels = np.asarray(Image.open(picture).convert("RGB")).reshape(-1, 3)
    for colour in ((0x3F, 0x6F, 0xB5), (0x4E, 0x9A, 0x8F), (0xE0, 0xA4, 0x3C), (0xC0, 0x50, 0x4D)):
        assert (np.abs(pixels.astype(int) - colour).max(1) <= 8).sum() > 500, colour


def _browse(browser: str, port: int, folder: Path) -> tuple[str, Path]:
    """The page as the browser has it, and as it draws it. Whatever host it looks for is our
    server."""
    picture = folder / "page.png"
    words = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        f"--user-data-dir={folder}/user",
    ]
    # what a browser asks for by itself, such as the time, is none of the page's
    words += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    words += ["--disable-features=NetworkTimeServiceQuerying,OptimizationHints,MediaRouter"]
    words += [f"--host-resolver-rules=MAP * 127.0.0.1:{port}", "--window-size=1000,4000"]
    page_at = f"http://127.0.0.1:{port}/page"
    subprocess.run(
        [*words, f"--screenshot={picture}", page_at], check=True, capture_output=True, timeout=120
    )
    time.sleep(0.5)  # a request that were to come late would be on its way
    dom = subprocess.run(
        [*words, "--dump-dom", page_at], check=True, capture_output=True, text=True, timeout=120
    )
    return dom.stdout, picture
