"""Claims that an experiment declares, each with a verdict that is computed from the runs.

Each claim is checked for every line of settings that it is about, for each model, number of servers and network, to
show where it stops holding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.analysis.claim_file import Declared, Reading, matches
from paceline.analysis.lines import Line, all_lines, faster
from paceline.analysis.scaling import Curve, Group
from paceline.analysis.setting import ALWAYS
from paceline.analysis.statistics import Interval
from paceline.analysis.traffic import judge_bytes, judge_rate
from paceline.analysis.trust import allow, beats, caveat, decide
from paceline.analysis.verdicts import Case, Claim, Judged, claim
from paceline.analysis.wording import count, number, percent, percents, within


def claims(declared: Sequence[Declared], groups: Sequence[Group], curves: Sequence[Curve]) -> list[Claim]:
    """Those whose settings ran."""
    lines = all_lines(groups)
    return [made for each in declared if (made := _judged(each, lines, curves))]


def _judged(declared: Declared, lines: Sequence[Line], curves: Sequence[Curve]) -> Claim | None:
    about = _chosen(lines, declared.of)
    if not about:
        return None
    cases, used = list[Case](), list(about)
    shown = next((each for each in declared.reading if each.figure), declared.reading[0])
    for reading in declared.reading:
        if reading.measure == "speed":
            rivals = _chosen(lines, reading.faster_than or {})
            used += rivals
            found = list(_rivals(declared, reading, about, rivals))
        else:
            several = _with_a_course(about)
            found = [Case(line.model, _place(declared, line, several), *_judge(line, reading, curves), reading.name)
                     for line in several]  # fmt: skip
        cases += found if reading is shown else [replace(case, figure=None) for case in found]
    if not cases:
        return None
    runs = min(len(one.runs) for line in used for one in line.groups.values())
    text = declared.text
    for name in ("below", "at_least"):
        text = text.replace(f"{{{name}}}", percent(getattr(shown, name) or 0.0))
    is_part = shown.measure in ("added-speed", "efficiency") or shown.law != "constant"
    return claim(
        declared.name, text, declared.source, list(_once(cases)), runs, shown.figure, percent if is_part else _times
    )


def _once(cases: Sequence[Case]) -> Iterator[Case]:
    """What no reading can decide for the same reason, once."""
    for case in cases:
        same = [each for each in cases if (each.model, each.place, each.why) == (case.model, case.place, case.why)]
        if len(same) == 1 or case.holds is not None:
            yield case
        elif case is same[0]:
            yield replace(case, reading="")


def _times(value: float) -> str:
    return f"{number(value)} times"


def _chosen(lines: Sequence[Line], wanted: object) -> list[Line]:
    assert isinstance(wanted, dict)
    return [line for line in lines
            if matches(wanted, {name: fact.value for name, fact in line.first.setting.facts.items()})]  # fmt: skip


def _place(declared: Declared, line: Line, among: Sequence[Line]) -> str:
    """What a line is called, beside its model."""
    return line.label(among, without=("model",), always=(*ALWAYS, "servers", *declared.say))


def _with_a_course(lines: Sequence[Line]) -> list[Line]:
    """Without lines that have one number of workers, for models that have longer lines."""
    models = {line.model for line in lines if len(line.groups) > 1}
    return [line for line in lines if len(line.groups) > 1 or line.model not in models]


def _judge(line: Line, reading: Reading, curves: Sequence[Curve]) -> tuple[bool | None, str, float | None]:
    match reading.measure:
        case "bytes":
            found = judge_bytes(line, reading)
        case "rate":
            found = judge_rate(line, reading)
        case "efficiency":
            found = _efficiency(line, reading, curves)
        case _:
            found = _added_speed(line, reading)
    return found.holds, found.why, found.figure


def _bounded(found: Interval, reading: Reading, *groups: Group) -> bool | None:
    """Whether a number is at least so much, or below that; None if its interval has both."""
    if reading.below is None:
        return decide(found, reading.at_least or 0.0, *groups)
    reaches = decide(found, reading.below, *groups)
    return None if reaches is None else not reaches


def _but(*groups: Group) -> str:
    """Why it is undecided, as the end of a sentence."""
    found = caveat(*groups)
    return f"; {found}" if found else ""


def _added_speed(line: Line, reading: Reading) -> Judged:
    """From half of the workers, or the number nearest to it, to the most."""
    most = max(line.groups)
    fewer = [n for n in line.groups if n < most]
    if not fewer:
        return Judged(None, f"only {count(most, 'worker')} ran: a trend needs at least two numbers of workers")
    half = min(fewer, key=lambda n: (abs(n - most / 2), n))
    pair, ideal = (line.groups[most], line.groups[half]), most / half
    gain = allow(faster(*pair), *pair)
    part = Interval(*((value - 1) / (ideal - 1) for value in (gain.value, gain.low, gain.high)))
    why = (
        f"from {half} to {count(most, 'worker')} it is {within(gain)} times as fast, where {ideal:.3g} would be ideal: "
        f"{percents(part)} of the ideal gain{_but(*pair)}"
    )
    return Judged(_bounded(part, reading, *pair), why, part.value)


def _efficiency(line: Line, reading: Reading, curves: Sequence[Curve]) -> Judged:
    most, beside = max(line.groups), _baseline(line, curves)
    if beside is None:
        return Judged(None, f"only {count(most, 'worker')} ran: there is no smaller number to compare with")
    pair, ideal = (line.widest, beside), most / beside.workers
    gain = allow(faster(*pair), *pair)
    efficiency = Interval(gain.value / ideal, gain.low / ideal, gain.high / ideal)
    text = f"{count(most, 'worker')} reach {percents(efficiency)} of the ideal speed, relative to {beside.workers}"
    why = f"{text}{_but(*pair)}"
    return Judged(_bounded(efficiency, reading, *pair), why, efficiency.value)


def _baseline(line: Line, curves: Sequence[Curve]) -> Group | None:
    """The baseline of its curve, or its own setting with the fewest workers; None if there are no fewer."""
    own = [curve for curve in curves if curve.kind == line.kind and any(p.group is line.widest for p in curve.points)]
    beside = own[0].baseline if own else line.groups[min(line.groups)]
    return beside if beside.workers < max(line.groups) else None


def _rivals(declared: Declared, reading: Reading, about: Sequence[Line], rivals: Sequence[Line]) -> Iterator[Case]:
    """A case for each pair of lines of one problem; or, where one that wins is enough, for each rival."""
    pairs = [(line, rival) for line in about for rival in rivals if line.family == rival.family]
    faced = [pair for pair in pairs if _common(*pair)]
    if not reading.any:
        for rival in rivals:
            against = [line for line, other in faced if other is rival]
            where = _place(declared, rival, rivals)
            if not against:
                yield Case(rival.model, where, None, "no such setting ran the same problem with as many workers")
            for line in against:
                holds, why, ratio = _compared(line, rival)
                yield Case(rival.model, where, holds, why, ratio, f"against {_place(declared, line, against)}")
        return
    problems = {line.family: line for line in about}
    for family, line in problems.items():
        beside = [rival for rival in rivals if rival.family == family]
        where = line.label(problems.values(), without=("model",), always=())
        for rival in beside:
            yield _any(declared, where, [one for one, other in faced if other is rival], rival, rivals)
        if not beside:
            yield Case(line.model, where, None, "no such setting ran the same problem with as many workers")


def _any(declared: Declared, where: str, lines: Sequence[Line], rival: Line, rivals: Sequence[Line]) -> Case:
    """Whether any of these lines is faster than the rival: the one with the fewest servers that wins, else the best."""
    against = f"against {_place(declared, rival, [each for each in rivals if each.family == rival.family])}"
    if not lines:
        return Case(rival.model, where, None, "it did not run with as many workers", None, against)
    found = [(line, *_compared(line, rival)) for line in sorted(lines, key=lambda line: line.servers)]
    best = max(found, key=lambda each: each[3])
    shown = next((each for each in found if each[1]), best)
    holds = True if shown[1] else None if any(each[1] is None for each in found) else False
    start = "already with" if shown[1] else "at best, with"
    which = count(shown[0].servers, "server") if shown[0].servers else _place(declared, shown[0], lines)
    return Case(rival.model, where, holds, f"{start} {which}: {shown[2]}", best[3], against)


def _common(line: Line, rival: Line) -> int:
    """The most workers that both ran with, more than one."""
    return max((n for n in line.groups if n > 1 and n in rival.groups), default=0)


def _compared(line: Line, rival: Line) -> tuple[bool | None, str, float]:
    """Whether a line is faster than its rival, why, and how many times as fast it is."""
    workers = _common(line, rival)
    one, other = line.groups[workers], rival.groups[workers]
    ratio, nodes = faster(one, other), [each.setting.get("nodes") for each in (one, other)]
    beside = "" if nodes[0] == nodes[1] else f", on {nodes[0]} nodes instead of {nodes[1]}"
    speed = f"with {count(workers, 'worker')} {line.strategy} is {within(allow(ratio, one, other))} times as fast as"
    why = f"{speed} {rival.strategy}{beside}{_but(one, other)}"
    return beats(ratio, one, other), why, ratio.value
