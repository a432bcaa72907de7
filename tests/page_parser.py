"""What a browser would see of a page."""

from __future__ import annotations

from html.parser import HTMLParser


class Scripts(HTMLParser):
    """What a browser would see: every tag, the text outside scripts, each script's text, by its type."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[tuple[str, str]] = []
        self._inside: str | None = None
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._inside = dict(attrs).get("type") or "javascript"
            self.scripts.append((self._inside, ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is None:
            self.text += data
        else:
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)
