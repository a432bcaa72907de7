"""Charts as SVG or PNG files for papers, drawn by plotly.js in a headless browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from html import unescape
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.report.figure import Chart
from paceline.report.plotly_js import plotly_js_file

WIDTH = 900
HEIGHT = 480
HEADING = 40  # pixels for the title, which is part of the picture
SCALE = 3  # pixels of a PNG per pixel of the figure: enough for a column of a printed page


def write_images(charts: Sequence[Chart], folder: Path, form: str) -> None:
    """Writes NAME.svg or NAME.png for each chart, or NAME-CHOICE.svg for each choice of its menu."""
    try:
        import kaleido
        from kaleido.errors import ChromeNotFoundError
    except ImportError:
        raise UsageError(
            "pictures need the package kaleido: pip install 'paceline[images]' (--csv and the page itself do not)"
        ) from None
    figures = []
    for name, figure in _pictures(charts):
        size = {"width": WIDTH, "height": figure["layout"]["height"]}
        options = {"format": form, "scale": SCALE if form == "png" else 1, **size}
        figures.append({"fig": figure, "path": folder / f"{name}.{form}", "opts": options})
    try:
        with plotly_js_file() as bundle:
            # The packaged plotly.js and no MathJax: kaleido would download both.
            own = {"mathjax": False, "plotlyjs": bundle.as_uri()}
            asyncio.run(kaleido.write_fig_from_object(figures, kopts=own, cancel_on_error=True))
    except ChromeNotFoundError:
        raise UsageError(
            "pictures need Chrome or Chromium, and there is none: apt-get install chromium, or run kaleido_get_chrome, "
            "or set BROWSER_PATH to one (--csv and the page itself do not need it)"
        ) from None


def _pictures(charts: Sequence[Chart]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and figures: one for each choice of a menu."""
    for chart in charts:
        menus = chart.figure["layout"].get("updatemenus")
        if not menus:
            yield chart.name, _titled(deepcopy(chart.figure), chart.title)
            continue
        named: set[str] = set()
        for number, button in enumerate(menus[0]["buttons"], 1):
            words = re.sub(r"[^A-Za-z0-9]+", "-", unescape(button["label"])).strip("-")
            name = f"{chart.name}-{words}" if words and words not in named else f"{chart.name}-{number}"
            named.add(words)
            yield name, _titled(_chosen(deepcopy(chart.figure), *button["args"]), f"{chart.title}: {button['label']}")


def _chosen(figure: dict[str, Any], traces: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    """The figure after this choice in its menu."""
    seen = traces.get("visible", [True] * len(figure["data"]))
    data = [trace | {"visible": True} for trace, shown in zip(figure["data"], seen, strict=True) if shown]
    del figure["layout"]["updatemenus"]
    for path, value in layout.items():
        *parents, last = path.split(".")
        place = figure["layout"]
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return {"data": data, "layout": figure["layout"]}


def _titled(figure: dict[str, Any], title: str) -> dict[str, Any]:
    layout = figure["layout"]
    margin = {"t": 20} | (layout.get("margin") or {})
    layout["title"] = {"text": title, "x": 0.02, "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top",
                       "pad": {"t": 14}}  # fmt: skip
    layout["margin"] = margin | {"t": margin["t"] + HEADING}
    layout |= {"width": WIDTH, "height": int(layout.get("height") or HEIGHT) + HEADING, "autosize": False}
    return figure
