"""Findings about the speed of one problem: the fastest settings, scaling, where time goes, what is not worth it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paceline.analysis.breakdown import Parts, by_rank, mean
from paceline.analysis.lines import Line, all_lines, faster, is_faster, speed
from paceline.analysis.problems import Problem
from paceline.analysis.scaling import Curve, Group, Point, certain, disturbed
from paceline.analysis.setting import nodes_of
from paceline.analysis.slow import largest_loss, remedy, shares, time_of
from paceline.analysis.statistics import LAWS, Interval
from paceline.analysis.trust import MAY_NEED_MORE, allow, asynchronous, inexact
from paceline.analysis.wording import count, number, percent, percents, some, within

NEAR = 0.7  # of the best speed: slower settings are not tested against it
LITTLE = 0.25  # of the ideal gain: workers that add less are not worth it
KINDS = {"strong": "fixed global batch", "weak": "fixed batch per worker"}
GOOD_FIT = 0.15
VAGUE = 3.0  # upper end over lower end: a wider interval says nothing
MOST_LINES = 3  # in one sentence


def best(problem: Problem, curves: Sequence[Curve]) -> Iterator[str]:
    """The fastest setting, or those that cannot be distinguished from it."""
    leaders = fastest(problem.groups)
    if not leaders:
        return
    top, groups = leaders[0], problem.groups
    rate = f"{within(top.samples_per_second())} samples/s"
    if len(groups) == 1:
        yield problem.say(f"the speed of {top.label(groups)} is {rate}.{problem.few(top)}")
    elif len(leaders) > 1:
        names = some([one.label(groups) for one in leaders])
        yield problem.say(
            f"the fastest settings cannot be distinguished: {names}; about {number(speed(top))} samples/s."
        )
    else:
        yield problem.say(f"the fastest is {top.label(groups)}: {rate}.{stale(top, groups)}{problem.few(top)}")


def fastest(groups: Sequence[Group]) -> list[Group]:
    """The fastest setting that can be ranked, followed by those that cannot be distinguished from it."""
    ranked = [one for one in groups if certain(one)]
    top = max(ranked, key=speed, default=None)
    return [top, *rivals_of(top, ranked)] if top else []


def stale(top: Group, groups: Sequence[Group]) -> str:
    """A qualification if the fastest setting does not train the same model as others do."""
    if top.method.exact or not any(one.method.exact for one in groups):
        return ""
    return f" {inexact(top)}: {MAY_NEED_MORE}."


def rivals_of(top: Group, groups: Sequence[Group]) -> list[Group]:
    """Settings that cannot be distinguished from the fastest."""
    near = [one for one in groups if one is not top and speed(one) > NEAR * speed(top)]
    return [one for one in near if is_faster(faster(top, one), top, one) is None]


def widest(problem: Problem, curves: Sequence[Curve]) -> list[tuple[Curve, Point]]:
    """The point with the most workers of each curve that can be ranked, the most efficient first."""
    found: dict[int, tuple[Curve, Point]] = {}
    for curve, point in problem.points(curves):
        known = found.get(id(curve))
        if point.group.crowded or not point.certain:
            continue
        if known is None or (point.workers, point.speedup.value) > (known[1].workers, known[1].speedup.value):
            found[id(curve)] = curve, point
    return sorted(found.values(), key=lambda each: -each[1].efficiency.value)


def of_kind(curves: Sequence[Curve], kind: str) -> list[Curve]:
    return [curve for curve in curves if curve.kind == kind]


def efficiency(curve: Curve, point: Point) -> Interval:
    return allow(point.efficiency, point.group, curve.baseline)


def parts_of(found: Interval) -> str:
    """In percent; says so if runs vary too much."""
    if found.high <= VAGUE * max(found.low, 0.0):
        return percents(found)
    return f"about {percent(found.value)}, but runs vary too much for a reliable figure"


def scaling(problem: Problem, curves: Sequence[Curve]) -> Iterator[str]:
    """Efficiency with the most workers, and the serial fraction if a law fits."""
    for kind, fixed in KINDS.items():
        found = widest(problem, of_kind(curves, kind))
        if not found:
            continue
        among = [point.group for _, point in found]
        shown = found if len(found) <= MOST_LINES else [found[0], found[-1]]
        known = [efficiency(curve, point) for curve, point in found]
        items = [f"{p.group.label(among)} {parts_of(efficiency(c, p))}" for c, p in shown]
        text, law = f"{'; '.join(items)}{others(known)}", _law(found[0][0], len(found))
        if len(found) > MOST_LINES and not apart(known[0], known[-1]):
            between, law = f"{percent(known[-1].value)} to {percent(known[0].value)}", ""
            text = f"{between} for {count(len(found), 'setting')} that cannot be distinguished"
        low = problem.few(*(each for curve, point in shown for each in (curve.baseline, point.group)))
        yield problem.say(f"{kind} scaling ({fixed}), efficiency: {text}.{law}{low}")


def apart(more: Interval, less: Interval) -> bool:
    """Whether the first interval lies above the second."""
    return more.low > less.high


def others(ordered: Sequence[Interval]) -> str:
    """If only the highest and the lowest are shown: how many others there are, and whether they lie between these."""
    if len(ordered) <= MOST_LINES:
        return ""
    high, *rest, low = ordered
    between = " between them" if all(apart(high, each) and apart(each, low) for each in rest) else ""
    return f"; {len(rest)} more{between}"


def _law(curve: Curve, among: int) -> str:
    """The serial fraction, if the law fits the points."""
    s = curve.serial
    if s is None or not fits(curve.kind, s, curve.points):
        return ""
    what = f" {'Its serial fraction' if among == 1 else 'The serial fraction of the first'} is {100 * s:.1f} %"
    if curve.kind == "weak":
        return f"{what} by Gustafson's law: each additional worker adds {percent(1 - s)} of the speed of one."
    limit = f": the speedup cannot exceed {number(1 / s)}" if s > 0.005 else ""
    return f"{what} by Amdahl's law{limit}."


def fits(kind: str, serial: float, points: Sequence[Point]) -> bool:
    """Whether a law with this serial fraction is close to the measured points."""
    known = [point for point in points if point.certain]
    return all(abs(point.speedup.value / LAWS[kind](serial, point.workers) - 1) <= GOOD_FIT for point in known)


def cost(problem: Problem, curves: Sequence[Curve]) -> Iterator[str]:
    """Where the time of a step goes with the most workers, in the most and in the least efficient setting."""
    found = [point.group for _, point in widest(problem, curves)]
    if not found:
        several = [one for one in problem.groups if one.workers > 1 and not disturbed(one)]
        found = [max(several, key=lambda one: (one.workers, speed(one)))] if several else []
    chosen = found[:1] if len(found) < 2 or found[0] is found[-1] else [found[0], found[-1]]
    yield from (problem.say(said) for one in chosen if (said := spent(one, problem.groups)))


def mean_parts(one: Group) -> Parts | None:
    """The mean over all its workers and runs."""
    rows = [parts for run in one.runs for parts in by_rank(run).values()]
    return mean(rows) if rows else None


def spent(one: Group, among: Sequence[Group]) -> str:
    """The parts of a step, and what would make it faster."""
    parts = mean_parts(one)
    if parts is None:
        return ""
    share, step = shares(parts), "a worker's step" if asynchronous(one) else "a step"
    text, part = f"{step} of {one.label(among)} takes {time_of(parts)}", largest_loss(share)
    help_ = remedy(part, one.first.summary, nodes_of(one.first))
    return f"{text}; {help_} would help most." if help_ else f"{text}."


@dataclass(frozen=True)
class Idle:
    """Between which numbers of workers the speed of a line hardly grows, and by how much it does."""

    fewer: int
    most: int
    who: str
    ratio: Interval
    pair: tuple[Group, Group]


@dataclass(frozen=True)
class Slower:
    """The fastest lines with `most` workers, which cannot be distinguished, and the relative speed of those that are
    significantly slower.
    """

    most: int
    leaders: tuple[str, ...]
    beaten: tuple[tuple[str, Interval], ...]
    groups: tuple[Group, ...]


def not_worth(problem: Problem, curves: Sequence[Curve]) -> Iterator[str]:
    """Workers that add little or nothing, and strategies that are significantly slower than another."""
    if found := idle(problem, curves):
        yield problem.say(idle_text(problem, found))
    yield from (problem.say(slower_text(problem, each)) for each in slower(problem)[:MOST_LINES])


def idle_text(problem: Problem, found: Sequence[Idle]) -> str:
    items = [f"from {i.fewer} to {i.most} with {i.who}: {within(i.ratio)} times the speed" for i in found[:MOST_LINES]]
    rest = f"; and {len(found) - MOST_LINES} more" if len(found) > MOST_LINES else ""
    low = problem.few(*(one for each in found for one in each.pair))
    return f"more workers are not worth it {'; '.join(items)}{rest}.{crowds(found)}{low}"


def crowds(found: Sequence[Idle]) -> str:
    """How many of them have more workers than cores."""
    number_of = sum(each.pair[1].crowded for each in found)
    if not number_of:
        return ""
    which = f"{number_of} of these settings {'has' if number_of == 1 else 'have'}"
    if number_of == len(found):
        which = "This setting has" if number_of == 1 else "These settings have"
    return f" {which} more workers than this machine has cores: results may differ on other machines."


def slower_text(problem: Problem, each: Slower) -> str:
    said = [f"{who} reaches {percents(ratio)}" for who, ratio in each.beaten]
    shown = said if len(said) <= MOST_LINES else [said[0], said[-1]]
    rest = others([ratio for _, ratio in each.beaten])
    start = f"with {count(each.most, 'worker')}, relative to the speed of {some(each.leaders)}"
    return f"{start}: {'; '.join(shown)}{rest}.{problem.few(*each.groups)}"


def varied(groups: Sequence[Group]) -> frozenset[str]:
    """Strategies that ran both with and without overlap."""
    ways: dict[str, set[str]] = {}
    for one in groups:
        if one.workers > 1:
            ways.setdefault(one.strategy, set()).add(str(one.setting.get("overlap")))
    return frozenset(strategy for strategy, found in ways.items() if len(found) > 1)


def called(line: Line, among: Sequence[Line], also: frozenset[str] = frozenset()) -> str:
    """Its strategy and what tells it from the others: of these strategies always whether they overlap."""
    always = ("strategy", "servers", *(("overlap",) if line.strategy in also else ()))
    said = line.label(among, without=("model",), always=always)
    alike = [each for each in among if each.label(among, without=("model",), always=always) == said]
    return said if len(alike) < 2 else line.widest.label([each.widest for each in alike])


def idle(problem: Problem, curves: Sequence[Curve], also: frozenset[str] = frozenset()) -> list[Idle]:
    """Lines in which more workers are not worth it, the worst first."""
    lines = all_lines(problem.groups)
    found = [each for line in lines if (each := _idle(line, problem, curves, called(line, lines, also)))]
    return sorted(found, key=lambda each: each.ratio.value)


def _idle(line: Line, problem: Problem, curves: Sequence[Curve], who: str) -> Idle | None:
    """The number of workers from which more of them add little, if that is significant."""
    rows = [(n, one) for n, one in line.groups.items() if n > 1]
    baseline = next((c.baseline for c, p in problem.points(curves) if p.group is line.widest), line.groups.get(1))
    rows = [(1, baseline), *rows] if baseline else rows
    last = len(rows) - 1
    start = last
    while start > 0 and _adds_little(rows[start - 1], rows[start], rows[start][0]):
        start -= 1
    # All additional workers together add less than a quarter of what the next number of workers could add.
    start = min([start, *(i for i in range(last) if _adds_little(rows[i], rows[-1], rows[i + 1][0]))])
    if start == last:
        return None
    (fewer, one), (most, widest_one) = rows[start], rows[-1]
    return Idle(fewer, most, who, allow(faster(widest_one, one), widest_one, one), (one, widest_one))


def _adds_little(fewer: tuple[int, Group], more: tuple[int, Group], ideal: int) -> bool:
    """Whether they add significantly less than a quarter of the ideal gain; False if one of both is not ranked."""
    if not certain(more[1]) or not certain(fewer[1]):
        return False
    ratio = allow(faster(more[1], fewer[1]), more[1], fewer[1])
    return ratio.high - 1 < LITTLE * (ideal / fewer[0] - 1)


def slower(problem: Problem, also: frozenset[str] = frozenset()) -> list[Slower]:
    """Comparable lines that are slower than the fastest with the most common workers; the most workers first."""
    lines = all_lines(problem.groups)
    families: dict[str, list[Line]] = {}
    for line in lines:
        families.setdefault(line.family, []).append(line)
    names = {id(line): called(line, lines, also) for line in lines}
    found = [each for members in families.values() if (each := _slower(members, lambda line: names[id(line)]))]
    return sorted(found, key=lambda each: -each.most)


def _slower(members: Sequence[Line], who: Callable[[Line], str]) -> Slower | None:
    counts = [n for line in members for n, one in line.groups.items() if n > 1 and not one.crowded]
    common = [n for n in set(counts) if counts.count(n) > 1]
    if not common:
        return None
    most = max(common)
    rivals = [line for line in members if most in line.groups and certain(line.groups[most])]
    top = max(rivals, key=lambda line: speed(line.groups[most]), default=None)
    if top is None:
        return None
    beaten, leaders = [], [who(top)]
    for line in rivals:
        pair = line.groups[most], top.groups[most]
        ratio = faster(*pair)
        if line is not top and is_faster(ratio, *pair) is False:
            beaten.append((who(line), allow(ratio, *pair)))
        elif line is not top:
            leaders.append(who(line))
    beaten.sort(key=lambda each: -each[1].value)
    groups = tuple(line.groups[most] for line in rivals)
    return Slower(most, tuple(leaders), tuple(beaten), groups) if beaten else None
