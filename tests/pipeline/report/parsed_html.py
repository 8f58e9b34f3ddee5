"""A page as a browser's parser sees it."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser


class ParsedHtml(HTMLParser):
    """Tags, attributes and texts of a page.

    Attributes:
        tags: Tag → number of elements.
        attributes: (tag, name, value) of every attribute.
        texts: The text between two tags, for every pair of neighbouring tags.
    """

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.tags = Counter[str]()
        self.attributes = list[tuple[str, str, str]]()
        self.texts = [""]
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.texts.append("")

    def handle_data(self, data: str) -> None:
        self.texts[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.texts.append("")


def plots_in(html: str) -> dict[str, str]:
    """Name of a plot → its `<svg>`; empty where the page says why there is none."""
    sections = {
        match[1]: match[2]
        for match in re.finditer(r'<h2 id="(\w+)">(.*?)(?=<h2|</body>)', html, re.DOTALL)
    }
    return {
        name: (re.findall(r"<svg.*?</svg>", section, re.DOTALL) or [""])[0]
        for name, section in sections.items()
    }
