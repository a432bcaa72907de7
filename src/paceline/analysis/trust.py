"""How reliable a measured number is, given few runs, few steps or too few cores."""

from __future__ import annotations

from paceline.analysis.compare import BETWEEN_RUNS
from paceline.analysis.lines import ENOUGH_RUNS, is_faster
from paceline.analysis.scaling import Group, certain, disturbed
from paceline.analysis.statistics import Interval
from paceline.analysis.wording import count

# What follows if a setting does not train the same model as one process.
MAY_NEED_MORE = "it processes samples faster, but may need more of them to learn as much"


def allow(found: Interval, *groups: Group) -> Interval:
    """The interval, widened to 10 % either way if a setting has fewer than 3 runs: their variation is not known."""
    if min(len(one.runs) for one in groups) >= ENOUGH_RUNS:
        return found
    low, high = found.value / (1 + BETWEEN_RUNS), found.value * (1 + BETWEEN_RUNS)
    return Interval(found.value, min(found.low, low), max(found.high, high))


def asynchronous(one: Group) -> bool:
    """Whether its workers do not wait for each other, so that gradients may be stale."""
    return one.method.asynchronous


def inexact(one: Group) -> str:
    """Why it does not train the model that one process would train."""
    return (
        "Its workers do not wait for each other"
        if asynchronous(one)
        else "It does not train the same model as one process"
    )


def caveat(*groups: Group) -> str:
    """Why the speeds of these settings cannot decide a question; empty if they can."""
    for one in groups:
        if why := disturbed(one):
            return f"the machine was busy ({why[0]})"
        if one.crowded:
            return f"{count(one.workers, 'worker')} shared fewer cores, which does not show what more machines would do"
    return "" if all(map(certain, groups)) else "its runs are too short"


def decide(found: Interval, least: float, *groups: Group) -> bool | None:
    """Whether a number is at least `least`; None if its interval includes both answers, or the runs cannot decide."""
    return None if caveat(*groups) or found.low < least <= found.high else found.value >= least


def beats(ratio: Interval, *groups: Group) -> bool | None:
    """Whether the first is significantly faster (True) or slower (False); None if runs cannot decide."""
    return None if caveat(*groups) else is_faster(ratio, *groups)
