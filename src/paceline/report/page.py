"""The report as one HTML file: it needs no network, reads on a phone and on paper, and lets nothing run but ours.

What the page says is data (sections.py, tables.py); its HTML is in templates/, which escape everything that comes from
runs.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined

from paceline.analysis.study import Study
from paceline.analysis.wording import count
from paceline.predict.beside import Beside
from paceline.report import predictions, sections, tables
from paceline.report.figure import NARROW, Chart

# Nothing is fetched, and no script runs but the two whose digests are here. Plotly writes style attributes.
POLICY = "default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; " \
         "base-uri 'none'; form-action 'none'"  # fmt: skip


@dataclass(frozen=True)
class Section:
    """A part of the page, made of `content` by the template NAME.html; without content it is left out."""

    name: str
    heading: str
    content: object


def page(study: Study, charts: Sequence[Chart], plotly_js: str, predicted: Sequence[Beside] = ()) -> str:
    """The report of a study, with predictions of its runs: the whole text of the file."""
    return render(sections.title(study), sections.badges(study), _sections(study, charts, predicted), plotly_js)


def render(title: str, badges: Sequence[str], parts: Sequence[Section], plotly_js: str) -> str:
    """A page of these sections: the whole text of the file."""
    scripts = (plotly_js, _file("page.js"))
    digests = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return (
        _templates()
        .get_template("page.html")
        .render(
            title=title,
            badges=badges,
            sections=[section for section in parts if section.content],
            policy=POLICY.format(digests=digests),
            style=_file("style.css"),
            scripts=scripts,
        )
    )


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("paceline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals |= {"NARROW": NARROW, "count": count}
    templates.filters["split_code"] = re.compile("`([^`]+)`").split
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return templates


def _sections(study: Study, charts: Sequence[Chart], predicted: Sequence[Beside]) -> list[Section]:
    bench = study.bench
    first = next((chart for chart in charts if chart.name == study.headline.chart), None)
    return [
        Section("verdict", "Is it worth it?", sections.verdict(study, first)),
        Section("summary", "Summary", sections.overview(study)),
        Section("claims", "Claims and verdicts", sections.claims(study)),
        Section("warnings", "Warnings", sections.warnings(study.warnings)),
        Section("limits", "Limitations", bench.limits if bench else ()),
        Section("charts", "Charts", [sections.drawing(chart) for chart in charts if chart is not first]),
        Section("results", "All results", tables.results_table(study)),
        Section("beside", "Prediction beside measurement", [predictions.beside(each) for each in predicted]),
        Section("classes", "Accuracy by class", tables.classes_table(study)),
        Section("paper", "Comparison with the paper", tables.paper_table(study) if bench and bench.paper else None),
        Section("missing", "Failed and omitted runs",
                sections.missing(tables.missing(study), bench.left_out if bench else ())),
        Section("method", "Method", sections.machines(study)),
    ]  # fmt: skip


def _file(name: str) -> str:
    return files("paceline.report").joinpath(name).read_text("utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
