"""The page of a prediction: the answer in one sentence, charts, all numbers, and what they were predicted from."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.analysis.wording import count, number, size
from paceline.predict.forecast import Forecast
from paceline.predict.outlook import Outlook
from paceline.report import sections
from paceline.report.cells import Cell, TableData, table, within
from paceline.report.charts_prediction import prediction_charts, said_of_compute
from paceline.report.page import Section, render
from paceline.report.sections import Verdict
from paceline.report.tables import Results
from paceline.report.traces import scaled


@dataclass(frozen=True)
class Sources:
    """What predictions were made from."""

    where: str
    emulated: str
    runs: TableData


def prediction_page(known: Outlook, plotly_js: str) -> str:
    """The whole text of the file."""
    badges = ["predicted, not measured"]
    if known.compute:
        badges.append("emulated compute: nothing was trained")
    charts = [sections.drawing(each) for each in prediction_charts(known)]
    parts = [
        Section("verdict", "The fastest predicted setting", Verdict(answer(known), _notes(known), None, None)),
        Section("charts", "Charts", charts),
        Section("results", "All predictions", Results("", _table(known))),
        Section("missing", "Not predicted", sections.missing((), known.left_out)),
        Section("sources", "What it was predicted from", _sources(known)),
    ]
    return render(f"Prediction: {known.model} on {known.data}", badges, parts, plotly_js)


def answer(known: Outlook) -> str:
    """The fastest predicted setting beside one process."""
    best = known.best
    times = [best.workers * each for each in (best.efficiency.value, best.efficiency.low, best.efficiency.high)]
    value, low, high = map(number, times)
    name = f"{best.strategy} with {count(best.workers, 'worker')} on {known.where}"
    if best.workers == 1 or times[1] <= 1:
        return (
            f"No setting is certainly faster than one process; the fastest that is predicted is {name}: {value} times "
            f"as fast (90 % interval {low} to {high})."
        )
    beyond = " (EXTRAPOLATED)" if best.beyond else ""
    return f"{name} is predicted to be {value} times as fast as one process (90 % interval {low} to {high}){beyond}."


def _notes(known: Outlook) -> tuple[str, ...]:
    best = known.best
    step, speed = best.step_seconds, best.samples_per_second
    found = [
        f"A step takes {number(step.value)} s ({number(step.low)} to {number(step.high)}), {number(speed.value)} "
        f"samples/s ({number(speed.low)} to {number(speed.high)}). It is limited by {best.limit}: without "
        f"that, a step would be {number(best.limit_seconds)} s shorter."
    ]
    if best.beyond:
        found.append(f"EXTRAPOLATED: {'; '.join(best.beyond)}.")
    runs = len(known.measured)
    found.append(f"Predicted from {count(runs, 'run')}, not measured. {said_of_compute(known)}".strip())
    return tuple(found)


def _table(known: Outlook) -> TableData:
    heads = ["strategy", "workers", "step, s", "samples/s", "efficiency, %", "sent per update", "limited by"]
    rows = [[each.strategy, each.workers, within(scaled(each.step_seconds)), within(scaled(each.samples_per_second)),
             within(scaled(each.efficiency, 100)), Cell(size(each.bytes_sent)),
             Cell(each.limit, f"{number(each.limit_seconds)} s", number=False),
             _memory(each),
             Cell(f"EXTRAPOLATED: {'; '.join(each.beyond)}" if each.beyond else "", number=False)]
            for each in known.forecasts]  # fmt: skip
    note = (
        "Small numbers: 90 % intervals; below what limits a setting, the seconds of a step that it costs. Sent: by the \
rank that sends most."
    )
    return table([*heads, "memory", "beyond what was measured"], rows, kind="results", note=note)


def _memory(each: Forecast) -> Cell:
    found = each.memory
    return Cell(size(found.value), f"{size(found.low)}–{size(found.high)}{', estimated' * each.memory_estimated}")


def _sources(known: Outlook) -> Sources:
    rows = [[each.name, each.strategy, each.workers, within(each.step_seconds), within(each.samples_per_second)]
            for each in known.measured]  # fmt: skip
    heads = ["run", "strategy", "workers", "measured step, s", "samples/s"]
    return Sources(known.where, said_of_compute(known), table(heads, rows))
