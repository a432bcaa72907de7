"""The report as one HTML file: it needs no network, reads on a phone and on paper, and lets nothing run but ours."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from paceline.analysis.study import Study
from paceline.report import sections, tables
from paceline.report.figure import NARROW, Chart
from paceline.report.markup import as_json, bullets, details, table_of

# Nothing is fetched, and no script runs but the two whose digests are here. Plotly writes style attributes.
POLICY = "default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; " \
         "base-uri 'none'; form-action 'none'"  # fmt: skip

NO_SCRIPT = "<noscript><p>Without JavaScript there are no charts; their numbers are here.</p></noscript>\n"

Part = tuple[str, str, str]  # id, heading, HTML


def page(study: Study, charts: Sequence[Chart], plotly_js: str) -> str:
    """The whole text of the file."""
    ours = _file("page.js")
    digests = " ".join(f"'sha256-{_digest(script)}'" for script in (plotly_js, ours))
    parts = [part for part in _parts(study, charts) if part[2]]
    body = "".join(f'<section id="{name}">\n<h2>{heading}</h2>\n{html}</section>\n\n' for name, heading, html in parts)
    title = escape(sections.title(study))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY.format(digests=digests)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{_file("style.css")}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p class="badges">{sections.badges(study)}</p>
</header>
{_contents(study, parts, charts)}
<main>
{body}</main>
<script>{plotly_js}</script>
<script>{ours}</script>
</body>
</html>
"""


def _parts(study: Study, charts: Sequence[Chart]) -> list[Part]:
    bench = study.bench
    gone = sections.missing(tables.missing(study))
    gone += bullets(bench.left_out) if bench and bench.left_out else ""
    first = _first(study, charts)
    charts = [chart for chart in charts if chart is not first]
    return [
        ("verdict", "Is it worth it?", sections.verdict(study, _chart(first) if first else "")),
        ("summary", "In short", sections.about(study) + sections.summary(study)),
        ("claims", "What was claimed, and what holds", sections.claims(study)),
        ("warnings", "Warnings", sections.warnings(study.warnings)),
        ("limits", "What this cannot show", bullets(bench.limits) if bench and bench.limits else ""),
        ("charts", "Charts", NO_SCRIPT * bool(charts) + "".join(map(_chart, charts))),
        ("results", "All results", tables.results_html(study)),
        ("paper", "The paper beside ours", tables.paper_html(study) if bench and bench.paper else ""),
        ("missing", "Failed and left out", gone),
        ("method", "How the numbers were taken", sections.method(study)),
    ]


def _first(study: Study, charts: Sequence[Chart]) -> Chart | None:
    """The picture that belongs to the verdict."""
    return next((chart for chart in charts if chart.name == study.headline.chart), None)


def _contents(study: Study, parts: Sequence[Part], charts: Sequence[Chart]) -> str:
    inner = ""
    for name, heading, _ in parts:
        below = ""
        if name == "charts":
            links = "".join(f'<li><a href="#chart-{escape(c.name)}">{escape(c.title)}</a></li>' for c in charts
                            if c is not _first(study, charts))  # fmt: skip
            below = f"<ul>{links}</ul>"
        inner += f'<li><a href="#{name}">{heading}</a>{below}</li>\n'
    return f'<nav aria-label="Contents"><details><summary>Contents</summary><ul>\n{inner}</ul></details></nav>'


def _chart(chart: Chart) -> str:
    name, title = escape(chart.name), escape(chart.title)
    figure = as_json(chart.figure | {"narrow": chart.narrow or chart.figure["layout"]})
    numbers = details("The numbers", table_of(chart.rows)) if chart.rows else ""
    return f"""<figure class="chart" id="chart-{name}">
<h3>{title}</h3>
<div class="drawing" id="plot-{name}" data-name="{name}" data-narrow="{NARROW}" role="img" aria-label="{title}"></div>
<script type="application/json" id="data-{name}">{figure}</script>
<figcaption>{escape(chart.caption)}</figcaption>
{numbers}</figure>
"""


def _file(name: str) -> str:
    return files("paceline.report").joinpath(name).read_text("utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
