"""Charts of learning: accuracy and loss by workers and by batch size, learning curves, time to accuracy or loss.

Settings of tasks without an accuracy have charts of their loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.analysis.finding_learning import goal
from paceline.analysis.learning import (
    ACCURACY,
    LOSS,
    Measure,
    losses,
    measure_of,
    measured_on,
    moments,
    perplexity,
    target,
    time_to,
    validated_by_steps,
)
from paceline.analysis.runs import Run
from paceline.analysis.scaling import Group, certain
from paceline.analysis.statistics import Interval, Series
from paceline.analysis.study import Study
from paceline.analysis.wording import count, number, sentence
from paceline.report.figure import (
    COLOURS,
    TEXT,
    Chart,
    Page,
    Panel,
    accuracies,
    around,
    categories,
    doublings,
    from_zero,
    whole_numbers,
)
from paceline.report.placement import chart
from paceline.report.series import SAME_PANEL, Sheet, Styled, arrange, palette
from paceline.report.strands import Strand, by_batch, by_workers, settings, words
from paceline.report.traces import (
    SPREAD,
    Measured,
    Row,
    Trace,
    between,
    caption,
    error_bars,
    identity,
    line,
    middle,
    of_runs,
    over_repeats,
    scaled,
    with_interval,
    wrapped,
)

NOT_FROM_ZERO = "The {} axis does not start at 0."
BAR = 36  # pixels for a bar whose label has two lines
WIDE_LABEL = 20  # letters in a line of a bar's label
LINE = 16  # pixels for each additional line of it
STRETCHES = 60  # points of a learning curve: each is the mean of several steps


def result(run: Run, of: str, what: str) -> float | None:
    """The final accuracy or loss: in the test, of the best validation, or of the last epoch in training."""
    s = run.summary
    if of == "test":
        tested: float | None = getattr(s, f"test_{what}")
        return tested
    values: list[float] = getattr(s, f"{'validation' if of == 'validation' else 'train'}_{what}")
    if not values:
        return None
    best = s.best_validation if of == "validation" else None
    return values[best] if best is not None and 0 <= best < len(values) else values[-1]


def known_of(groups: Sequence[Group], what: str) -> str | None:
    """The best kind of result that all settings have: test, validation or training."""
    runs = [run for one in groups for run in one.runs]
    for of in ("test", "validation", "training"):
        if runs and all(result(run, of, what) is not None for run in runs):
            return of
    return None


def _trained(strands: Sequence[Strand], *measures: Measure) -> list[Strand]:
    """Those that are compared by these, without emulated runs, which train nothing."""
    kept = [one for one in strands if not any(each.first.emulated for each in one.groups)]
    return [one for one in kept if (one.points or len(one.groups) > 1) and measure_of(one.groups[0]) in measures]


def _said(one: Group, what: str, y: Interval) -> str:
    """A result in words: 97.1 %, or 1.52, with the perplexity of a language model."""
    surprise = perplexity(one.first, y.value) if what == "loss" else None
    return between(y, "%" if what == "accuracy" else "") + (f", perplexity {number(surprise)}" if surprise else "")


def _results(styled: Styled[Strand], of: str, what: str, x: Callable[[Group], tuple[int, str]]) -> Trace:
    factor, found = 100 if what == "accuracy" else 1, []
    for one in styled.thing.groups:
        place, said = x(one)
        y = scaled(over_repeats([value for run in one.runs if (value := result(run, of, what)) is not None]), factor)
        found.append(Measured(place, y, f"{styled.full}, {said}: {of} {what} {_said(one, what, y)}, {of_runs(one)}"))
    return line(found, styled.label, styled.look)


def _result_rows(groups: Sequence[Group], of: str, what: str) -> list[Row]:
    values = {id(one): [value for run in one.runs if (value := result(run, of, what)) is not None] for one in groups}
    return [identity(one) | with_interval(f"{of}_{what}", over_repeats(values[id(one)])) for one in groups]


def accuracy_by_workers(study: Study) -> Chart | None:
    """Accuracy and loss side by side."""
    return _by_workers(study, ACCURACY, "accuracy-by-workers", "Accuracy and loss by workers")


def loss_by_workers(study: Study) -> Chart | None:
    """The loss of settings that have no accuracy."""
    return _by_workers(study, LOSS, "loss-by-workers", "Loss by workers")


def _by_workers(study: Study, measure: Measure, called: str, heading: str) -> Chart | None:
    strands = _trained(by_workers(study), measure)
    groups = settings(strands)
    of = known_of(groups, measure.name)
    if of is None or known_of(groups, "loss") != of:
        return None

    def at(one: Group) -> tuple[int, str]:
        return one.workers, count(one.workers, "worker")

    pages = []
    for sheet in arrange(study, strands, words, SAME_PANEL, without=("workers",)):
        for title, part in sheet.panels.items():
            x = whole_numbers("workers", [one.workers for styled in part for one in styled.thing.groups])
            traces = [_results(each, of, measure.name, at) for each in part]
            panels = [Panel("", x, _result_axis(of, measure, traces), traces)]
            if measure is ACCURACY:
                panels.append(Panel("", x, from_zero(f"{of} loss"), [_results(each, of, "loss", at) for each in part]))
            pages.append(Page(_both(sheet, title), panels))
    rows = [one | {key: value for key, value in two.items() if "loss" in key} for one, two in
            zip(_result_rows(groups, of, measure.name), _result_rows(groups, of, "loss"), strict=True)]  # fmt: skip
    what = "accuracy and loss" if measure is ACCURACY else "loss"
    text = caption(f"Final {what} ({of}) by number of workers.",
                   SPREAD, NOT_FROM_ZERO.format(measure.name), groups=groups, timed=False)  # fmt: skip
    return chart(called, heading, text, pages, rows)


def _result_axis(of: str, measure: Measure, traces: Sequence[Trace]) -> dict[str, Any]:
    """Of what settings are compared by: an axis on which differences are visible."""
    drawn = [(y, y - low, y + high) for trace in traces
             for y, low, high in zip(trace["y"], trace["error_y"]["arrayminus"], trace["error_y"]["array"], strict=True)
             if np.isfinite(y)]  # fmt: skip
    lows, highs = [low for _, low, _ in drawn], [high for _, _, high in drawn]
    return accuracies(f"{of} accuracy, %", lows, highs) if measure is ACCURACY else around(f"{of} loss", lows, highs)


def _both(sheet: Sheet[Any], title: str) -> str:
    return ", ".join(each for each in (sheet.name, title) if each)


def accuracy_by_batch(study: Study) -> Chart | None:
    return _by_batch(study, _trained(by_batch(study), ACCURACY), "accuracy", "Accuracy by batch size")


def loss_by_batch(study: Study) -> Chart | None:
    return _by_batch(study, _trained(by_batch(study), ACCURACY, LOSS), "loss", "Loss by batch size")


def _by_batch(study: Study, strands: Sequence[Strand], what: str, title: str) -> Chart | None:
    groups = settings(strands)
    of = known_of(groups, what)
    if of is None:
        return None

    def at(one: Group) -> tuple[int, str]:
        return one.first.summary.global_batch, f"batch {one.first.summary.global_batch:,}"

    pages = []
    for sheet in arrange(study, strands, words, SAME_PANEL, without=("batch",)):
        panels = []
        for heading, part in sheet.panels.items():
            x = doublings("batch size, samples per update", [at(one)[0] for each in part for one in each.thing.groups])
            traces = [_results(each, of, what, at) for each in part]
            measure = measure_of(part[0].thing.groups[0])
            y = _result_axis(of, measure, traces) if what == measure.name else from_zero(f"{of} loss")
            panels.append(Panel(heading, x, y, traces))
        pages.append(Page(sheet.name, panels))
    text = caption(f"Final {what} ({of}) by global batch size.",
                   SPREAD, NOT_FROM_ZERO.format(what) if any(measure_of(one).name == what for one in groups) else "",
                   groups=groups, timed=False)  # fmt: skip
    return chart(f"{what}-by-batch", title, text, pages, _result_rows(groups, of, what))


def learning_time(study: Study) -> Chart | None:
    return _learning(study, "learning-time", "Learning curves by time", "training time, s", 0)


def learning_samples(study: Study) -> Chart | None:
    return _learning(study, "learning-samples", "Learning curves by samples", "samples seen by all workers", 1)


def _learning(study: Study, called: str, title: str, x: str, column: int) -> Chart | None:
    """Accuracy or loss at the end of each epoch or at each validation, and the training loss of the steps."""
    learned = [one for one in study.groups if moments(one.first)]
    of, pages, rows = measured_on(learned), list[Page](), list[Row]()
    for measure in (ACCURACY, LOSS):
        groups = [one for one in learned if measure_of(one) is measure]
        for sheet in arrange(study, groups, lambda one: one.setting, SAME_PANEL):
            for heading, part in sheet.panels.items():
                traces = [_by_epoch(styled, of, column) for styled in part]
                y = _result_axis(of, measure, traces)
                loss = Panel("", from_zero(x), from_zero("training loss"))
                for styled in part:
                    loss.traces += _on_the_way(styled, column)
                    rows += _moment_rows(styled.thing)
                pages.append(Page(_both(sheet, heading), [Panel("", from_zero(x), y, traces), loss]))
    what = " or ".join(dict.fromkeys(measure_of(one).name for one in learned)).capitalize()
    when = "at each validation" if _by_steps(learned) else "at the end of each epoch"
    text = caption(f"{what} ({of}) {when}, and the training loss of the middle repeat; each point "
                   "is the mean of several steps.", "Training time only." if column == 0 else "", SPREAD,
                   groups=learned, timed=column == 0)  # fmt: skip
    return chart(called, title, text, pages, rows)


def _by_steps(groups: Sequence[Group]) -> bool:
    return any(validated_by_steps(run) for one in groups for run in one.runs)


def _by_epoch(styled: Styled[Group], of: str, column: int) -> Trace:
    measure, found = measure_of(styled.thing), []
    known = ([end for end in moments(run) if end.value(of, measure.name) is not None] for run in styled.thing.runs)
    for ends in zip(*known, strict=False):
        place = float(np.median([(end.seconds, end.samples)[column] for end in ends]))
        values = [value for end in ends if (value := end.value(of, measure.name)) is not None]
        y = scaled(over_repeats(values), 100 if measure is ACCURACY else 1)
        after = f"{number(place)} {'s' if column == 0 else 'samples'}, epoch {ends[0].epoch + 1}"
        result = f"{of} {measure.name} {_said(styled.thing, measure.name, y)}"
        found.append(Measured(place, y, f"{styled.full}: {result} after {after}"))
    return line(found, styled.label, styled.look)


def _on_the_way(styled: Styled[Group], column: int) -> list[Trace]:
    seconds, samples, loss = losses(middle(styled.thing))
    if not len(loss):
        return []
    place = _means((seconds, samples)[column])
    after = "%{x:,.1f} s" if column == 0 else "%{x:,.0f} samples"
    hover = f"{styled.full}:<br>training loss %{{y:.3f}} after {after}<extra></extra>"
    return [{
        "type": "scatter", "mode": "lines", "name": styled.label, "x": place, "y": _means(loss),
        "line": {"color": styled.look.colour, "dash": styled.look.dash, "width": 1.8}, "hovertemplate": hover,
        "legendrank": styled.look.rank,
    }]  # fmt: skip


def _means(values: Series) -> list[float]:
    return [float(f"{part.mean():.5g}") for part in np.array_split(values, min(STRETCHES, len(values)))]


def _moment_rows(one: Group) -> list[Row]:
    return [
        identity(one) | {"repeat": number, "epoch": end.epoch + 1, "seconds": end.seconds, "samples": end.samples,
                         "train_loss": end.train_loss, "train_accuracy": end.train_accuracy,
                         "validation_loss": end.validation_loss, "validation_accuracy": end.validation_accuracy}
        for number, run in enumerate(one.runs, 1)
        for end in moments(run)
    ]  # fmt: skip


def time_to_accuracy(study: Study) -> Chart | None:
    return _time_to(study, ACCURACY)


def time_to_loss(study: Study) -> Chart | None:
    """Of settings that have no accuracy."""
    return _time_to(study, LOSS)


def _time_to(study: Study, measure: Measure) -> Chart | None:
    """A bar for each setting, the fastest at the top, those that are not ranked at the bottom.

    There is a panel for each model, with its own target.
    """
    groups = [one for one in study.groups if moments(one.first) and measure_of(one) is measure]
    panels, rows, most = list[Panel](), list[Row](), 1
    for sheet in arrange(study, groups, lambda one: one.setting, SAME_PANEL, most=len(groups)):
        for heading, part in sheet.panels.items():
            wanted = target([each.thing for each in part])
            if wanted is not None:
                panel, found = _bars_to(_both(sheet, heading), part, wanted, palette(study, "strategy"))
                panels, rows, most = [*panels, panel], rows + found, max(most, len(part))
    first = "first validation" if _by_steps(groups) else "end of the first epoch"
    text = caption(f"Training time until the {first} that reached the {measure.name}. Error bars: fastest to slowest "
                   "repeat.", groups=groups)  # fmt: skip
    breaks = max((label.count("<br>") for panel in panels for label in panel.y["categoryarray"]), default=0)
    tall = 24 + most * (BAR + (breaks - 1) * LINE if breaks else 26)
    name = measure.name
    return chart(f"time-to-{name}", f"Time to {name}", text, [Page("", panels)], rows, plot=tall, columns=1)


def in_lines(label: str) -> str:
    """The label of a bar, with line breaks between its parts."""
    lines = [""]
    for part in label.split(", "):
        if lines[-1] and len(lines[-1]) + len(part) > WIDE_LABEL:
            lines.append("")
        lines[-1] += f", {part}" if lines[-1] else part
    return ",<br>".join(lines)


def _bars_to(
    heading: str, part: Sequence[Styled[Group]], wanted: float, strategies: Sequence[str]
) -> tuple[Panel, list[Row]]:
    style, groups = {id(each.thing): each for each in part}, [each.thing for each in part]
    reached, measure = time_to(groups, wanted), measure_of(groups[0])
    reached.sort(key=lambda each: each.seconds.value if each.seconds and certain(each.group) else np.inf, reverse=True)
    of = reached[0].of
    aim = goal(groups, of, wanted)
    labels = [in_lines(style[id(each.group)].label) for each in reached]
    values = [each.seconds or Interval(0.0, 0.0, 0.0) for each in reached]
    said = [f"{between(each.seconds, 's')} to {aim}" if each.seconds else f"{aim} was not reached" for each in reached]
    hover = [f"{style[id(each.group)].full}: {text}, in {each.reached} of {count(each.runs, 'run')}"
             for each, text in zip(reached, said, strict=True)]  # fmt: skip
    trace = {
        "type": "bar", "orientation": "h", "x": [each.value for each in values], "y": labels, "showlegend": False,
        "name": aim, "error_x": error_bars(values, TEXT),
        "marker": {"color": [COLOURS[strategies.index(each.group.strategy) % len(COLOURS)] for each in reached]},
        "text": ["" if each.seconds else "not reached" for each in reached], "textposition": "outside",
        "cliponaxis": False, "hovertext": [wrapped(each) for each in hover], "hoverinfo": "text",
    }  # fmt: skip
    short = f"{100 * wanted:g} %" if measure is ACCURACY else f"{of} loss {wanted:g}"
    title = f"{heading}: {short}" if heading else sentence(aim)
    rows = [
        identity(each.group)
        | {measure.name: wanted, "of": of, "reached": each.reached, "seconds": None}
        | (with_interval("seconds", each.seconds) if each.seconds else {})
        for each in reached
    ]
    seconds = from_zero("training time, s")
    return Panel(title, seconds, categories("", labels), [trace]), rows
