"""Findings about the speed of several problems: small tables with a row for each case."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.analysis.finding_speed import crowds, fastest, idle, slower, spent, stale, varied, widest
from paceline.analysis.lines import speed
from paceline.analysis.problems import Problem
from paceline.analysis.scaling import Curve, Group
from paceline.analysis.wording import count, number, percents, some, within

Rows = tuple[tuple[str, ...], ...]  # the first has the names of the columns


def best_of(found: Sequence[Problem]) -> tuple[str, Rows]:
    """The fastest setting of each problem."""
    rows, notes = [], []
    for problem in found:
        if leaders := fastest(problem.groups):
            who = some([one.label(problem.groups) for one in leaders])
            rows.append((problem.label, who, number(speed(leaders[0]))))
            notes.append(stale(leaders[0], problem.groups))
    text = "The fastest setting of each problem; where several are named, they cannot be distinguished."
    return f"{text}{max(notes, default='')}", (("problem", "fastest", "samples/s"), *rows) if rows else ()


def cost_of(found: Sequence[Problem], curves: Sequence[Curve]) -> list[str]:
    """Where the time of a step goes in the most and in the least efficient setting of all problems."""
    points = [(point.efficiency.value, problem, point.group)
              for problem in found for _, point in widest(problem, curves)]  # fmt: skip
    points.sort(key=lambda each: -each[0])
    chosen: list[tuple[Problem, Group]] = [(problem, one) for _, problem, one in points[:1] + points[1:][-1:]]
    return [problem.say(said) for problem, one in chosen if (said := spent(one, problem.groups))]


def idle_of(found: Sequence[Problem], curves: Sequence[Curve]) -> tuple[str, Rows]:
    """Workers that add little or nothing."""
    also = _also(found)
    known = [(problem, each) for problem in found for each in idle(problem, curves, also)]
    rows = [(problem.label, each.who, f"{each.fewer} to {each.most}", within(each.ratio)) for problem, each in known]
    text = f"These additional workers are not worth it.{crowds([each for _, each in known])}"
    return text, (("problem", "setting", "workers", "times the speed"), *rows) if rows else ()


def slower_of(found: Sequence[Problem]) -> tuple[str, Rows]:
    """Strategies that are significantly slower than others."""
    also = _also(found)
    rows = [(problem.label, some(each.leaders), count(each.most, "worker"), who, percents(ratio))
            for problem in found for each in slower(problem, also)[:1] for who, ratio in each.beaten]  # fmt: skip
    text = "These settings are slower than the fastest with as many workers."
    return text, (("problem", "fastest", "with", "slower", "relative speed"), *rows) if rows else ()


def _also(found: Sequence[Problem]) -> frozenset[str]:
    return varied([one for problem in found for one in problem.groups])
