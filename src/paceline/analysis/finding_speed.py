"""What a problem's runs say about speed: the best, how it scales, where the time goes, what is not worth it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from statistics import fmean

from paceline.analysis.breakdown import Parts, by_rank
from paceline.analysis.lines import Line, all_lines, certain, faster, name, speed, told
from paceline.analysis.problems import Problem
from paceline.analysis.scaling import Curve, Group, Point, label, nodes_of
from paceline.analysis.wording import count, number, percent, percents, seconds, some, within

NEAR = 0.7  # of the best speed: what is slower is no rival, and need not be asked
LITTLE = 0.25  # of the ideal: workers that add less than this are not worth it
GOOD_FIT = 0.15
MOST_LINES = 3  # in one sentence
SHOWN = 0.05  # of a step: smaller parts are not named
MUCH = 0.2  # of a step: a larger part is worth an advice
WHAT = {"compute": "computing", "input": "waiting for input", "slowest": "waiting for the slowest worker",
        "communication": "communication", "optimizer": "updating the weights", "other": "other work"}  # fmt: skip
ADVICE = {
    "input": "faster reading would help most",
    "slowest": "the workers are uneven: making the slowest as fast as the rest would help most",
    "communication": "faster links or a larger batch would help most",
}
ADVICE_SERVED = "faster links, more servers or a larger batch would help most"
ADVICE_AT_HOME = "fewer workers or a larger batch would help most"  # on one machine


def best(problem: Problem, curves: Sequence[Curve]) -> Iterator[str]:
    """The fastest setting, by how much, and which cannot be told from it."""
    groups = problem.groups
    top = max(groups, key=speed)
    rate = f"{within(top.images_per_second())} images/s"
    if len(groups) == 1:
        yield problem.say(f"the speed of {label(top, groups)} is {rate}.{problem.few(top)}")
        return
    text = f"the fastest is {label(top, groups)}: {rate}{_over_one(problem, top, curves)}."
    near = [one for one in groups if one is not top and speed(one) > NEAR * speed(top)]
    rivals = [label(one, groups) for one in near if told(faster(top, one), top, one) is None]
    if rivals:
        text += f" These runs cannot tell it from {some(rivals)}."
    yield problem.say(text + problem.few(top))


def _over_one(problem: Problem, top: Group, curves: Sequence[Curve]) -> str:
    if top.workers == 1 and any(one.workers > 1 for one in problem.groups):
        return "; no setting of more workers is faster"
    for curve, point in problem.points(curves):
        if point.group is top:
            if told(point.speedup, top, curve.baseline):
                return f", {within(point.speedup)} times one worker"
            return f"; that it is faster than one worker is not shown: {within(point.speedup)} times"
    return ""


def widest(problem: Problem, curves: Sequence[Curve]) -> list[tuple[Curve, Point]]:
    """The point of most workers of each curve, the most efficient first."""
    found: dict[int, tuple[Curve, Point]] = {}
    for curve, point in problem.points(curves):
        known = found.get(id(curve))
        if known is None or (point.workers, point.speedup.value) > (known[1].workers, known[1].speedup.value):
            found[id(curve)] = curve, point
    return sorted(found.values(), key=lambda each: -each[1].efficiency.value)


def scaling(problem: Problem, curves: Sequence[Curve]) -> Iterator[str]:
    """Efficiency at the widest, and the law's serial part where a law fits."""
    for kind, fixed in (("strong", "the batch of all is fixed"), ("weak", "each worker's batch is fixed")):
        found = widest(problem, [curve for curve in curves if curve.kind == kind])
        if not found:
            continue
        among = [point.group for _, point in found]
        shown = found if len(found) <= MOST_LINES else [found[0], found[-1]]
        items = [f"{label(p.group, among)} has {percents(p.efficiency)} of the ideal speed" for _, p in shown]
        rest = f"; {len(found) - 2} more are between them" if len(found) > MOST_LINES else ""
        low = problem.few(*(each for curve, point in shown for each in (curve.baseline, point.group)))
        yield problem.say(f"{kind} scaling ({fixed}): {'; '.join(items)}{rest}.{_law(found[0][0], len(found))}{low}")


def _law(curve: Curve, among: int) -> str:
    """The serial part, if two points or more follow the law."""
    s = curve.serial
    if s is None or len({p.workers for p in curve.points if p.workers > 1}) < 2:
        return ""
    ideal = [p.workers - s * (p.workers - 1) if curve.kind == "weak" else 1 / (s + (1 - s) / p.workers)
             for p in curve.points]  # fmt: skip
    if any(abs(p.speedup.value / expected - 1) > GOOD_FIT for p, expected in zip(curve.points, ideal, strict=True)):
        return ""
    what = f" {'Its serial part' if among == 1 else 'The serial part of the first'} is {100 * s:.1f} %"
    if curve.kind == "weak":
        return f"{what} by Gustafson's law: each further worker adds {percent(1 - s)} of one's speed."
    limit = f": no number of workers would be more than {number(1 / s)} times as fast" if s > 0.005 else ""
    return f"{what} by Amdahl's law{limit}."


def cost(problem: Problem, curves: Sequence[Curve], most_settings: int = 2) -> Iterator[str]:
    """Where a step's time goes, with the most workers: in the most efficient setting, and in the least."""
    found = [point.group for _, point in widest(problem, curves)]
    if not found:
        most = max(one.workers for one in problem.groups)
        found = [one for one in problem.groups if one.workers == most]
        found = [max(found, key=speed)] if most > 1 else []
    chosen = found[:1] if len(found) < 2 or found[0] is found[-1] else [found[0], found[-1]]
    for one in chosen[:most_settings]:
        if parts := mean_parts(one):
            yield problem.say(f"a step of {label(one, problem.groups)} takes {_spent(parts, one)}")


def mean_parts(one: Group) -> Parts | None:
    """Of all its workers in all its runs."""
    rows = [parts for run in one.runs for parts in by_rank(run).values()]
    if not rows:
        return None
    return Parts(**{part.name: fmean(getattr(row, part.name) for row in rows) for part in fields(Parts)})


def _spent(parts: Parts, one: Group) -> str:
    share = {part.name: getattr(parts, part.name) / max(parts.total, 1e-12) for part in fields(Parts)}
    lost = sorted((key for key in share if key != "compute" and share[key] >= SHOWN), key=lambda key: -share[key])
    text = f"{seconds(parts.total)}: {percent(share['compute'])} computing"
    text += "".join(f", {percent(share[key])} {WHAT[key]}" for key in lost)
    if not lost or share[lost[0]] < MUCH or lost[0] not in ADVICE:
        return f"{text}."
    advice = ADVICE[lost[0]]
    if lost[0] == "communication" and nodes_of(one.first) == 1:
        advice = ADVICE_AT_HOME
    elif lost[0] == "communication" and one.first.summary.servers:
        advice = ADVICE_SERVED
    return f"{text}; {advice}."


def not_worth(problem: Problem, curves: Sequence[Curve]) -> Iterator[str]:
    """Workers that add nothing or little, and strategies that are slower than another, beyond doubt."""
    found = all_lines(problem.groups)
    idle = sorted((said for line in found if (said := _idle(line, found, problem, curves))), key=lambda each: each[0])
    if idle:
        items = [text for _, text, _ in idle[:MOST_LINES]]
        rest = f"; and {len(idle) - MOST_LINES} more" if len(idle) > MOST_LINES else ""
        low = problem.few(*(one for *_, pair in idle for one in pair))
        yield problem.say(f"more workers are not worth it {'; '.join(items)}{rest}.{low}")
    families: dict[str, list[Line]] = {}
    for line in found:
        families.setdefault(line.family, []).append(line)
    slower = [beaten for members in families.values() if (beaten := _slower(problem, members, found))]
    for _, text in sorted(slower, key=lambda each: -each[0])[:MOST_LINES]:
        yield problem.say(text)


def _idle(
    line: Line, among: Sequence[Line], problem: Problem, curves: Sequence[Curve]
) -> tuple[float, str, tuple[Group, Group]] | None:
    """From how many workers on more are not faster, or add next to nothing: by how much, in words, and which two."""
    rows = [(n, one) for n, one in line.groups.items() if n > 1]
    baseline = next((c.baseline for c, p in problem.points(curves) if p.group is line.widest), line.groups.get(1))
    rows = [(1, baseline), *rows] if baseline else rows
    start = len(rows) - 1
    while start > 0 and _adds_little(rows[start - 1], rows[start]):
        start -= 1
    most, last = rows[-1]
    not_beaten = [told(faster(last, one), last, one) is not True and certain(one) for _, one in rows[:-1]]
    start = min([start, *(i for i, each in enumerate(not_beaten) if each)])
    if start == len(rows) - 1 or not certain(last):
        return None
    fewer, one = rows[start]
    ratio, who = faster(last, one), name(line, among, always=("strategy",), without=("model",))
    return ratio.value, f"from {fewer} to {most} with {who}: {within(ratio)} times the speed", (one, last)


def _adds_little(fewer: tuple[int, Group], more: tuple[int, Group]) -> bool:
    """Less than a quarter of what they could, or nothing that can be told; of runs too short nothing is said."""
    ratio, ideal = faster(more[1], fewer[1]), more[0] / fewer[0] - 1
    if not certain(more[1]) or not certain(fewer[1]):
        return False
    return told(ratio, more[1], fewer[1]) is not True or ratio.high - 1 < LITTLE * ideal


def _slower(problem: Problem, members: Sequence[Line], among: Sequence[Line]) -> tuple[int, str] | None:
    """Of lines that differ in strategy, servers and the like: those that the fastest beats with most workers."""
    counts = [n for line in members for n in line.groups if n > 1]
    common = [n for n in set(counts) if counts.count(n) > 1]
    if not common:
        return None
    most = max(common)
    rivals = [line for line in members if most in line.groups]
    top = max(rivals, key=lambda line: speed(line.groups[most]))
    beaten = []
    for line in rivals:
        ratio = faster(line.groups[most], top.groups[most])
        if line is not top and told(ratio, line.groups[most], top.groups[most]) is False:
            beaten.append((ratio, line))
    if not beaten:
        return None
    beaten.sort(key=lambda each: -each[0].value)
    said = [f"{name(line, among, always=('strategy',))} has {percents(ratio)} of its speed" for ratio, line in beaten]
    shown = said if len(said) <= MOST_LINES else [said[0], said[-1]]
    rest = f"; {len(said) - 2} more are between them" if len(said) > MOST_LINES else ""
    low = problem.few(*(line.groups[most] for line in rivals))
    who = name(top, among, always=("strategy",))
    return most, f"with {count(most, 'worker')} the fastest is {who}: {'; '.join(shown)}{rest}.{low}"
