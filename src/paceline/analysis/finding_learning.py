"""Findings about learning: accuracy or loss, the time to reach it, and what a larger batch costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from paceline.analysis.learning import (
    ACCURACY,
    Measure,
    Reached,
    measure_of,
    moments,
    perplexity,
    seen,
    target,
    time_to,
)
from paceline.analysis.lines import ENOUGH_RUNS, faster, is_faster, speed
from paceline.analysis.problems import Problem
from paceline.analysis.scaling import Group, certain
from paceline.analysis.setting import BY_BATCH
from paceline.analysis.statistics import Interval
from paceline.analysis.wording import count, number, percent, seconds, some, spread, within
from paceline.options import LEARNING

ALIKE = 0.02  # of the samples seen: one batch more or less does not matter

Scored = tuple[Group, list[float]]  # a setting, and the accuracy or loss of each of its runs


def scores(one: Group, of: str) -> list[float]:
    """The accuracy or loss of each run, in the test or of the best epoch; empty if a run has none."""
    measure = measure_of(one)
    if of == "test":
        found: list[float | None] = [getattr(run.summary, f"test_{measure.name}") for run in one.runs]
    else:
        rows = [[moment.value(of, measure.name) for moment in moments(run)] for run in one.runs]
        found = [measure.best(value for value in row if value is not None) for row in rows]
    return [value for value in found if value is not None] if None not in found else []


def scored(groups: Sequence[Group]) -> tuple[str, list[Scored]]:
    """By the result in the test if all trained settings have it, else in validation, else in training."""
    learned = [one for one in groups if any(moments(run) for run in one.runs) or scores(one, "test")]
    for of in ("test", "validation", "training"):
        found = [(one, values) for one in learned if (values := scores(one, of))]
        if found and len(found) == len(learned):
            return of, found
    return "training", []


def apart(measure: Measure, one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the worst run of the first is better than the best of the other; with few runs, by a margin."""
    margin = measure.sign * (median(one) - median(other))
    enough = min(len(one), len(other)) >= ENOUGH_RUNS or margin > measure.margin(median(other))
    return enough and min(measure.sign * value for value in one) > max(measure.sign * value for value in other)


def as_long(found: Sequence[Scored]) -> list[Scored]:
    """The largest set of settings that saw the same number of samples; of equal sets the one with the most samples."""
    rows: list[list[Scored]] = []
    for each in sorted(found, key=lambda each: seen(each[0].first)):
        if rows and seen(each[0].first) <= (1 + ALIKE) * seen(rows[-1][0][0].first):
            rows[-1].append(each)
        else:
            rows.append([each])
    return max(reversed(rows), key=len)


def best_result(problem: Problem) -> Iterator[str]:
    """The setting with the best accuracy or loss, those that cannot be distinguished from it, and the worst."""
    of, every = scored(problem.groups)
    if not every:
        return
    measure = measure_of(problem.groups[0])
    found = sorted(as_long(every), key=lambda each: -measure.sign * median(each[1]))
    groups = [one for one, _ in found]
    top, values = found[0]
    if len(every) == 1:
        yield problem.say(f"{of} {measure.name} is {_score(top, values)}.{problem.few(top)}")
        return
    left = ""
    if len(found) < len(every):
        samples = [seen(one.first) for one, _ in every]
        left = f" Settings that saw more or fewer samples ({min(samples):,} to {max(samples):,}) are not compared."
    if len(found) == 1:
        text = f"{top.label([one for one, _ in every])} has {_has(top, of, values)}"
    else:
        text = f"the best {of} {measure.name} is {_score(top, values)}, with {top.label(groups)}"
    worse = [(one, each) for one, each in found[1:] if apart(measure, values, each)]
    alike = len(found) - 1 - len(worse)
    if alike and not worse:
        low, high = (measure.text(end(median(each) for _, each in found)) for end in (min, max))
        between = low if low == high else f"{low} to {high}"
        text = f"the {of} {measure.plural} of the {len(found)} settings cannot be distinguished: {between}"
    elif alike:
        text += f"; {_of(alike, len(found) - 1)} cannot be distinguished from it"
    if worse:
        last, least = worse[-1]
        if all(apart(measure, each, least) for one, each in found if one is not last):
            text += f"; {last.label(groups)} has the {measure.worse[:-2]}est, {_score(last, least)}"
        else:
            have, limit = "has" if len(worse) == 1 else "have", f"{measure.up_to} {measure.text(median(least))}"
            text += f"; {_of(len(worse), len(found) - 1)} {have} a {measure.worse} {measure.name}, {limit}"
    yield problem.say(f"{text}.{left}{problem.few(*groups)}")


def _of(some_of: int, all_of: int) -> str:
    if some_of < all_of:
        return f"{some_of} of the {all_of} others"
    return "the other" if all_of == 1 else f"the {all_of} others"


def _score(one: Group, values: Sequence[float]) -> str:
    """The median, with the range of the runs, and the perplexity of a language model."""
    middle, form, notes = median(values), measure_of(one).text, list[str]()
    if form(min(values)) != form(max(values)):
        notes.append(spread(Interval(middle, min(values), max(values)), form))
    if (surprise := perplexity(one.first, middle)) is not None:
        notes.append(f"perplexity {number(surprise)}")
    return form(middle) + (f" ({'; '.join(notes)})" if notes else "")


def _has(one: Group, of: str, values: Sequence[float]) -> str:
    """What a setting has: 97.10 % test accuracy, or a test loss of 0.123."""
    if measure_of(one) is ACCURACY:
        return f"{_score(one, values)} {of} accuracy"
    return f"a {of} loss of {_score(one, values)}"


def goal(groups: Sequence[Group], of: str, wanted: float) -> str:
    """A target in words: 95 % validation accuracy, or a validation loss of 1.5."""
    if measure_of(groups[0]) is ACCURACY:
        return f"{100 * wanted:g} % {of} accuracy"
    surprise = perplexity(groups[0].first, wanted)
    return f"a {of} loss of {wanted:g}" + (f" (perplexity {number(surprise)})" if surprise is not None else "")


def soonest(problem: Problem) -> Iterator[str]:
    """The setting that reaches the target accuracy or loss first."""
    wanted = target(problem.groups)
    if wanted is None:
        return
    found = time_to([one for one in problem.groups if certain(one)], wanted)
    if len(found) < 2:
        return
    reached = sorted(((r, r.seconds) for r in found if r.seconds), key=lambda each: each[1].value)
    groups = [each.group for each in found]
    if not reached:
        return
    first, when = reached[0]
    wanted_text = goal(problem.groups, first.of, wanted)
    ties = [r.group.label(problem.groups) for r, later in reached[1:] if not _sooner(first, when, r, later)]
    after = f"after {within(when, seconds)} of training"
    if ties:
        names = some([first.group.label(problem.groups), *ties])
        text = f"{wanted_text} is reached {after} at best; these settings cannot be distinguished: {names}"
    else:
        text = f"{wanted_text} is reached first by {first.group.label(problem.groups)}, {after}"
        if len(reached) > 1 and all(_sooner(*reached[1], *each) for each in reached[2:]):
            text += f"; next is {reached[1][0].group.label(problem.groups)}, after {within(reached[1][1], seconds)}"
    if missed := len(found) - len(reached):
        text += f"; {count(missed, 'setting')} did not reach it in most runs"
    yield problem.say(f"{text}.{problem.few(*groups)}")


def _sooner(one: Reached, when: Interval, other: Reached, later: Interval) -> bool:
    enough = min(one.runs, other.runs) >= ENOUGH_RUNS
    return when.high < later.low and (enough or later.value > 1.1 * when.value)


def batch_sizes(problem: Problem) -> Iterator[str]:
    """The fastest batch size, what it costs in accuracy or loss, and the fastest that costs nothing."""
    sweep = _sweep(problem.groups)
    if len(sweep) < 2:
        return
    smallest = min(sweep, key=_batch)
    top = max(sweep, key=speed)
    who = top.label([one for one in problem.groups if _batch(one) == _batch(top)])
    text = f"of the batch sizes {_batch(smallest):,} to {max(map(_batch, sweep)):,} ({who}), "
    ratio = faster(top, smallest)
    if is_faster(ratio, top, smallest):
        text += f"{_batch(top):,} is the fastest, {within(ratio)} times as fast as {_batch(smallest):,}"
    else:
        text += f"none is significantly faster than {_batch(smallest):,}"
        top = smallest
    of, found = scored(sweep)
    if found and len(as_long(found)) == len(sweep):
        text += _price(top, of, found)
    yield problem.say(f"{text}.{problem.few(*sweep)}")


def _price(top: Group, of: str, found: Sequence[Scored]) -> str:
    """What the fastest batch size costs in accuracy or loss, and the fastest that costs nothing."""
    measure, by_group = measure_of(top), {id(one): values for one, values in found}
    best, values = max(found, key=lambda each: measure.sign * median(each[1]))
    own = by_group[id(top)]
    if best is top:
        return f"; it also has the best {of} {measure.name}, {_score(top, own)}"
    lost = f"; its {of} {measure.name} is {_score(top, own)}, the best {_score(best, values)} (batch {_batch(best):,})"
    if not apart(measure, values, own):
        return f"{lost}, which is not a significant difference"
    alike = [one for one, each in found if not apart(measure, values, each)]
    choice = max(alike, key=speed)
    part = speed(choice) / speed(top)
    if choice is best:
        return f"{lost}; no other batch size reaches it, and that one has {percent(part)} of the speed"
    return f"{lost}; {_batch(choice):,} is the fastest that reaches it, with {percent(part)} of the speed"


def _batch(one: Group) -> int:
    return one.first.summary.batch_size


def _sweep(groups: Sequence[Group]) -> list[Group]:
    """Settings that differ only in batch size: the longest such sweep, with the fewest workers."""
    rows: dict[str, dict[int, Group]] = {}
    for one in groups:
        chosen_anew = (*BY_BATCH, *one.setting.only(LEARNING).facts)
        rows.setdefault(one.setting.key(without=chosen_anew), {}).setdefault(_batch(one), one)
    ordered = sorted(rows.values(), key=lambda row: (-len(row), min(one.workers for one in row.values())))
    return [row[batch] for row in ordered[:1] for batch in sorted(row)]
