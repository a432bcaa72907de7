"""How far a number can be trusted: what few runs, few steps and too few cores leave open."""

from __future__ import annotations

from paceline.analysis.compare import BETWEEN_RUNS
from paceline.analysis.lines import ENOUGH_RUNS, told
from paceline.analysis.scaling import Group, certain, disturbed
from paceline.analysis.statistics import Interval
from paceline.analysis.wording import count


def allow(found: Interval, *groups: Group) -> Interval:
    """With fewer than 3 runs of a setting at least 10 % either way: nobody knows how much its runs differ."""
    if min(len(one.runs) for one in groups) >= ENOUGH_RUNS:
        return found
    low, high = found.value / (1 + BETWEEN_RUNS), found.value * (1 + BETWEEN_RUNS)
    return Interval(found.value, min(found.low, low), max(found.high, high))


def asynchronous(one: Group) -> bool:
    """Whether its workers do not wait for each other, so that its images were not all seen by the newest weights."""
    return one.method.asynchronous


def inexact(one: Group) -> str:
    """Why its model is not the one that one process would train."""
    return "Its workers do not wait for each other" if asynchronous(one) else "It is not the training of one process"


def doubt(*groups: Group) -> str:
    """Why the speeds of these settings decide nothing; empty where they do."""
    for one in groups:
        if why := disturbed(one):
            return f"the machine was busy ({why[0]})"
        if one.crowded:
            return f"{count(one.workers, 'worker')} took turns on fewer cores, which is no measure of more machines"
    return "" if all(map(certain, groups)) else "its runs are too short to tell"


def decide(found: Interval, least: float, *groups: Group) -> bool | None:
    """Whether a number is at least so much; None if its interval has both, or the runs cannot decide."""
    return None if doubt(*groups) or found.low < least <= found.high else found.value >= least


def beats(ratio: Interval, *groups: Group) -> bool | None:
    """Whether the first is really faster (or slower: False), as `told` has it; None of workers that took turns too."""
    return None if doubt(*groups) else told(ratio, *groups)
