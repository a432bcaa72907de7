"""What pipelines' stages did not compute for, in words: the schedule's own part, uneven stages, and the rest."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from paceline.analysis.lines import speed
from paceline.analysis.pipeline import Pipeline, pipeline
from paceline.analysis.problems import Problem
from paceline.analysis.scaling import Group, disturbed
from paceline.analysis.wording import count, percent

MUCH = 0.1  # of the time: a larger part is worth an advice
ADVICE = {
    "theory": "more micro-batches would help most",
    "uneven": "a cut into stages that take as long as each other would help most",
    "rest": "faster links, fewer stages or cores of their own would help most",
}


def bubbles(problem: Problem) -> Iterator[str]:
    """Of the fastest pipeline that a problem has."""
    known = [(one, found) for one in sorted(problem.groups, key=speed, reverse=True)
             if not disturbed(one) and (found := of_group(one))]  # fmt: skip
    for one, found in known[:1]:
        yield problem.say(_said(one, found, problem))


def of_group(one: Group) -> list[Pipeline]:
    """Of each of its runs that is a pipeline."""
    return [found for run in one.runs if (found := pipeline(run))]


def _said(one: Group, found: list[Pipeline], problem: Problem) -> str:
    measured, uneven, theory = (
        median(getattr(each, key) for each in found) for key in ("measured", "uneven", "theory")
    )
    schedule, micros = one.first.schedule, count(found[0].stages[0].micros, "micro-batch")
    text = (
        f"the stages of {one.label(problem.groups)} do not compute for {percent(measured)} of the time from the first "
        f"forward pass of a step to the last backward pass. By its schedule, {schedule} with {micros}, equal stages "
        f"would not for {percent(theory)}, and stages as uneven as these for {percent(uneven)}"
    )
    lost = {"theory": theory, "uneven": uneven - theory, "rest": measured - uneven}
    most = max(lost, key=lambda key: lost[key])
    return f"{text}; {ADVICE[most]}." if lost[most] >= MUCH else f"{text}."
