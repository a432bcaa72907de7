"""The page of an advice: the verdict and its reasons, charts, all settings, and what it is based on."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.advise.advice import EXTRAPOLATED, MEASURED, Advice, Choice
from paceline.analysis.wording import count, percent, seconds
from paceline.report import sections
from paceline.report.cells import NOTHING, Cell, TableData, number, table, within
from paceline.report.charts_advice import (
    advice_charts,
    chance,
    identity,
    names,
    roles,
    said_of_compute,
    time_unit,
)
from paceline.report.page import Section, render
from paceline.report.sections import Verdict
from paceline.report.tables import Results
from paceline.report.traces import scaled

GIGA = 1e9


@dataclass(frozen=True)
class Basis:
    """The runs that it was predicted from, and what else was known."""

    runs: str
    facts: tuple[str, ...]


def advice_page(advice: Advice, plotly_js: str) -> str:
    """The whole text of the file."""
    charts = [sections.drawing(each) for each in advice_charts(advice)]
    parts = [
        Section("verdict", "Is it worth distributing?", Verdict(advice.sentence, (), None, None, advice.reasons)),
        Section("charts", "Charts", charts),
        Section("results", "All settings", _results(advice)),
        Section("missing", "Left out", sections.missing((), advice.left_out)),
        Section("basis", "What it is based on", _basis(advice)),
    ]
    return render(f"Advice: {advice.model} on {advice.data}", _badges(advice), parts, plotly_js)


def _badges(advice: Advice) -> list[str]:
    found = []
    if advice.best and advice.best.basis != MEASURED:
        found.append(f"{advice.best.basis}, not measured")
    if advice.emulated:
        found.append("emulated compute: nothing was trained")
    if advice.pricing and advice.pricing.example:
        found.append("example prices")
    return found


def _results(advice: Advice) -> Results | None:
    if not advice.choices:
        return None
    commands = [f"{name}: `{each.command}`" for name, each in zip(names(advice.choices), advice.choices, strict=True)]
    return Results("", _table(advice), tuple(commands))


def _table(advice: Advice) -> TableData:
    named, (unit, length) = roles(advice), time_unit(advice.choices)
    cost = f"cost, {advice.pricing.currency}" if advice.pricing else "cost"
    heads = ["strategy and place", "workers", "batch", f"time, {unit}", "relative time", "chance", cost, "memory, GB",
             "limited by", "basis"]  # fmt: skip
    rows = [[Cell(each.strategy, "; ".join([each.where, *named.get(identity(each), ())]), number=False),
             Cell(number(each.workers), count(each.machines, "machine")),
             Cell(number(each.batch), "" if each.lr is None else f"rate {each.lr:.3g}"),
             within(scaled(each.seconds, 1 / length) if each.seconds else None), within(scaled(each.relative)),
             Cell(chance(each.faster)), within(scaled(each.money) if each.money else None), _memory(each),
             Cell(each.limit, seconds(each.limit_seconds)), _basis_of(each)]
            for each in advice.choices]  # fmt: skip
    note = (
        f"Small numbers: 90 % intervals. Relative time: as a multiple of the best single process. Chance: the "
        f"probability of being faster than that by at least {percent(advice.margin)}. Memory: of the rank that needs "
        f"most; with too much, a setting does not fit. Limited by: the cause without which a step would be shortest, "
        f"and by how much. Rate: the learning rate, if it is not that of the command. {NOTHING}: not known."
    )
    known = [at for at in range(len(heads)) if any(row[at] != Cell(NOTHING) for row in rows)]
    shown = [[row[at] for at in known] for row in rows]
    return table([heads[at] for at in known], shown, kind="results", note=note)


def _memory(each: Choice) -> Cell:
    found = within(scaled(each.memory, 1 / GIGA))
    return found if each.fits else Cell("too much", f"{found.text} ({found.note})")


def _basis_of(each: Choice) -> Cell:
    beyond = each.basis == EXTRAPOLATED
    return Cell("EXTRAPOLATED:" if beyond else each.basis, "; ".join(each.beyond), number=False)


def _basis(advice: Advice) -> Basis:
    took = f", which took {seconds(advice.probe_seconds)}" if advice.probe_seconds else ""
    prices = advice.pricing
    facts = [
        f"The training: `{advice.command}`",
        f"The verdict is about {advice.where}. Worth it means: faster than one process by {percent(advice.margin)}.",
        said_of_compute(advice),
        f"Prices are in {prices.currency}, from {prices.source}, of {prices.dated}."
        if prices
        else "No prices were given.",
        "These prices are an example: give your own before you decide by cost." if prices and prices.example else "",
    ]
    return Basis(f"{count(advice.runs, 'run')}{took}", tuple(each for each in facts if each))
