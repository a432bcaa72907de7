"""The chart of the verdict: the speedup of each case or setting over the best single process."""

from __future__ import annotations

import textwrap

from paceline.analysis.headline import NOT, OPEN, PROBABLY, PROBABLY_NOT, SPOILED, UNFAIR, WORTH, Contender
from paceline.analysis.study import Study
from paceline.report.figure import COLOURS, IDEAL, MARKERS, Chart, Page, Panel, categories, from_zero, plain
from paceline.report.placement import chart
from paceline.report.traces import INTERVALS, Trace, between, caption, error_bars, with_interval, wrapped

MOST = 12  # settings or cases in the chart
LETTERS = 22  # in a line of a name: a phone has no room for more
LINE, ROOM = 17, 14  # pixels: for a line of a name, and around it
# For each verdict: the index of its colour and marker.
LOOKS = {WORTH: 2, PROBABLY: 0, OPEN: 6, PROBABLY_NOT: 4, NOT: 1, UNFAIR: 3, SPOILED: 5}


def worth(study: Study) -> Chart | None:
    """Every distributed setting of one problem, the best first; or the best setting of each of several problems."""
    cases = study.headline.cases
    if len(cases) == 1:
        found, over = list(cases[0].contenders), cases[0].over
    else:
        found, over = [Contender(case.name, case.verdict, case.speedup) for case in cases], "the best single process"
    ranked = [each for each in found if each.speedup]
    shown = ranked[:MOST]
    if not shown:
        return None
    names = {each.name: "<br>".join(map(plain, textwrap.wrap(each.name, LETTERS))) for each in shown}
    x = from_zero("times as fast as one process")
    panel = Panel("", x, categories("", list(reversed(names.values()))))
    ends = [names[shown[-1].name], names[shown[0].name]]
    # The whole height: the ends of a single setting are the same.
    whole = {"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper", "layer": "below",
             "line": {"color": IDEAL, "width": 2}}  # fmt: skip
    panel.traces.append({
        "type": "scatter", "mode": "lines", "name": "one process", "x": [1, 1], "y": ends, "legendrank": 0,
        "line": {"color": IDEAL, "width": 2}, "hovertext": [wrapped(over)] * 2, "hoverinfo": "text",
    })  # fmt: skip
    panel.traces += [_points([each for each in shown if each.verdict == verdict], verdict, names, over)
                     for verdict in LOOKS if any(each.verdict == verdict for each in shown)]  # fmt: skip
    lines = sum(1 + name.count("<br>") for name in names.values())
    more = f"The first {MOST} of {len(ranked)}." if len(ranked) > MOST else ""
    what = "settings" if len(cases) == 1 else "the best setting of each case"
    text = caption(f"Samples per second of {what}, relative to {over}. At 1, distributing gains nothing.",
                   INTERVALS, more, groups=study.groups)  # fmt: skip
    rows = [{"setting" if len(cases) == 1 else "case": each.name, "verdict": each.verdict, "over": over}
            | with_interval("speedup", each.speedup) for each in ranked if each.speedup]  # fmt: skip
    plot = max(90, lines * LINE + len(shown) * ROOM)
    return chart("worth", "Speedup over one process", text, [Page("", [panel])], rows, plot=plot, shapes=[whole])


def _points(found: list[Contender], verdict: str, names: dict[str, str], over: str) -> Trace:
    known = [(each.name, each.speedup) for each in found if each.speedup]
    index = LOOKS[verdict]
    hover = [
        wrapped(f"{plain(name)}: {between(speedup)} times as fast as {over}; {verdict}") for name, speedup in known
    ]
    return {
        "type": "scatter", "mode": "markers", "name": verdict, "x": [speedup.value for _, speedup in known],
        "y": [names[name] for name, _ in known], "error_x": error_bars([each for _, each in known], COLOURS[index]),
        "marker": {"color": COLOURS[index], "symbol": MARKERS[index], "size": 10}, "hovertext": hover,
        "hoverinfo": "text", "legendrank": index + 1,
    }  # fmt: skip
