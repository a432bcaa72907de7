"""Charts of an advice: the time of settings, time and money, what links would change, and updates by batch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby
from math import isfinite, log10
from typing import Any

from paceline.advise.advice import EXTRAPOLATED, MEASURED, PREDICTED, Advice, Choice, LinkPoint
from paceline.analysis.statistics import Interval
from paceline.analysis.wording import count, link, percent, seconds, sentence, within
from paceline.report.charts_worth import LETTERS, LINE, MOST, ROOM
from paceline.report.figure import COLOURS, IDEAL, MARKERS, Chart, Page, Panel, axis, doublings, logarithmic, plain
from paceline.report.placement import chart
from paceline.report.traces import Row, Trace, band, emulated_as, error_bars, scaled, with_interval, wrapped

UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
MUCH = 20.0  # an axis is logarithmic if its values differ by more than this factor
EDGE = 1.2  # room for marks at both ends of it
MOST_RELATIVE = 10.0  # the axis of links ends there: it does not matter how slow a slow link is
BAND = 0.15  # opacity of an interval
SURE = 0.99  # probabilities beyond this and its complement are not written out
RELATIVE = "time (one process: 1)"
BARS = "Bars: 90 % intervals."
# For each basis: its colour, its marker, and what the marker is called.
LOOKS = {
    MEASURED: (COLOURS[2], "x", "Crosses: measured"),
    PREDICTED: (COLOURS[0], "circle", "circles: predicted"),
    EXTRAPOLATED: (COLOURS[1], "diamond-open", "open diamonds: EXTRAPOLATED"),
}


def advice_charts(advice: Advice) -> list[Chart]:
    """Those that there is data for."""
    found = [_times(advice), _money(advice), _links(advice), _batches(advice)]
    return [each for each in found if each]


def roles(advice: Advice) -> dict[tuple[object, ...], list[str]]:
    """What the advice names settings for, by their `identity`."""
    named = {
        "best distributed": advice.best,
        "one process": advice.alone,
        "best where the runs were made": advice.here,
        "best for the deadline": advice.for_deadline,
        "best for the budget": advice.for_budget,
    }
    found: dict[tuple[object, ...], list[str]] = {}
    for role, each in named.items():
        if each:
            found.setdefault(identity(each), []).append(role)
    return found


def identity(each: Choice) -> tuple[object, ...]:
    """What distinguishes it from the other settings; `here` has times relative to another process."""
    return each.where, each.strategy, each.workers, each.batch


def time_unit(found: Sequence[Choice]) -> tuple[str, float]:
    """The unit for all times of these, and its length in seconds."""
    longest = max((each.seconds.value for each in found if each.seconds), default=0.0)
    return next((unit for unit in UNITS if longest >= 2 * unit[1]), UNITS[-1])


def chance(value: float) -> str:
    """A probability; one that was drawn is never quite 0 or 1."""
    return "> 99 %" if value > SURE else "< 1 %" if value < 1 - SURE else percent(value)


def basis(each: Choice) -> str:
    """Measured, predicted, or EXTRAPOLATED and in which ways."""
    return f"EXTRAPOLATED: {'; '.join(each.beyond)}" if each.basis == EXTRAPOLATED else each.basis


def said_of_compute(advice: Advice) -> str:
    return emulated_as(advice.emulated, 1) if advice.emulated else ""


def names(found: Sequence[Choice]) -> list[str]:
    """Strategy and workers of each, and what else distinguishes it from the others."""
    parts = [(each.strategy, count(each.workers, "worker"), f"batch {each.batch:,}", each.where) for each in found]
    differ = [at < 2 or len(set(column)) > 1 for at, column in enumerate(zip(*parts, strict=True))]
    return [", ".join(part for part, shown in zip(each, differ, strict=True) if shown) for each in parts]


def _times(advice: Advice) -> Chart | None:
    """A row for each of the fastest settings, and for those that the advice names."""
    fitting = [each for each in advice.choices if each.fits]
    named = roles(advice)
    shown = sorted(sorted(fitting, key=lambda each: identity(each) not in named)[:MOST], key=fitting.index)
    if not shown:
        return None
    whole = all(each.seconds for each in shown)
    unit, length = time_unit(shown)
    values = [scaled(each.seconds, 1 / length) if whole and each.seconds else scaled(each.relative) for each in shown]
    alone = advice.alone
    one = alone.seconds.value / length if whole and alone and alone.seconds else 1.0
    texts = names(shown)
    ticks = ["<br>".join(map(plain, textwrap.wrap(text.replace("batch ", "batch\xa0"), LETTERS))) for text in texts]
    lines = max(tick.count("<br>") + 1 for tick in ticks)
    bold = [f"<b>{tick}</b>" if _is(advice.best, each) else tick for tick, each in zip(ticks, shown, strict=True)]
    places = list(range(len(shown), 0, -1))
    y = axis("", range=[0.5, len(shown) + 0.5], tickvals=places, ticktext=bold)
    ends = [end for value in values for end in (value.value, value.low, value.high)]
    panel = Panel("", _spanning(unit if whole else RELATIVE, [*ends, one]), y)
    if alone:
        panel.traces.append(_rule("one process", [one, one], y["range"]))
    for kind in LOOKS:
        own = [at for at, each in enumerate(shown) if each.basis == kind]
        panel.traces += _marks(kind, [values[at].value for at in own], [places[at] for at in own],
                               [_said(texts[at], shown[at], advice) for at in own],
                               error_x=error_bars([values[at] for at in own], LOOKS[kind][0]))  # fmt: skip
    left = len(advice.choices) - len(fitting)
    caption = _text(
        f"The {'whole training with each setting' if whole else 'time of each setting, with one process as 1'}, the "
        "fastest first"
        f"{f'; {MOST} of {len(fitting)}, those that the advice names included' if len(fitting) > MOST else ''}.",
        "Bold: the best distributed setting." if any(_is(advice.best, each) for each in shown) else "",
        f"Left out for lack of memory: {count(left, 'setting')}." if left else "",
        BARS, _bases(shown), said_of_compute(advice),
    )  # fmt: skip
    rows: list[Row] = [
        {"setting": text, "basis": basis(each), **with_interval(unit if whole else "relative_time", value)}
        for text, each, value in zip(texts, shown, values, strict=True)
    ]
    plot = max(90, len(shown) * (lines * LINE + ROOM))
    title = "Time of the whole training" if whole else "Time relative to one process"
    return chart("advised-times", title, caption, [Page("", [panel])], rows, plot=plot)


def _money(advice: Advice) -> Chart | None:
    """A point for each setting, a line through those that none beats in both, and rings around those that are named."""
    found = [each for each in advice.choices if each.fits]
    points = [(each, each.seconds, each.money) for each in found if each.seconds and each.money]
    if not points or advice.pricing is None:
        return None
    currency = advice.pricing.currency
    unit, length = time_unit([each for each, _, _ in points])
    at = {identity(each): (scaled(time, 1 / length), scaled(money)) for each, time, money in points}
    front = [at[identity(each)] for each in advice.front if identity(each) in at]
    named = {each: several for each, several in roles(advice).items() if each in at}
    limits = [] if advice.deadline is None else [advice.deadline / length]
    amounts = [] if advice.budget is None else [advice.budget]
    x = _spanning(unit, limits + _ends_of([time for time, _ in at.values()], [time for time, _ in front]))
    y = _spanning(f"cost, {plain(currency)}",
                  amounts + _ends_of([money for _, money in at.values()], [money for _, money in front]))  # fmt: skip
    panel = Panel("", x, y)
    panel.traces += [_rule(f"deadline: {end:,.4g} {unit}", [end, end], _span(y), "dash") for end in limits]
    panel.traces += [_rule(f"budget: {end:,.4g} {plain(currency)}", _span(x), [end, end], "dot") for end in amounts]
    if front:
        panel.traces.append({
            "type": "scatter", "mode": "lines", "name": "none is both faster and cheaper", "legendrank": 5,
            "x": [time.value for time, _ in front], "y": [money.value for _, money in front], "hoverinfo": "skip",
            "line": {"color": IDEAL, "width": 1.5}, "error_x": error_bars([time for time, _ in front], IDEAL),
            "error_y": error_bars([money for _, money in front], IDEAL),
        })  # fmt: skip
    texts = names([each for each, _, _ in points])
    for kind in LOOKS:
        own = [(text, each) for text, (each, _, _) in zip(texts, points, strict=True) if each.basis == kind]
        places = [at[identity(each)] for _, each in own]
        panel.traces += _marks(kind, [time.value for time, _ in places], [money.value for _, money in places],
                               [_said(text, each, advice) for text, each in own])  # fmt: skip
    for index, (each, several) in enumerate(named.items()):
        time, money = at[each]
        look = {"symbol": f"{MARKERS[index]}-open", "size": 17, "color": COLOURS[-1], "line": {"width": 1.5}}
        panel.traces.append({
            "type": "scatter", "mode": "markers", "name": ", ".join(several), "x": [time.value], "y": [money.value],
            "marker": look, "hoverinfo": "skip", "legendrank": 10 + index,
        })  # fmt: skip
    caption = _text(
        f"Time and cost of the whole training with every setting that fits in memory and has a price; below and to the "
        f"left is better. {'Prices are an example.' if advice.pricing.example else ''}",
        "The line joins the settings of which no other is both faster and cheaper; its bars are their 90 % intervals."
        if front else "", "Large open marks: settings that the advice names." if named else "",
        _bases([each for each, _, _ in points]), said_of_compute(advice),
    )  # fmt: skip
    rows: list[Row] = [
        {"setting": text, "basis": basis(each), **with_interval(unit, at[identity(each)][0]),
         **with_interval("cost", at[identity(each)][1])} for text, (each, _, _) in zip(texts, points, strict=True)
    ]  # fmt: skip
    return chart("advised-money", "Time and money", caption, [Page("", [panel])], rows)


def _links(advice: Advice) -> Chart | None:
    """A line and a band for each number of workers."""
    if not advice.links:
        return None
    points = sorted(advice.links, key=lambda each: (each.workers, each.rate))
    rates = sorted({each.rate for each in points})
    ticks = [rate for rate in rates if log10(rate).is_integer()] or rates
    x = axis("link", type="log", tickvals=ticks, ticktext=[link(rate).replace(" ", "<br>") for rate in ticks],
             range=[log10(rates[0] / EDGE), log10(rates[-1] * EDGE)])  # fmt: skip
    worth = 1 / (1 + advice.margin)
    ends = [1.0, worth, *_ends_of([scaled(each.relative) for each in points])]
    panel = Panel("", x, _spanning(RELATIVE, [min(end, MOST_RELATIVE) for end in ends]))
    panel.traces.append(_rule("as fast as one process", _span(x), [1.0, 1.0]))
    panel.traces.append(_rule(f"faster by {percent(advice.margin)}", _span(x), [worth, worth], "dash"))
    for index, (workers, several) in enumerate(groupby(points, key=lambda each: each.workers)):
        panel.traces += _over_links(count(workers, "worker"), list(several), index, advice.margin)
    caption = _text(
        "Time of the training with the fastest strategy for each number of workers and each link, as a multiple of the "
        "time of one process; each worker has a machine of its own, and the batch is that of the command. Bands: 90 % "
        "intervals. Predicted, not measured; links and workers beyond those of the runs are EXTRAPOLATED.",
        f"Times above {MOST_RELATIVE:g} are cut off; the table has them." if max(ends) > MOST_RELATIVE else "",
        said_of_compute(advice),
    )  # fmt: skip
    rows: list[Row] = [
        {"workers": each.workers, "link": link(each.rate), "strategy": each.strategy,
         **with_interval("relative_time", scaled(each.relative)), "probability_faster_by_margin": each.faster}
        for each in points
    ]  # fmt: skip
    return chart("advised-links", "What links would change", caption, [Page("", [panel])], rows)


def _over_links(name: str, points: Sequence[LinkPoint], index: int, margin: float) -> list[Trace]:
    colour, values = COLOURS[index % len(COLOURS)], [scaled(each.relative) for each in points]
    hover = [f"{name}, {link(each.rate)}: {plain(each.strategy)}, {within(value)} times the time of one process; "
             f"faster by {percent(margin)} with a probability of {chance(each.faster)}"
             for each, value in zip(points, values, strict=True)]  # fmt: skip
    rates = [each.rate for each in points]
    return [band(name, rates, values, colour, BAND), {
        "type": "scatter", "mode": "lines+markers", "name": name, "x": rates, "y": [each.value for each in values],
        "line": {"color": colour, "width": 2}, "hovertext": [wrapped(each) for each in hover], "hoverinfo": "text",
        "marker": {"color": colour, "symbol": MARKERS[index % len(MARKERS)], "size": 8}, "legendrank": 10 + index,
    }]  # fmt: skip


def _batches(advice: Advice) -> Chart | None:
    """A line with a band, and the critical batch."""
    points, critical = advice.learning.batches, advice.learning.critical
    if not points:
        return None
    batches, values = [each.batch for each in points], [scaled(each.steps) for each in points]
    y = _spanning("updates, as a multiple of the command's", [1.0, *_ends_of(values)])
    inside = critical is not None and isfinite(critical.value)
    sizes = [*batches, *([critical.value] if critical and inside else [])]
    low, high = min(sizes) / 1.3, max(sizes) * 1.3
    x = doublings("samples of an update", batches) | {"range": [log10(low), log10(high)]}
    panel = Panel("", x, y)
    panel.traces.append(_rule("as with the batch of the command", [low, high], [1.0, 1.0]))
    if critical and inside:
        name = f"critical batch: {within(scaled(critical))}"
        panel.traces.append(band(name, [max(low, critical.low), min(high, critical.high)],
                                 [Interval(1.0, *_span(y))] * 2, COLOURS[1], BAND))  # fmt: skip
        panel.traces.append(_rule(name, [critical.value] * 2, _span(y), "dash", COLOURS[1]))
    hover = [f"batch {each.batch:,}: {within(scaled(each.steps))} times the updates" for each in points]
    panel.traces += [band("updates needed", batches, values, COLOURS[0], BAND), {
        "type": "scatter", "mode": "lines+markers", "name": "updates needed", "x": batches,
        "y": [each.value for each in values], "line": {"color": COLOURS[0], "width": 2}, "hoverinfo": "text",
        "marker": {"color": COLOURS[0], "symbol": MARKERS[0], "size": 8}, "legendrank": 10,
        "hovertext": [wrapped(each) for each in hover],
    }]  # fmt: skip
    noise = advice.learning.noise_scale
    caption = _text(
        "Updates that reach the same loss, for each number of samples in an update, as a multiple of those with the "
        "batch of the command. Bands: 90 % intervals. Predicted, not measured.",
        "Well above the critical batch, more samples in an update save hardly any updates." if critical else "",
        f"Gradient noise scale: {within(scaled(noise))} samples." if noise else "",
    )  # fmt: skip
    rows: list[Row] = [{"batch": batch, **with_interval("updates", value)}
                       for batch, value in zip(batches, values, strict=True)]  # fmt: skip
    return chart("advised-batches", "Updates needed by batch", caption, [Page("", [panel])], rows)


def _is(one: Choice | None, other: Choice) -> bool:
    return one is not None and identity(one) == identity(other)


def _said(name: str, each: Choice, advice: Advice) -> str:
    """The hover text of a setting."""
    parts = [within(scaled(each.seconds), seconds)] if each.seconds else []
    parts.append(f"{within(scaled(each.relative))} times the time of one process")
    if each.money and advice.pricing:
        parts.append(f"{within(scaled(each.money))} {advice.pricing.currency}")
    return wrapped(plain(f"{name}: {'; '.join(parts)}; limited by {each.limit}; {basis(each)}"))


def _bases(found: Sequence[Choice]) -> str:
    """What the markers mean, and in which ways settings go beyond what was measured."""
    kinds = [each for each in LOOKS if any(one.basis == each for one in found)]
    beyond = "; ".join(dict.fromkeys(what for each in found for what in each.beyond if each.basis == EXTRAPOLATED))
    return sentence(f"{'; '.join(LOOKS[kind][2] for kind in kinds)}{f' ({beyond})' if beyond else ''}.")


def _text(*sentences: str) -> str:
    return " ".join(each.strip() for each in sentences if each)


def _marks(kind: str, x: list[float], y: Sequence[float], hover: list[str], **settings: Any) -> list[Trace]:
    """The settings of one basis."""
    colour, symbol, _ = LOOKS[kind]
    return [{
        "type": "scatter", "mode": "markers", "name": kind, "x": x, "y": list(y), "hovertext": hover,
        "hoverinfo": "text", "marker": {"color": colour, "symbol": symbol, "size": 9},
        "legendrank": 1 + list(LOOKS).index(kind), **settings,
    }] if x else []  # fmt: skip


def _rule(name: str, x: list[float], y: list[float], dash: str = "solid", colour: str = IDEAL) -> Trace:
    """A straight line from edge to edge."""
    return {
        "type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "legendrank": 0, "hoverinfo": "text",
        "hovertext": [wrapped(name)] * 2, "line": {"color": colour, "width": 2, "dash": dash},
    }  # fmt: skip


def _ends_of(values: Sequence[Interval], bars: Sequence[Interval] | None = None) -> list[float]:
    """The values, and the ends of the intervals that are drawn: all unless `bars` are given."""
    drawn = values if bars is None else bars
    return [*(each.value for each in values), *(end for each in drawn for end in (each.low, each.high))]


def _spanning(title: str, values: Sequence[float]) -> dict[str, Any]:
    """An axis from zero, or a logarithmic one if the values differ much."""
    known = [value for value in values if isfinite(value)]
    if 0 < MUCH * min(known) < max(known):
        return logarithmic(title, [min(known) / EDGE, max(known) * EDGE])
    return axis(title, range=[0.0, 1.05 * max(known) or 1.0])


def _span(of: dict[str, Any]) -> list[float]:
    """Both ends of an axis."""
    return [10**end for end in of["range"]] if of.get("type") == "log" else list(of["range"])
