from __future__ import annotations

import html
import re
import shutil
import subprocess
import threading
import time
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.output.folder import OutputFolder
from pipeline.output.writer import open_output
from pipeline.records import UsageError
from pipeline.report.page import render_page, write_report
from pipeline.report.runs import RunRecord, RunRecorder
from pipeline.storage import list_names, read_bytes
from tests.pipeline.report.parsed_html import ParsedHtml, plots_in
from tests.pipeline.report.stub_data import (
    HOSTILE,
    HOSTILE_NAME,
    START,
    data_of,
    failed,
    hostile_data,
    row,
    run_of,
)

PLOTS = ("throughput", "engine", "waves", "acceptance", "speedup", "phases", "failures", "cost")


@pytest.fixture(scope="module")
def full_page() -> str:
    """A page with every plot and table, and hostile text in them."""
    return render_page(hostile_data())


# ------------------------------------------------------------------------------------------- safety


def test_every_plot_is_there_and_nothing_is_loaded_from_outside(full_page: str) -> None:
    found = plots_in(full_page)
    assert {name: bool(svg) for name, svg in found.items() if name in PLOTS} == dict.fromkeys(
        PLOTS, True
    )
    parsed = ParsedHtml(full_page)
    assert parsed.tags["svg"] == len(PLOTS)
    allowed = [
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
        "figcaption",
    ]
    allowed += ["table", "thead", "tbody", "tr", "th", "td"]
    allowed += ["svg", "g", "path", "text", "tspan", "defs", "use", "clippath", "rect"]
    assert set(parsed.tags) <= set(allowed)
    for tag, name, value in parsed.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "xlink:href", "srcset", "action", "data", "poster"):
            assert value.startswith(("#", "data:,")), (tag, name, value)
    styles = re.findall(r"<style.*?</style>", full_page, re.DOTALL)
    values = [value for _, name, value in parsed.attributes if name != "title"]
    code = " ".join([*styles, *values])
    assert all(target.startswith("#") for target in re.findall(r"url\(\s*['\"]?(.)", code))
    assert "@import" not in code
    assert full_page.startswith("<!DOCTYPE html>")
    assert full_page.count("<!DOCTYPE") == 1


def test_a_content_security_policy_forbids_scripts_and_requests(full_page: str) -> None:
    head = full_page[: full_page.index("<body>")]
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', head)
    assert policy is not None
    assert policy[1].startswith("default-src 'none';")
    assert "script-src" not in policy[1]
    assert head.index("Content-Security-Policy") < head.index("<title>") < head.index("<style>")


def test_hostile_text_stays_text(full_page: str) -> None:
    parsed = ParsedHtml(full_page)
    assert HOSTILE not in full_page
    assert sum(HOSTILE in text for text in parsed.texts) >= 8
    assert any(
        HOSTILE in value
        for tag, name, value in parsed.attributes
        if (tag, name) == ("span", "title")
    )
    plots = plots_in(full_page)
    for plot in ("acceptance", "failures"):  # a draft's name in a legend, an error code on an axis
        assert any(HOSTILE_NAME in text for text in ParsedHtml(plots[plot]).texts), plot


def test_credentials_do_not_get_into_the_page() -> None:
    uri = "https://user:hunter2@cdn.example/v.mp4?X-Amz-Signature=c0ffee"
    page = render_page(data_of([row(1, video_uri=uri), failed(2, "not_found", video_uri=uri)]))
    assert "v.mp4" in page
    assert "hunter2" not in page
    assert "c0ffee" not in page


# ------------------------------------------------------------------------------------------ content


def test_a_page_without_rows_says_so() -> None:
    page = render_page(data_of([], []))
    assert "Nothing was captioned" in page
    assert not any(plots_in(page).values())
    assert len(plots_in(page)) == len(PLOTS)


def test_where_every_request_failed_the_page_shows_why() -> None:
    rows = [
        failed(n, "not_a_video" if n % 3 else "empty_file", f"file {n} is none") for n in range(40)
    ]
    page = render_page(data_of(rows))
    drawn = [name for name, svg in plots_in(page).items() if svg]
    assert drawn == ["throughput", "waves", "failures"]
    assert "25 of 40, some of each code" in page
    assert page.count('<span class="code">empty_file') == 13
    assert page.count('<span class="code">not_a_video') == 12


@pytest.mark.parametrize("runs", [[], [run_of(samples=[], waves=[])], None])
def test_one_row_is_enough_for_a_page(runs: list[RunRecord] | None) -> None:
    page = render_page(data_of([row(0)], runs, price=3.0))
    drawn = {name for name, svg in plots_in(page).items() if svg}
    assert drawn >= {"throughput", "engine", "acceptance", "phases", "cost"}
    assert ("waves" in drawn) == (runs is None)
    assert "1 of 1 request answered in " in page


def test_missing_plots_are_explained() -> None:
    page = render_page(data_of([row(n) for n in range(5)]))
    plots = plots_in(page)
    assert not plots["speedup"]
    assert not plots["cost"]
    assert not plots["failures"]
    assert "none with a context of like length was decoded densely" in html.unescape(page)
    assert "It cannot be more than 4.92×" in page
    assert "--price-per-hour" in page
    assert "No request failed." in page


def test_dense_rows_alone_have_no_plot_of_acceptance() -> None:
    dense = {"draft": "dense", "proposed": 0, "accepted": 0, "rounds": 60}
    plots = plots_in(render_page(data_of([row(n, **dense) for n in range(5)])))
    assert not plots["acceptance"]
    assert not plots["speedup"]
    assert plots["phases"]


# ------------------------------------------------------------------------------------- real outputs


def test_writing_a_page_changes_nothing_else_in_the_output(folder: str) -> None:
    rows = [row(n) for n in range(3)] + [failed(3, "not_found")]
    with open_output(OutputFolder(folder), pa.schema([])) as output:
        for one in rows:
            output.add(one)
        output.flush()
        output.write_summary({"requests": 4, "errors": 1})
    uri, data = write_report(folder, 2.0)
    assert uri == f"{folder}/_report.html"
    assert data.num_rows == 4
    assert data.errors_by_code == {"not_found": 1}
    page = read_bytes(uri).decode()
    assert "3 of 4 requests" in page
    assert "No run left a record here" in page
    assert "All 4 requests of the input have their rows, 1 of them errors." in page
    before = list_names(folder)
    write_report(folder)
    assert list_names(folder) == before
    with open_output(OutputFolder(folder), pa.schema([])) as output:
        assert len(output.done) == 4


def test_only_the_latest_job_is_shown(tmp_path: Path) -> None:
    old = [row(n) for n in range(5)]
    new = [
        row(n, created_at=datetime.fromtimestamp(START + 90_000 + n, timezone.utc))
        for n in range(5, 7)
    ]
    with open_output(OutputFolder(str(tmp_path)), pa.schema([])) as output:
        for one in old + new:
            output.add(one)
    for start_time in (START, START + 89_995):
        RunRecorder(str(tmp_path), {"engines": 1}, start_time).save("stopped", 30.0)
    _, data = write_report(str(tmp_path))
    assert data.num_rows == 2
    assert (data.total_rows, data.total_errors) == (7, 0)
    assert len(data.runs) == 1
    page = (tmp_path / "_report.html").read_text()
    assert "7 in all, 0 of them errors" in page
    assert "The last run did not finish" in page


def test_an_empty_output_has_a_page(tmp_path: Path) -> None:
    with open_output(OutputFolder(str(tmp_path)), pa.schema([])):
        pass
    _, data = write_report(str(tmp_path))
    assert data.num_rows == 0
    assert "Nothing was captioned" in (tmp_path / "_report.html").read_text()


def test_a_missing_output_and_an_invalid_price_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no output here"):
        write_report(str(tmp_path))
    for price in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="--price-per-hour"):
            write_report(str(tmp_path), price)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------- a browser


def test_a_browser_shows_every_plot_and_requests_nothing_else(
    full_page: str, tmp_path: Path
) -> None:
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
    requested: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(full_page.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        dom, screenshot = _browse(browser, server.server_port, tmp_path)
    finally:
        server.shutdown()
    assert set(requested) == {"/page"}, requested
    assert {name for name, svg in plots_in(dom).items() if svg} == set(PLOTS)
    assert ParsedHtml(dom).tags["script"] == 0
    from PIL import Image

    pixels = np.asarray(Image.open(screenshot).convert("RGB")).reshape(-1, 3)
    for color in ((0x3F, 0x6F, 0xB5), (0x4E, 0x9A, 0x8F), (0xE0, 0xA4, 0x3C), (0xC0, 0x50, 0x4D)):
        assert (np.abs(pixels.astype(int) - color).max(1) <= 8).sum() > 500, color


def _browse(browser: str, port: int, folder: Path) -> tuple[str, Path]:
    """The page's DOM and a screenshot.

    Every host name resolves to the test's server, which therefore receives all requests of the
    page.
    """
    screenshot = folder / "page.png"
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        f"--user-data-dir={folder}/user",
        # no requests of the browser itself, such as for the time
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-features=NetworkTimeServiceQuerying,OptimizationHints,MediaRouter",
        f"--host-resolver-rules=MAP * 127.0.0.1:{port}",
        "--window-size=1000,4000",
    ]
    url = f"http://127.0.0.1:{port}/page"
    subprocess.run(
        [*command, f"--screenshot={screenshot}", url], check=True, capture_output=True, timeout=120
    )
    time.sleep(0.5)  # for a delayed request
    dom = subprocess.run(
        [*command, "--dump-dom", url], check=True, capture_output=True, text=True, timeout=120
    )
    return dom.stdout, screenshot
