"""Charts of learning: accuracy and loss by workers and by batch size, learning curves, time to accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.analysis.learning import Moment, losses, measured_on, moments, target, time_to_accuracy
from paceline.analysis.runs import Run
from paceline.analysis.scaling import Group, certain
from paceline.analysis.statistics import Interval, Series
from paceline.analysis.study import Study
from paceline.analysis.wording import count, number, percent
from paceline.report.figure import (
    COLOURS,
    TEXT,
    Chart,
    Page,
    Panel,
    accuracies,
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

NOT_FROM_ZERO = "The accuracy axis does not start at 0."
BAR = 36  # pixels for a bar whose label has two lines
WIDE_LABEL = 20  # letters in a line of a bar's label
LINE = 16  # pixels for each additional line of it
STRETCHES = 60  # points of a learning curve: each is the mean of several steps


def result(run: Run, of: str, what: str) -> float | None:
    """The final accuracy or loss: in the test, of the best epoch in validation, or of the last epoch in training."""
    s = run.summary
    if of == "test":
        tested: float | None = getattr(s, f"test_{what}")
        return tested
    values: list[float] = getattr(s, f"{'validation' if of == 'validation' else 'train'}_{what}")
    if not values:
        return None
    best = s.best_epoch if of == "validation" and s.best_epoch is not None else -1
    return values[best] if -1 <= best < len(values) else values[-1]


def known_of(groups: Sequence[Group], what: str) -> str | None:
    """The best kind of result that all settings have: test, validation or training."""
    runs = [run for one in groups for run in one.runs]
    for of in ("test", "validation", "training"):
        if runs and all(result(run, of, what) is not None for run in runs):
            return of
    return None


def _trained(strands: Sequence[Strand]) -> list[Strand]:
    """Without emulated runs, which train nothing."""
    kept = [one for one in strands if not any(each.first.emulated for each in one.groups)]
    return [one for one in kept if one.points or len(one.groups) > 1]


def _results(styled: Styled[Strand], of: str, what: str, x: Callable[[Group], tuple[int, str]]) -> Trace:
    factor, unit = (100, "%") if what == "accuracy" else (1, "")
    found = []
    for one in styled.thing.groups:
        place, said = x(one)
        y = scaled(over_repeats([value for run in one.runs if (value := result(run, of, what)) is not None]), factor)
        found.append(Measured(place, y, f"{styled.full}, {said}: {of} {what} {between(y, unit)}, {of_runs(one)}"))
    return line(found, styled.label, styled.look)


def _result_rows(groups: Sequence[Group], of: str, what: str) -> list[Row]:
    values = {id(one): [value for run in one.runs if (value := result(run, of, what)) is not None] for one in groups}
    return [identity(one) | with_interval(f"{of}_{what}", over_repeats(values[id(one)])) for one in groups]


def accuracy_by_workers(study: Study) -> Chart | None:
    """Accuracy and loss side by side."""
    strands = _trained(by_workers(study))
    groups = settings(strands)
    of = known_of(groups, "accuracy")
    if of is None or known_of(groups, "loss") != of:
        return None

    def at(one: Group) -> tuple[int, str]:
        return one.workers, count(one.workers, "worker")

    pages = []
    for sheet in arrange(study, strands, words, SAME_PANEL, without=("workers",)):
        for title, part in sheet.panels.items():
            x = whole_numbers("workers", [one.workers for styled in part for one in styled.thing.groups])
            traces = [_results(each, of, "accuracy", at) for each in part]
            accuracy = Panel("", x, _accuracy_axis(of, traces), traces)
            loss = Panel("", x, from_zero(f"{of} loss"), [_results(each, of, "loss", at) for each in part])
            pages.append(Page(_both(sheet, title), [accuracy, loss]))
    rows = [one | {key: value for key, value in two.items() if "loss" in key} for one, two in
            zip(_result_rows(groups, of, "accuracy"), _result_rows(groups, of, "loss"), strict=True)]  # fmt: skip
    text = caption(f"Final accuracy and loss ({of}) by number of workers.",
                   SPREAD, NOT_FROM_ZERO, groups=groups, timed=False)  # fmt: skip
    return chart("accuracy-by-workers", "Accuracy and loss by workers", text, pages, rows)


def _accuracy_axis(of: str, traces: Sequence[Trace]) -> dict[str, Any]:
    drawn = [(y, y - low, y + high) for trace in traces
             for y, low, high in zip(trace["y"], trace["error_y"]["arrayminus"], trace["error_y"]["array"], strict=True)
             if np.isfinite(y)]  # fmt: skip
    return accuracies(f"{of} accuracy, %", [low for _, low, _ in drawn], [high for _, _, high in drawn])


def _both(sheet: Sheet[Any], title: str) -> str:
    return ", ".join(each for each in (sheet.name, title) if each)


def accuracy_by_batch(study: Study) -> Chart | None:
    return _by_batch(study, "accuracy", "accuracy-by-batch", "Accuracy by batch size")


def loss_by_batch(study: Study) -> Chart | None:
    return _by_batch(study, "loss", "loss-by-batch", "Loss by batch size")


def _by_batch(study: Study, what: str, called: str, title: str) -> Chart | None:
    strands = _trained(by_batch(study))
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
            y = _accuracy_axis(of, traces) if what == "accuracy" else from_zero(f"{of} loss")
            panels.append(Panel(heading, x, y, traces))
        pages.append(Page(sheet.name, panels))
    text = caption(f"Final {what} ({of}) by global batch size.",
                   SPREAD, NOT_FROM_ZERO if what == "accuracy" else "", groups=groups, timed=False)  # fmt: skip
    return chart(called, title, text, pages, _result_rows(groups, of, what))


def learning_time(study: Study) -> Chart | None:
    return _learning(study, "learning-time", "Learning curves by time", "training time, s", 0)


def learning_samples(study: Study) -> Chart | None:
    return _learning(study, "learning-samples", "Learning curves by samples", "samples seen by all workers", 1)


def _learning(study: Study, called: str, title: str, x: str, column: int) -> Chart | None:
    """Accuracy at the end of each epoch, and the training loss of the steps."""
    groups = [one for one in study.groups if moments(one.first)]
    of = measured_on(groups)
    pages, rows = [], list[Row]()
    for sheet in arrange(study, groups, lambda one: one.setting, SAME_PANEL):
        for heading, part in sheet.panels.items():
            traces = [_accuracies(styled, of, column) for styled in part]
            accuracy = Panel("", from_zero(x), _accuracy_axis(of, traces), traces)
            loss = Panel("", from_zero(x), from_zero("training loss"))
            for styled in part:
                loss.traces += _on_the_way(styled, column)
                rows += _moment_rows(styled.thing)
            pages.append(Page(_both(sheet, heading), [accuracy, loss]))
    text = caption(f"Accuracy ({of}) at the end of each epoch, and the training loss of the middle repeat; each point "
                   "is the mean of several steps.", "Training time only." if column == 0 else "", SPREAD,
                   groups=groups, timed=column == 0)  # fmt: skip
    return chart(called, title, text, pages, rows)


def _accuracy(moment: Moment, of: str) -> float:
    value = moment.validation_accuracy if of == "validation" else moment.train_accuracy
    return float("nan") if value is None else value


def _accuracies(styled: Styled[Group], of: str, column: int) -> Trace:
    by_epoch = zip(*(moments(run) for run in styled.thing.runs), strict=False)
    found = []
    for ends in by_epoch:
        place = float(np.median([(end.seconds, end.samples)[column] for end in ends]))
        y = scaled(over_repeats([_accuracy(end, of) for end in ends]), 100)
        said = f"{number(place)} {'s' if column == 0 else 'samples'}"
        found.append(Measured(place, y, f"{styled.full}: {of} accuracy {between(y, '%')} after {said}, epoch "
                              f"{ends[0].epoch + 1}"))  # fmt: skip
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


def time_to(study: Study) -> Chart | None:
    """A bar for each setting, the fastest at the top, those that are not ranked at the bottom.

    There is a panel for each model, with its own target accuracy.
    """
    groups = [one for one in study.groups if moments(one.first)]
    panels, rows, most = list[Panel](), list[Row](), 1
    for sheet in arrange(study, groups, lambda one: one.setting, SAME_PANEL, most=len(groups)):
        for heading, part in sheet.panels.items():
            accuracy = target([each.thing for each in part])
            if accuracy is not None:
                panel, found = _bars_to(_both(sheet, heading), part, accuracy, palette(study, "strategy"))
                panels, rows, most = [*panels, panel], rows + found, max(most, len(part))
    text = caption("Training time until the end of the first epoch that reached the accuracy. Error bars: fastest to "
                   "slowest repeat.", groups=groups)  # fmt: skip
    breaks = max((label.count("<br>") for panel in panels for label in panel.y["categoryarray"]), default=0)
    tall = 24 + most * (BAR + (breaks - 1) * LINE if breaks else 26)
    return chart("time-to-accuracy", "Time to accuracy", text, [Page("", panels)], rows, plot=tall, columns=1)


def in_lines(label: str) -> str:
    """The label of a bar, with line breaks between its parts."""
    lines = [""]
    for part in label.split(", "):
        if lines[-1] and len(lines[-1]) + len(part) > WIDE_LABEL:
            lines.append("")
        lines[-1] += f", {part}" if lines[-1] else part
    return ",<br>".join(lines)


def _bars_to(
    heading: str, part: Sequence[Styled[Group]], accuracy: float, strategies: Sequence[str]
) -> tuple[Panel, list[Row]]:
    style = {id(each.thing): each for each in part}
    reached = time_to_accuracy([each.thing for each in part], accuracy)
    reached.sort(key=lambda each: each.seconds.value if each.seconds and certain(each.group) else np.inf, reverse=True)
    of = reached[0].of
    labels = [in_lines(style[id(each.group)].label) for each in reached]
    values = [each.seconds or Interval(0.0, 0.0, 0.0) for each in reached]
    said = [f"{between(each.seconds, 's')} to {percent(accuracy)} {of} accuracy" if each.seconds else
            f"{percent(accuracy)} {of} accuracy was not reached" for each in reached]  # fmt: skip
    hover = [f"{style[id(each.group)].full}: {text}, in {each.reached} of {count(each.runs, 'run')}"
             for each, text in zip(reached, said, strict=True)]  # fmt: skip
    trace = {
        "type": "bar", "orientation": "h", "x": [each.value for each in values], "y": labels, "showlegend": False,
        "name": f"{percent(accuracy)} {of} accuracy", "error_x": error_bars(values, TEXT),
        "marker": {"color": [COLOURS[strategies.index(each.group.strategy) % len(COLOURS)] for each in reached]},
        "text": ["" if each.seconds else "not reached" for each in reached], "textposition": "outside",
        "cliponaxis": False, "hovertext": [wrapped(each) for each in hover], "hoverinfo": "text",
    }  # fmt: skip
    title = f"{heading}: {percent(accuracy)}" if heading else f"{percent(accuracy)} {of} accuracy"
    rows = [
        identity(each.group)
        | {"accuracy": accuracy, "of": of, "reached": each.reached, "seconds": None}
        | (with_interval("seconds", each.seconds) if each.seconds else {})
        for each in reached
    ]
    seconds = from_zero("training time, s")
    return Panel(title, seconds, categories("", labels), [trace]), rows
