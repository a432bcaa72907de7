"""The library that draws the charts in the browser: plotly.js's basic bundle, which is part of this package.

`plotly-basic.min.js` is npm's plotly.js-basic-dist-min, unchanged (MIT licence, plotly-basic.LICENSE). It draws
scatter, bar and pie charts and is a quarter of the size of the full bundle. To update it: `npm pack
plotly.js-basic-dist-min@VERSION`, copy both files, change VERSION and SHA256.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path

VERSION = "4.1.1"
SHA256 = "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
TRACES = ("scatter", "bar", "pie")  # the types of traces that it can draw
_BUNDLE = files("paceline.report") / "plotly-basic.min.js"


def plotly_js() -> str:
    """The text of the bundle, for a page."""
    return _BUNDLE.read_text("utf-8")


@contextmanager
def plotly_js_file() -> Iterator[Path]:
    """The path of the bundle, for programs that load it."""
    with as_file(_BUNDLE) as path:
        yield path
