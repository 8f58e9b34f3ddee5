from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.report.page import render
from pipeline.report.tables import tables
from tests.pipeline.report.parsed_html import ParsedHtml
from tests.pipeline.report.stub_data import data_of, failed, row


def rendered(uri: str, prompt: str, text: str, code: str, message: str) -> ParsedHtml:
    """The tables of an output with one row of each kind."""
    rows = [
        row(1, video_uri=uri, prompt=prompt, text=text),
        failed(2, code, message, video_uri=uri, prompt=prompt),
    ]
    return ParsedHtml(render("tables.html.j2", tables=tables(data_of(rows))))


@settings(deadline=None, max_examples=60)
@given(
    words=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=5, max_size=5
    )
)
def test_no_text_of_a_row_becomes_markup(words: list[str]) -> None:
    page = rendered(*words)
    plain = rendered("uri", "prompt", "text", "code", message="message")
    assert page.tags == plain.tags
    names = Counter((tag, name) for tag, name, _ in page.attributes)
    assert names == Counter((tag, name) for tag, name, _ in plain.attributes)
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in words[2])
    assert text in page.texts


def test_failed_requests_are_a_sample_of_every_code() -> None:
    rows = [failed(n, "not_a_video" if n % 3 else "empty_file") for n in range(40)]
    table, _ = tables(data_of(rows))
    assert table.note.startswith("25 of 40, some of each code.")
    codes = Counter(cell.text for cells in table.rows for cell in cells if cell.is_code)
    assert codes == {"empty_file": 13, "not_a_video": 12}
