"""Predictions of a report's runs as data: beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.analysis.statistics import Interval
from paceline.analysis.wording import count, ranged
from paceline.predict.beside import Beside
from paceline.report.cells import Cell, TableData, number, table, within


@dataclass(frozen=True)
class Predicted:
    """A table of runs, and what it comes to; `left_out` says why others were not predicted."""

    name: str
    summary: str
    table: TableData | None
    left_out: tuple[str, ...]


def beside(known: Beside) -> Predicted:
    heads = ["run", "strategy", "workers", "measured step, s", "predicted, s", "error", "inside the 90 % interval"]
    rows = []
    for each in known.scored:
        said = each.predicted
        rows.append([each.name, each.strategy, each.workers, Cell(number(each.measured)),
                     within(Interval(said.value, said.low, said.high)),
                     Cell(f"{100 * each.error:+.1f} %".replace("-", "−")), each.inside])  # fmt: skip
    return Predicted(known.name, _summary(known), table(heads, rows) if rows else None, known.left_out)


def _summary(known: Beside) -> str:
    if not known.scored:
        return ""
    total = len(known.scored)
    error = f"{100 * known.mean_error:.1f} %"
    workers = f"{ranged(known.fewer)} worker{'' if known.fewer == (1,) else 's'}"
    return (
        f"{count(total, 'run')} with {known.scored[0].workers:,} workers, predicted from runs with {workers} only: "
        f"mean error {error}; {known.inside} of {total} inside the 90 % interval."
    )
