"""The layout of panels on a wide page and on a phone, with a legend below and a menu if there are several pages."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from paceline.report.figure import FONT, IDEAL, NARROW, TEXT, Chart, Page, Panel

WIDE, PHONE = 860, 290  # pixels available for legends, and on a phone for titles
CHANGING = ("tickvals", "ticktext", "categoryarray", "range")  # properties of an axis that differ between pages
TITLE, AXIS, SPACE = 30, 52, 14  # pixels: of a panel's title, of its x axis, above a legend
MOST_ABOVE = 1.6  # an axis ends at this multiple of the highest value, however long error bars are
CUT = "Error bars that reach the upper edge are cut off; the table has their ends."
SLANT = 20  # additional pixels for an axis whose labels are rotated
ENTRY, LETTER, BOLD, LINE = 48, 6.8, 8.8, 20  # pixels: of a legend's entry without its name, of a letter, of lines


def chart(
    name: str,
    title: str,
    caption: str,
    pages: Sequence[Page],
    rows: list[dict[str, Any]],
    *,
    columns: int | None = None,
    plot: int | None = None,
    **layout: Any,
) -> Chart | None:
    """A chart with a layout for wide and one for narrow pages; None if nothing is drawn.

    A panel without traces leaves its place empty. `plot` is the height of a panel in pixels.
    """
    used = [page for page in pages if any(panel.traces for panel in page.panels)]
    if not used:
        return None
    cut = [_cut(panel) for page in used for panel in page.panels]
    caption += f" {CUT}" if any(cut) else ""
    pages = sorted(used, key=lambda page: -sum(bool(panel.traces) for panel in page.panels))  # the fullest page first
    wide = _layout(pages, columns or _columns(pages), plot, WIDE) | layout
    narrow = _layout(pages, 1, plot, PHONE) | layout
    return Chart(
        name, title, caption, known({"data": list(_traces(pages)), "layout": wide}), known(rows), known(narrow)
    )


def _cut(panel: Panel) -> bool:
    """Limits the y axis if long error bars, such as those of two repeats, would make everything else small."""
    traces = [trace for trace in panel.traces if "error_y" in trace and panel.y.get("rangemode") == "tozero"]
    drawn = [(y, y + more) for trace in traces for y, more in zip(trace["y"], trace["error_y"]["array"], strict=True)
             if math.isfinite(y) and math.isfinite(more)]  # fmt: skip
    others = [y for trace in panel.traces if "error_y" not in trace for y in trace["y"]] if drawn else []
    most = MOST_ABOVE * max([y for y, _ in drawn] + others, default=0.0)
    if not drawn or max(end for _, end in drawn) <= most:
        return False
    panel.y |= {"range": [0, most], "autorange": False}
    return True


def known(value: Any) -> Any:
    """The same value with None instead of numbers that are not finite, such as the loss of a diverged training."""
    if isinstance(value, dict):
        return {key: known(each) for key, each in value.items()}
    if isinstance(value, list):
        return [known(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _columns(pages: Sequence[Page]) -> int:
    """At most three, and fewer if titles would need more than two lines."""
    most = max(len(page.panels) for page in pages)
    wished = most if most <= 3 else 2 if most == 4 else 3
    lines = max(len(_lines(panel.title, wished, WIDE)) for page in pages for panel in page.panels)
    return wished if lines <= 2 else min(wished, 2)


def _number(slot: int) -> str:
    return str(slot + 1) if slot else ""


def _traces(pages: Sequence[Page]) -> Iterable[dict[str, Any]]:
    """Each trace on the axes of its panel; a name is in the legend once per page."""
    for page in pages:
        named: set[str] = set()
        for slot, panel in enumerate(page.panels):
            for trace in panel.traces:
                name = trace.get("name", "")
                shown = bool(name) and name not in named and trace.get("showlegend", True)
                named |= {name} if shown else set()
                yield trace | {"xaxis": f"x{_number(slot)}", "yaxis": f"y{_number(slot)}", "showlegend": shown,
                               "legendgroup": trace.get("legendgroup", name), "visible": page is pages[0]}  # fmt: skip


def _layout(pages: Sequence[Page], columns: int, plot: int | None, width: int) -> dict[str, Any]:
    slots = [number for number in range(max(len(page.panels) for page in pages)) if _settings(pages, number)]
    places = [(number // columns, number % columns) for number in slots] if columns > 1 else \
             [(number, 0) for number in range(len(slots))]  # fmt: skip
    lines = places[-1][0] + 1
    plot = plot or (330 if len(slots) == 1 else {1: 340, 2: 270}.get(lines, 220) if columns > 1 else 210)
    turned = width == PHONE and any(_crowded(page) for page in pages)
    below = AXIS + (SLANT if turned else 0)
    written = [len(_lines(panel.title, columns, width)) for page in pages for panel in page.panels]
    above = TITLE + (max(1, *written) - 1) * LINE
    pitch = plot + above + below
    height = lines * pitch - above - below
    legend = max(_legend(page, width) for page in pages)
    top, bottom = above + (44 if len(pages) > 1 else 16), below + (legend * LINE + SPACE if legend else 0)
    found: dict[str, Any] = {
        "height": top + height + bottom, "autosize": True, "margin": {"l": 56, "r": 14, "t": top, "b": bottom},
        "font": {"family": FONT, "size": 13, "color": TEXT}, "paper_bgcolor": "#ffffff", "plot_bgcolor": "#ffffff",
        "hovermode": "closest", "hoverlabel": {"align": "left", "bgcolor": "#ffffff", "font": {"size": 13}},
        "showlegend": bool(legend), "annotations": _titles(pages[0], columns, width),
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": -(below + SPACE) / height, "yanchor": "top",
                   "maxheight": 2000, "tracegroupgap": 0, "font": {"size": 12}},
    }  # fmt: skip
    gap = 0.09 if columns < 3 else 0.075
    part = (1 - gap * (columns - 1)) / columns
    for slot, (row, column) in zip(slots, places, strict=True):
        panel = _settings(pages, slot)
        assert panel is not None
        left, upper = column * (part + gap), 1 - row * pitch / height
        x = panel.x | {"domain": [left, left + part], "anchor": f"y{_number(slot)}"}
        y = panel.y | {"domain": [max(0.0, upper - plot / height), upper], "anchor": f"x{_number(slot)}"}
        first = _settings(pages, slot - column)
        if column and first and panel.y["title"] == first.y["title"]:
            y["title"] = y["title"] | {"text": ""}
        seen = _used(pages[0], slot)
        found |= {f"xaxis{_number(slot)}": x | {"visible": seen}, f"yaxis{_number(slot)}": y | {"visible": seen}}
    if len(pages) > 1:
        found["updatemenus"] = [
            _menu(pages, slots, 1 + (top - 40) / height, partial(_titles, columns=columns, width=width))
        ]
    return found


def _crowded(page: Page) -> bool:
    """Whether an axis has so many ticks that a phone has no room for their texts side by side."""
    texts = [panel.x.get("ticktext") or panel.x.get("categoryarray") or [] for panel in page.panels]
    return any(sum(10 + LETTER * len(text) for text in each) > PHONE for each in texts)


def _used(page: Page, slot: int) -> bool:
    return slot < len(page.panels) and bool(page.panels[slot].traces)


def _settings(pages: Sequence[Page], slot: int) -> Panel | None:
    """The first panel in this place, whose axes are the same on all pages."""
    return next((page.panels[slot] for page in pages if _used(page, slot)), None)


def _legend(page: Page, width: int) -> int:
    """How many lines the legend needs at this width."""
    traces = [trace for panel in page.panels for trace in panel.traces if trace.get("showlegend", True)]
    lines, left = 0, 0.0
    for name in dict.fromkeys(trace.get("name", "") for trace in traces):
        needed = ENTRY + LETTER * len(name)
        if needed > left:
            lines, left = lines + 1, float(width)
        left -= needed
    return lines


def _lines(title: str, columns: int, width: int) -> list[str]:
    """The title of a panel in lines that fit above it, even on the narrowest wide page."""
    letters, found = int(min(width, NARROW) / columns / BOLD), list[str]()
    for part in title.split(", ") if title else ():
        if found and len(found[-1]) + 2 + len(part) <= letters:
            found[-1] += f", {part}"
        else:
            found = [*found[:-1], *(f"{each}," for each in found[-1:]), part]
    return [each for line in found for each in textwrap.wrap(line, letters, break_long_words=False)]


def _titles(page: Page, columns: int, width: int) -> list[dict[str, Any]]:
    """Titles at the upper left of their panels."""
    look = {"showarrow": False, "font": {"size": 13}, "align": "left"}
    place = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "yshift": 4}
    return [
        {"text": f"<b>{'<br>'.join(_lines(panel.title, columns, width))}</b>", "xref": f"x{_number(slot)} domain",
         "yref": f"y{_number(slot)} domain", **look, **place}
        for slot, panel in enumerate(page.panels)
        if panel.title and panel.traces
    ]  # fmt: skip


def _menu(pages: Sequence[Page], slots: Sequence[int], y: float, titles: Callable[[Page], Any]) -> dict[str, Any]:
    """A menu entry for each page: which traces are visible, their titles, and the axes that are used."""
    owners = [number for number, page in enumerate(pages) for panel in page.panels for _ in panel.traces]
    buttons = []
    for number, page in enumerate(pages):
        layout: dict[str, Any] = {"annotations": titles(page)}
        for slot in slots:
            x, y_axis, seen = f"xaxis{_number(slot)}", f"yaxis{_number(slot)}", _used(page, slot)
            layout |= {f"{x}.visible": seen, f"{y_axis}.visible": seen}
            if seen:
                panel = page.panels[slot]
                layout[f"{x}.title.text"] = panel.x["title"]["text"]
                for name, given in ((x, panel.x), (y_axis, panel.y)):
                    changes = {key: given[key] for key in CHANGING if key in given}
                    layout |= {f"{name}.{key}": value for key, value in changes.items()}
                    layout |= {} if "range" in given else {f"{name}.autorange": True}
        shown = {"visible": [each == number for each in owners]}
        buttons.append({"label": page.name, "method": "update", "args": [shown, layout]})
    return {"buttons": buttons, "type": "dropdown", "direction": "down", "x": 0, "xanchor": "left", "y": y,
            "yanchor": "bottom", "pad": {"t": 0, "b": 0}, "bgcolor": "#ffffff", "bordercolor": IDEAL,
            "font": {"size": 12}, "showactive": True}  # fmt: skip
