"""Charts of a prediction: step time, throughput and efficiency over workers, and maps of what limits each strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import ceil, log10
from typing import Any

from paceline.analysis.statistics import Interval
from paceline.analysis.wording import link, listing, seconds
from paceline.predict.forecast import Forecast
from paceline.predict.limit_map import LimitMap
from paceline.predict.limits import COMPUTE, CORES, LATENCY, LINK, MEANING, SERVER, SLOWEST
from paceline.predict.outlook import Measured, Outlook
from paceline.predict.ranges import Range
from paceline.report.figure import COLOURS, MARKERS, TEXT, Chart, Page, Panel, axis, categories, logarithmic, plain
from paceline.report.placement import chart
from paceline.report.traces import Row, Trace, band, emulated_as, error_bars, scaled, wrapped

MOST_TICKS = 8
BAND, FAINT_BAND = 0.2, 0.08  # opacity of an interval, and of one beyond what was measured
FAINT = 0.6  # of a line beyond what was measured
# The letter of each cause in a map, and its colour, on which dark letters can be read.
LETTERS = {
    COMPUTE: ("C", "#56B4E9"),
    LINK: ("L", "#E69F00"),
    LATENCY: ("M", "#F0E442"),
    SLOWEST: ("W", "#CC79A7"),
    SERVER: ("S", "#4DC3A5"),
    CORES: ("P", "#B0B0B0"),
}
FRAME = "#000000"


@dataclass(frozen=True)
class Quantity:
    """A curve's values: of forecasts, and of what was measured."""

    name: str
    title: str
    unit: str
    of: Callable[[Forecast], Range]
    measured: Callable[[Measured], Interval | None]
    factor: float = 1.0


STEP = Quantity("step", "Step time", "seconds", lambda each: each.step_seconds, lambda each: each.step_seconds)
SPEED = Quantity(
    "throughput",
    "Throughput",
    "samples per second",
    lambda each: each.samples_per_second,
    lambda each: each.samples_per_second,
)
EFFICIENCY = Quantity(
    "efficiency",
    "Efficiency",
    "per cent of one process",
    lambda each: each.efficiency,
    lambda each: each.efficiency,
    100,
)


def prediction_charts(known: Outlook) -> list[Chart]:
    """Those that there is data for."""
    found = [*(_curves(known, quantity) for quantity in (SPEED, STEP, EFFICIENCY)), _maps(known)]
    return [each for each in found if each]


def _curves(known: Outlook, quantity: Quantity) -> Chart | None:
    """A line and a band for each strategy, and what was measured."""
    workers = sorted({each.workers for each in known.forecasts} | {each.workers for each in known.measured})
    values = [getattr(quantity.of(each), end) for each in known.forecasts for end in ("low", "high")]
    values += [end for each in known.measured if (seen := quantity.measured(each)) for end in (seen.low, seen.high)]
    whole = axis(quantity.unit, range=[0, 1.05 * quantity.factor * max(values)])
    y = whole if quantity is EFFICIENCY else logarithmic(quantity.unit, values)
    panel = Panel("", logarithmic_workers(workers), y)
    lines = [list(each) for _, each in groupby(known.forecasts, key=lambda each: each.strategy)]
    for number, line in enumerate(lines):
        panel.traces += _line(sorted(line, key=lambda each: each.workers), quantity, number)
    colours = {line[0].strategy: COLOURS[number % len(COLOURS)] for number, line in enumerate(lines)}
    panel.traces += _points(known, quantity, colours)
    text = " ".join([
        f"{quantity.title} predicted for {known.where}, not measured. Bands: 90 % intervals.",
        _crosses(known), going_beyond(known.forecasts), said_of_compute(known),
    ])  # fmt: skip
    rows: list[Row] = [{"strategy": each.strategy, "workers": each.workers, "what": "predicted",
                        **_three(quantity.of(each), quantity), "extrapolated": "; ".join(each.beyond)}
                       for each in known.forecasts]  # fmt: skip
    rows += [{"strategy": each.strategy, "workers": each.workers, "what": "measured", **_three(seen, quantity)}
             for each in known.measured if (seen := quantity.measured(each))]  # fmt: skip
    return chart(f"predicted-{quantity.name}", quantity.title, text, [Page("", [panel])], rows)


def _three(value: Range | Interval, quantity: Quantity) -> Row:
    name = quantity.unit.replace(" ", "_")
    ends = {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
    return {key: each * quantity.factor for key, each in ends.items()}


def _crosses(known: Outlook) -> str:
    where = "" if known.own else " on other machines, those of the runs"
    return f"Crosses: measured{where}, in the colour of their strategy (others are black), with 95 % intervals."


def going_beyond(found: Sequence[Forecast]) -> str:
    """What goes beyond the probes, and from how many workers on; a sentence, or none."""
    first: dict[str, list[Forecast]] = {}
    for each in found:
        for what in each.beyond:
            first.setdefault(what, []).append(each)
    if not first:
        return ""
    every = {each.strategy for each in found}
    said = []
    for what, where in first.items():
        names = list(dict.fromkeys(each.strategy for each in where))
        whose = "" if set(names) == every else f" ({listing(names)})"
        said.append(f"{what}{whose}")
    return f"EXTRAPOLATED where dashed and pale, with open marks: {'; '.join(said)}."


def said_of_compute(known: Outlook) -> str:
    return emulated_as(known.compute, known.shrink) if known.compute else ""


def _line(line: Sequence[Forecast], quantity: Quantity, number: int) -> Iterator[Trace]:
    """Bands, lines and marks: of the part within what was measured, and of the part beyond."""
    colour = COLOURS[number % len(COLOURS)]
    for beyond in (False, True):
        for part in _parts(line, beyond=beyond):
            values = [scaled(quantity.of(each), quantity.factor) for each in part]
            name, opacity = plain(line[0].strategy), FAINT_BAND if beyond else BAND
            yield band(name, [each.workers for each in part], values, colour, opacity)
    for beyond in (False, True):
        look = {"color": colour, "dash": "dash" if beyond else "solid", "width": 2}
        shared = {"name": plain(line[0].strategy), "line": look, "opacity": FAINT if beyond else 1,
                  "legendrank": number + 1}  # fmt: skip
        if own := [each for each in line if bool(each.beyond) == beyond]:
            yield shared | _marks(own, quantity, number, beyond=beyond)
        for part in _parts(line, beyond=beyond):
            yield shared | {
                "type": "scatter", "mode": "lines", "x": [each.workers for each in part], "showlegend": False,
                "y": [quantity.factor * quantity.of(each).value for each in part], "hoverinfo": "skip",
            }  # fmt: skip


def _parts(line: Sequence[Forecast], *, beyond: bool) -> list[list[Forecast]]:
    """Pieces of a line whose segments go beyond the probes, or do not; a segment does if one of its ends does."""
    found = []
    pairs = [(one, other, bool(one.beyond or other.beyond)) for one, other in pairwise(line)]
    for kind, same in groupby(pairs, key=lambda pair: pair[2]):
        segments = list(same)
        if kind == beyond:
            found.append([segments[0][0], *(other for _, other, _ in segments)])
    return found


def _marks(points: Sequence[Forecast], quantity: Quantity, number: int, *, beyond: bool) -> Trace:
    """Marks with gaps between them: the line is drawn beside them, but the legend shows both."""
    marker = MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]
    look = {"color": COLOURS[number % len(COLOURS)], "symbol": f"{marker}-open" if beyond else marker, "size": 8}
    values = [quantity.factor * quantity.of(each).value for each in points]
    return {
        "type": "scatter", "mode": "lines+markers", "x": [x for each in points for x in (each.workers, None)],
        "y": [y for value in values for y in (value, None)], "marker": look, "hoverinfo": "text",
        "hovertext": [text for each in points for text in (_said(each, quantity), "")],
    }  # fmt: skip


def _said(each: Forecast, quantity: Quantity) -> str:
    value = quantity.of(each)
    figures = [f"{quantity.factor * end:,.3g}" for end in (value.value, value.low, value.high)]
    tail = f"; EXTRAPOLATED: {'; '.join(each.beyond)}" if each.beyond else ""
    limit = f"; limited by {each.limit}" if each.limit else ""
    return wrapped(
        f"{plain(each.strategy)}, workers: {each.workers:,}: {figures[0]} {quantity.unit} (90 %: {figures[1]} to "
        f"{figures[2]}){limit}{tail}"
    )


def _points(known: Outlook, quantity: Quantity, colours: Mapping[str, str]) -> list[Trace]:
    found = [(each, value) for each in known.measured if (value := quantity.measured(each))]
    values = [scaled(value, quantity.factor) for _, value in found]
    if not found:
        return []
    hover = [f"{plain(each.strategy)}, workers: {each.workers:,}: measured {value.value:,.3g} {quantity.unit}"
             for (each, _), value in zip(found, values, strict=True)]  # fmt: skip
    return [{
        "type": "scatter", "mode": "markers", "name": "measured" if known.own else "measured on other machines",
        "x": [each.workers for each, _ in found],
        "y": [each.value for each in values], "error_y": error_bars(values, FRAME),
        "marker": {"symbol": "x", "color": [colours.get(each.strategy, FRAME) for each, _ in found], "size": 9,
                   "line": {"color": FRAME, "width": 1}}, "legendrank": 0, "hoverinfo": "text",
        "hovertext": [wrapped(each) for each in hover],
    }]  # fmt: skip


def _maps(known: Outlook) -> Chart | None:
    """A page for each strategy: colours and letters over workers and links; frames around what was measured."""
    pages = [Page(plain(each.strategy), [_map(each)]) for each in known.maps]
    notes = list(dict.fromkeys(what for each in known.maps for cell in each.cells for what in cell.beyond))
    beyond = f"EXTRAPOLATED where pale and without a frame: {'; '.join(notes)}." if notes else ""
    text = " ".join([
        "What limits a step: the cause without which it would be shortest. Each worker has a machine of its own; noise "
        "is left out.", f"Letters: {'; '.join(f'{LETTERS[c][0]} {c} ({MEANING[c]})' for c in _causes(known.maps))}.",
        "Predicted, not measured.", beyond, said_of_compute(known),
    ])  # fmt: skip
    rows = [{"strategy": each.strategy, "workers": cell.workers, "link": link(cell.rate),
             "limited_by": cell.limit.cause, "seconds_saved_without": cell.limit.seconds,
             "extrapolated": "; ".join(cell.beyond)}
            for each in known.maps for cell in each.cells]  # fmt: skip
    return chart("limits", "What limits each strategy", text, pages, rows, plot=330, barmode="overlay", bargap=0.04)


def _causes(maps: Sequence[LimitMap]) -> list[str]:
    seen = {cell.limit.cause for each in maps for cell in each.cells}
    return [cause for cause in LETTERS if cause in seen]


def _map(known: LimitMap) -> Panel:
    """Bars of height 1, one for each cell, above each other."""
    rates = sorted({cell.rate for cell in known.cells})
    workers = [f"{count:,}" for count in sorted({cell.workers for cell in known.cells})]
    y = axis("link", range=[0, len(rates)], tickvals=[number + 0.5 for number in range(len(rates))],
             ticktext=[link(rate) for rate in rates], showgrid=False)  # fmt: skip
    panel = Panel("", categories("workers", workers, showgrid=False), y)
    for cause in _causes([known]):
        letter, colour = LETTERS[cause]
        own = [cell for cell in known.cells if cell.limit.cause == cause]
        hover = [
            f"workers: {cell.workers:,}, {link(cell.rate)}: limited by {cause} ({seconds(cell.limit.seconds)} of a "
            f"step){'; EXTRAPOLATED: ' if cell.beyond else ''}{'; '.join(cell.beyond)}"
            for cell in own
        ]
        panel.traces.append({
            "type": "bar", "name": f"{letter}: {cause}", "x": [f"{cell.workers:,}" for cell in own],
            "base": [rates.index(cell.rate) + 0.02 for cell in own], "y": [0.96] * len(own),
            "text": [letter] * len(own), "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
            "constraintext": "none",
            "textfont": {"color": TEXT, "size": 13}, "hovertext": [wrapped(each) for each in hover],
            "hoverinfo": "text",
            "marker": {"color": colour, "opacity": [FAINT if cell.beyond else 1 for cell in own],
                       "line": {"color": FRAME, "width": [0 if cell.beyond else 2 for cell in own]}},
        })  # fmt: skip
    return panel


def logarithmic_workers(values: Sequence[int]) -> dict[str, Any]:
    """A logarithmic axis with a tick at each number, or at some of many."""
    stride = ceil(len(values) / MOST_TICKS)
    ticks = [value for number, value in enumerate(reversed(values)) if number % stride == 0]
    ends = [log10(values[0] / 1.2), log10(values[-1] * 1.2)]
    return axis("workers", type="log", tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks], range=ends)
