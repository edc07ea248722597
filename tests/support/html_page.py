"""An HTML page as a browser sees it, and a text that no page may take for its own."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser

VOID_ELEMENTS = {"meta", "link", "br", "img", "hr", "input", "wbr"}
HOSTILE = "</span></code></style><script src=\"https://evil.example/x.js\">alert('1')</script>&amp;"


class Page(HTMLParser):
    """A page as a browser's parser sees it: elements, attributes, and the text below each id."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text_of: dict[str, str] = {}
        self._open: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._count(tag, attrs)
        if tag not in VOID_ELEMENTS:
            self._open.append((tag, dict(attrs).get("id")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._count(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for name in {name for _, name in self._open if name}:
            self.text_of[name] = self.text_of.get(name, "") + data

    def _count(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
