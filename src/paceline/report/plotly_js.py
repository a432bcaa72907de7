"""The library that draws the charts in the browser: its text, to be put into the page."""

from __future__ import annotations


def plotly_js() -> str:
    """One megabyte compressed, and four and a half not: the whole library, as the plotly package brings it."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())
