"""Why the stages of a pipeline were idle, in words: the schedule, unbalanced stages, and the rest."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from paceline.analysis.lines import speed
from paceline.analysis.pipeline import Pipeline, pipeline
from paceline.analysis.problems import Problem
from paceline.analysis.scaling import Group, disturbed
from paceline.analysis.wording import count, percent

MUCH = 0.1  # of the time: for a larger part there is advice
ADVICE = {
    "theory": "more micro-batches would help most",
    "uneven": "better balanced stages would help most",
    "rest": "faster links, fewer stages or a core for each rank would help most",
}


def bubbles(problem: Problem) -> Iterator[str]:
    """A finding about the fastest pipeline of a problem."""
    known = [(one, found) for one in sorted(problem.groups, key=speed, reverse=True)
             if not disturbed(one) and (found := of_group(one))]  # fmt: skip
    for one, found in known[:1]:
        yield problem.say(_said(one, found, problem))


def of_group(one: Group) -> list[Pipeline]:
    """Its runs that are pipelines."""
    return [found for run in one.runs if (found := pipeline(run))]


def _said(one: Group, found: list[Pipeline], problem: Problem) -> str:
    measured, uneven, theory = (
        median(getattr(each, key) for each in found) for key in ("measured", "uneven", "theory")
    )
    schedule, micros = one.first.schedule, count(found[0].stages[0].micros, "micro-batch")
    text = (
        f"the stages of {one.label(problem.groups)} are idle for {percent(measured)} of the time between the first "
        f"forward pass of a step and the last backward pass. With its schedule, {schedule} with {micros}, equal stages "
        f"would be idle for {percent(theory)}, and stages as unbalanced as these for {percent(uneven)}"
    )
    lost = {"theory": theory, "uneven": uneven - theory, "rest": measured - uneven}
    most = max(lost, key=lambda key: lost[key])
    return f"{text}; {ADVICE[most]}." if lost[most] >= MUCH else f"{text}."
