"""What the runs of several problems say about speed: each thing in one sentence over all problems of one place.

A place is what problems have beside their model: links, a device. Numbers of each problem are in the report's tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from paceline.analysis.finding_speed import (
    KINDS,
    NONE_FASTER,
    NONE_SHOWN,
    TIMES,
    crowds,
    efficiency,
    idle,
    idle_text,
    of_kind,
    over_one,
    parts_of,
    rivals_of,
    scaling,
    slower,
    slower_text,
    spent,
    stale,
    varied,
    widest,
)
from paceline.analysis.lines import speed
from paceline.analysis.problems import Problem
from paceline.analysis.scaling import Curve, Group, label
from paceline.analysis.statistics import Interval
from paceline.analysis.wording import count, number, percent, sentence, spread

MOST_ROWS = 3  # clauses of a place
BRIEF = {NONE_FASTER: "more workers are slower", NONE_SHOWN: "more are not shown to be faster"}
Named = tuple[str, Problem]  # by its model, where there are several
Row = list[tuple[Interval, str]]  # a number of each problem


def places(found: Sequence[Problem]) -> dict[str, list[Named]]:
    """Problems by what they have beside their model; those of one model have no name but their place."""
    several = len({_model(problem) for problem in found}) > 1
    rows: dict[str, list[Named]] = {}
    for problem in found:
        words = [word for word in problem.label.split(", ") if word and word != _model(problem)]
        rows.setdefault(", ".join(words), []).append((_model(problem) if several else "", problem))
    return rows


def _model(problem: Problem) -> str:
    return problem.groups[0].first.summary.model


def _label(one: Group, among: Sequence[Group], also: frozenset[str]) -> str:
    """With its servers, and of these strategies whether it overlaps: so it is called the same for every model."""
    servers, said = one.first.summary.servers, label(one, among)
    words = [count(servers, "server") if servers else ""]
    words += [f"overlap {one.setting.get('overlap')}"] if one.strategy in also and one.workers > 1 else []
    return ", ".join([said, *(word for word in words if word and word not in said)])


def _also(found: Sequence[Problem]) -> frozenset[str]:
    return varied([one for problem in found for one in problem.groups])


def _over_places(start: str, found: Sequence[Problem], said: Callable[[Sequence[Named]], list[str]]) -> Iterator[str]:
    """A sentence for each place, in one text."""
    rows = [(place, clauses) for place, members in places(found).items() if (clauses := said(members))]
    if rows:
        place, clauses = rows[0]
        first = f"{start}{', ' + place if place else ''}: {'; '.join(clauses)}."
        yield " ".join([first, *(f"{sentence(place)}: {'; '.join(clauses)}." for place, clauses in rows[1:])])


def _joined(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _named(who: str, items: Sequence[tuple[str, str]]) -> str:
    """A setting and what is said of it for each problem: ring, for a (…) and b (…)."""
    if all(name == "" for name, _ in items):
        return f"{who} ({', '.join(said for _, said in items)})"
    return f"{who}, for {_joined([f'{name} ({said})' for name, said in items])}"


def fastest(found: Sequence[Problem], curves: Sequence[Curve]) -> Iterator[str]:
    """By the setting that wins: the problems that it is the fastest for."""
    also = _also(found)

    def said(members: Sequence[Named]) -> list[str]:
        winners: dict[str, list[tuple[str, str]]] = {}
        for name, problem in members:
            top = max(problem.groups, key=speed)
            winners.setdefault(_label(top, problem.groups, also), []).append((name, _speed(problem, curves)))
        return [_named(who, items) for who, items in winners.items()]

    notes = {stale(max(problem.groups, key=speed), problem.groups) for problem in found}
    yield from (f"{text}{max(notes)}" for text in _over_places("The fastest", found, said))


def _speed(problem: Problem, curves: Sequence[Curve]) -> str:
    top = max(problem.groups, key=speed)
    words, speedup = over_one(problem, top, curves)
    said = f"{number(speed(top))} images/s"
    if words == TIMES and speedup:
        said += f", {number(speedup.value)} times one worker, {spread(speedup)}"
    elif words:
        said += f"; {BRIEF.get(words, 'not shown to be faster than one worker')}"
    if rivals := rivals_of(top, problem.groups):
        said += f"; not told from {label(rivals[0], problem.groups) if len(rivals) == 1 else f'{len(rivals)} others'}"
    return said


def scaling_of(found: Sequence[Problem], curves: Sequence[Curve]) -> Iterator[str]:
    """Efficiency at the widest, by setting: over how wide a range it goes, and from which problem to which."""
    also = _also(found)
    for kind, fixed in KINDS.items():
        chosen = of_kind(curves, kind)
        having = [problem for problem in found if widest(problem, chosen)]
        if len(having) == 1:
            yield from scaling(having[0], chosen)
            continue

        def said(members: Sequence[Named], chosen: Sequence[Curve] = chosen) -> list[str]:
            rows: dict[str, Row] = {}
            for name, problem in members:
                points = widest(problem, chosen)
                among = [point.group for _, point in points]
                for curve, point in points:
                    who = _label(point.group, among, also)
                    rows.setdefault(who, []).append((efficiency(curve, point), name))
            ordered = sorted(rows.items(), key=lambda row: (-len(row[1]), -max(each.value for each, _ in row[1])))
            return _short([f"{who} {_over(row)}" for who, row in ordered])

        yield from _over_places(f"{kind.capitalize()} scaling ({fixed}), of the ideal speed", having, said)


def _short(clauses: Sequence[str]) -> list[str]:
    more = len(clauses) - MOST_ROWS
    return [*clauses[:MOST_ROWS], f"and {more} more"] if more > 1 else list(clauses)


def _over(row: Row) -> str:
    """A number of several problems: of one with its interval, of more the least and the most."""
    ordered = sorted(row, key=lambda each: each[0].value)
    (low, low_name), (high, high_name) = ordered[0], ordered[-1]
    if len(row) == 1:
        return parts_of(low) + (f" for {low_name}" if low_name else "")
    return f"{percent(low.value)} ({low_name}) to {percent(high.value)} ({high_name})"


def cost_of(found: Sequence[Problem], curves: Sequence[Curve]) -> Iterator[str]:
    """Where a step's time goes, of the most efficient setting of all problems and of the least."""
    points = [(point.efficiency.value, problem, point.group)
              for problem in found for _, point in widest(problem, curves)]  # fmt: skip
    points.sort(key=lambda each: -each[0])
    for _, problem, one in points[:1] + points[1:][-1:]:
        if said := spent(one, problem.groups):
            yield problem.say(said)


def not_worth_of(found: Sequence[Problem], curves: Sequence[Curve]) -> Iterator[str]:
    """Workers that add nothing or little, and strategies that are slower than another, beyond doubt."""
    also = _also(found)
    idles = {id(problem): idle(problem, curves, also) for problem in found}
    having = [problem for problem in found if idles[id(problem)]]
    if len(having) == 1:
        yield having[0].say(idle_text(having[0], idles[id(having[0])]))
    else:

        def said(members: Sequence[Named]) -> list[str]:
            rows: dict[str, list[tuple[str, str]]] = {}
            for name, problem in members:
                for each in idles[id(problem)]:
                    text = f"from {each.fewer} to {each.most}: {number(each.ratio.value)} times the speed"
                    rows.setdefault(each.who, []).append((name, text))
            return _short([_named(who, items) for who, items in sorted(rows.items(), key=lambda row: -len(row[1]))])

        for text in _over_places("More workers are not worth it", having, said):
            yield text + crowds([each for rows in idles.values() for each in rows])
    yield from _beaten(found)


def _beaten(found: Sequence[Problem]) -> Iterator[str]:
    also = _also(found)
    firsts = {id(problem): slower(problem, also)[:1] for problem in found}
    having = [problem for problem in found if firsts[id(problem)]]
    if len(having) == 1:
        yield having[0].say(slower_text(having[0], firsts[id(having[0])][0]))
        return

    def said(members: Sequence[Named]) -> list[str]:
        tops: dict[tuple[int, str], dict[str, Row]] = {}
        for name, problem in members:
            for each in firsts[id(problem)]:
                beaten = tops.setdefault((each.most, each.who), {})
                for who, ratio in each.beaten:
                    beaten.setdefault(who, []).append((ratio, name))
        clauses = []
        for (most, who), beaten in tops.items():
            ordered = sorted(beaten.items(), key=lambda row: (-len(row[1]), -row[1][0][0].value))
            losers = [f"{loser} has {_over(row)}" for loser, row in ordered]
            clauses.append(f"of the speed of {who}, {count(most, 'worker')}: {', '.join(_short(losers))}")
        return clauses

    yield from _over_places("Slower strategies", having, said)
