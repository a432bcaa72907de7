"""The claims of a thesis on parameter servers and rings, each with a verdict that is computed from the runs.

Dongwei Shi, Comparison of Distributed Training Architecture for Convolutional Neural Network in Cloud, 2019, trained
with one server. Each claim is asked of every model and every number of servers, so that it is seen where it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.analysis.claim_traffic import Moved, moved
from paceline.analysis.compare import BETWEEN_RUNS
from paceline.analysis.lines import ENOUGH_RUNS, MATTERS, Line, all_lines, certain, faster, name, told
from paceline.analysis.scaling import Curve, Group, nodes_of
from paceline.analysis.statistics import Interval
from paceline.analysis.wording import count, listing, number, percent, percents, sentence, size, within

HOLDS, FAILS, IN_PART, UNTOLD = "holds", "fails", "holds in part", "cannot be told"
WORDS = {True: HOLDS, False: FAILS, None: UNTOLD}
THESIS = "D. Shi, 2019 (thesis), chapter 5"

LEVEL = 0.25  # of the speed that more workers would ideally add: less is levelling off
PROPORTIONAL = 0.7  # of the ideal speedup
FIT = 0.15  # how far from a law a number may be
CONSTANT = 0.25  # how much a constant may change
ENOUGH = f"{percent(MATTERS)} or more ({percent(BETWEEN_RUNS)} where there are fewer than {ENOUGH_RUNS} runs)"
OVERHEAD = 0.1  # headers and acknowledgements, beside the gradient's own bytes


@dataclass(frozen=True)
class Case:
    """One model and number of servers: whether the claim holds there, or None where that cannot be told."""

    label: str
    holds: bool | None
    why: str


@dataclass(frozen=True)
class Claim:
    name: str
    text: str  # with its threshold
    source: str
    verdict: str  # holds, fails, holds in part, cannot be told
    why: str
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class _Found:
    """A case before it has its label: the model, what else tells it apart, and the number that decided."""

    model: str
    rest: str
    holds: bool | None
    why: str
    figure: float | None = None


def claims(groups: Sequence[Group], curves: Iterable[Curve]) -> list[Claim]:
    """All of them, of a study that has both parameter servers and rings; of others none."""
    every = all_lines(groups)
    served, rings = [line for line in every if line.servers], [line for line in every if line.strategy == "ring"]
    if not served or not rings:
        return []
    curves = list(curves)
    made = [
        _levels_off(_with_a_course(served)),
        _proportional(_with_a_course(rings), curves),
        _server_traffic(_with_a_course(served)),
        _ring_traffic(_with_a_course(rings)),
        _ring_beats_server(served, rings),
    ]
    several = [line for line in served if line.servers > 1]
    return [*made, _several_servers_win(several, rings)] if several else made


def _claim(name: str, text: str, source: str, found: Sequence[_Found], what: str, form: Callable[[float], str],
           runs: int) -> Claim:  # fmt: skip
    """With a verdict over all cases, and why: the extremes of the number that decided, and where it holds."""
    cases = tuple(Case(", ".join(w for w in (f.model, f.rest) if w), f.holds, f.why) for f in found)
    known = {case.holds for case in cases} - {None}
    verdict = UNTOLD if not known else IN_PART if len(known) == 2 else WORDS[known.pop()]
    few = f" It rests on {count(runs, 'run')} of each setting." if runs < ENOUGH_RUNS else ""
    if len(cases) == 1:
        return Claim(name, text, source, verdict, sentence(cases[0].why) + "." + few, cases)
    figures = sorted((f.figure, case.label) for f, case in zip(found, cases, strict=True) if f.figure is not None)
    extremes = ""
    if len(figures) > 1:
        (low, low_label), (high, high_label) = figures[0], figures[-1]
        extremes = f"{what}: from {form(low)} ({low_label}) to {form(high)} ({high_label}). "
    return Claim(name, text, source, verdict, extremes + _where(found) + few, cases)


def _where(found: Sequence[_Found]) -> str:
    """Where it holds and where not, by what tells the cases apart, and by model."""
    clauses = []
    for rest in dict.fromkeys(f.rest for f in found):
        members = [f for f in found if f.rest == rest]
        said = []
        for holds, word in WORDS.items():
            models = [f.model for f in members if f.holds is holds]
            if models:
                everyone = len(models) == len(members) > 2
                said.append(f"{word} for {'all ' + str(len(models)) + ' models' if everyone else listing(models)}")
        clauses.append(f"{rest}: {', '.join(said)}" if rest else ", ".join(said))
    text = "; ".join(clauses)
    return f"{text if found[0].rest else sentence(text)}."


def _runs(lines: Iterable[Line]) -> int:
    return min(len(one.runs) for line in lines for one in line.groups.values())


def _rest(line: Line, among: Sequence[Line]) -> str:
    return name(line, among, without=("model",), always=("servers",))


def _decide(found: Interval, least: float, *groups: Group) -> bool | None:
    """Whether a number is at least so much; None if its interval has both, or steps are too few to have one."""
    return None if found.low < least <= found.high or not all(map(certain, groups)) else found.value >= least


def _sure(*groups: Group) -> str:
    return "" if all(map(certain, groups)) else "; its runs have too few steps to be sure"


def _with_a_course(lines: Sequence[Line]) -> list[Line]:
    """Without those of one number of workers, of models that have others: servers are often added at the widest."""
    models = {line.model for line in lines if len(line.groups) > 1}
    return [line for line in lines if len(line.groups) > 1 or line.model not in models]


def _levels_off(served: Sequence[Line]) -> Claim:
    found = []
    for line in served:
        rest, most = _rest(line, served), max(line.groups)
        fewer = [n for n in line.groups if n < most]
        if not fewer:
            why = f"only {count(most, 'worker')} ran: one number of workers has no course"
            found.append(_Found(line.model, rest, None, why))
            continue
        half = min(fewer, key=lambda n: (abs(n - most / 2), n))
        gain, ideal = faster(line.groups[most], line.groups[half]), most / half
        part = Interval(*((value - 1) / (ideal - 1) for value in (gain.value, gain.low, gain.high)))
        reaches = _decide(part, LEVEL, line.groups[most], line.groups[half])
        why = (
            f"from {half} to {count(most, 'worker')} it is {within(gain)} times as fast, where {ideal:.3g} would "
            f"be ideal: {percent(part.value)} of what they could add{_sure(line.groups[most], line.groups[half])}"
        )
        found.append(_Found(line.model, rest, None if reaches is None else not reaches, why, part.value))
    text = (
        f"The speedup of a parameter server levels off: from half of the workers (or the number nearest to it) to the "
        f"most, it gains less than {percent(LEVEL)} of the speed that they could add."
    )
    what = "Of the speed that they could add, the last workers add"
    return _claim("server-levels-off", text, f"{THESIS}, of Figure 4.3", found, what, percent, _runs(served))


def _proportional(rings: Sequence[Line], curves: Sequence[Curve]) -> Claim:
    found = []
    for line in rings:
        rest, most = _rest(line, rings), max(line.groups)
        points = [p for curve in curves if curve.kind == line.kind for p in curve.points if p.group is line.widest]
        efficiency, beside = (points[0].efficiency, 1) if points else (None, min(line.groups))
        if most == 1 or (efficiency is None and beside == most):
            why = f"only {count(most, 'worker')} ran: there is no smaller number to set it beside"
            found.append(_Found(line.model, rest, None, why))
            continue
        if efficiency is None:
            gain, ideal = faster(line.widest, line.groups[beside]), most / beside
            efficiency = Interval(gain.value / ideal, gain.low / ideal, gain.high / ideal)
        why = f"{count(most, 'worker')} have {percents(efficiency)} of the ideal speed, beside {beside}"
        why += _sure(line.widest)
        found.append(_Found(line.model, rest, _decide(efficiency, PROPORTIONAL, line.widest), why, efficiency.value))
    text = (
        f"The speedup of a ring is roughly proportional to its nodes: with the most workers it has at least "
        f"{percent(PROPORTIONAL)} of the ideal."
    )
    what = "Efficiency with the most workers"
    return _claim("ring-proportional", text, f"{THESIS}, of Figure 4.4", found, what, percent, _runs(rings))


def _server_traffic(served: Sequence[Line]) -> Claim:
    found = []
    for line in served:
        rest = _rest(line, served)
        data = moved(line)
        if isinstance(data, str):
            found.append(_Found(line.model, rest, None, data))
            continue
        off = data.misfit(lambda n: n)
        few, most = min(data.bytes), max(data.bytes)
        grows = data.bytes[most] / data.bytes[few]
        why = (
            f"an update moves {size(data.bytes[few])} through the busiest server with {count(few, 'worker')} and "
            f"{size(data.bytes[most])} with {most} ({data.how}): {number(grows)} times as much for "
            f"{most / few:.3g} times the workers, at most {percent(off)} off a straight line"
        )
        found.append(_Found(line.model, rest, off <= FIT, why, off))
    text = (
        f"Traffic at the parameter server grows in proportion to the workers: bytes in and out an update are within "
        f"{percent(FIT)} of a straight line through zero."
    )
    what = "Farthest from that line"
    return _claim("server-traffic-grows", text, f"{THESIS}, of Figure 5.1", found, what, percent, _runs(served))


def _ring_traffic(rings: Sequence[Line]) -> Claim:
    found = []
    for line in rings:
        rest = _rest(line, rings)
        readings = [", ".join(w for w in (rest, reading) if w) for reading in ("to the letter", "by 2(n-1)/n")]
        data = moved(line)
        if isinstance(data, str):
            found.append(_Found(line.model, rest, None, data))
            continue
        few, most = min(data.bytes), max(data.bytes)
        change = data.bytes[most] / data.bytes[few]
        why = (
            f"an update moves {_sized(data, few)} through each node with {count(few, 'worker')} and "
            f"{_sized(data, most)} with {most} ({data.how}): {number(change)} times as much"
        )
        found.append(_Found(line.model, readings[0], abs(change - 1) <= CONSTANT, why, change))
        off = data.misfit(lambda n: (n - 1) / n)
        bound = 4 * data.gradient * (1 + OVERHEAD) if data.gradient else float("inf")
        why = (
            f"at most {percent(off)} off 2(n-1)/n of the gradient each way; the most is "
            f"{_sized(data, max(data.bytes, key=lambda n: data.bytes[n]))}"
        )
        found.append(_Found(line.model, readings[1], off <= FIT and max(data.bytes.values()) <= bound, why))
    text = (
        f"Traffic of a ring's node stays constant as workers are added. To the letter: bytes in and out an update "
        f"change by at most {percent(CONSTANT)} from the fewest workers to the most. By the algorithm: they follow "
        f"2(n-1)/n of the gradient each way within {percent(FIT)}, and so never pass four times the gradient in all."
    )
    what = "With the most workers, against the fewest"
    return _claim("ring-traffic-constant", text, f"{THESIS}, of Figures 4.15 and 4.18", found, what,
                  lambda value: f"{number(value)} times", _runs(rings))  # fmt: skip


def _sized(data: Moved, workers: int) -> str:
    value = data.bytes[workers]
    return size(value) + (f" ({number(value / data.gradient)} times the gradient)" if data.gradient else "")


@dataclass(frozen=True)
class _Beside:
    """A line of servers and the ring of the same problem, with as many workers as both ran with."""

    line: Line
    workers: int
    ratio: Interval  # the ring's speed, of the server's
    ring_wins: bool | None
    nodes: tuple[int, int]

    @property
    def why(self) -> str:
        nodes = "" if self.nodes[0] == self.nodes[1] else f", on {self.nodes[0]} nodes beside {self.nodes[1]}"
        return f"with {count(self.workers, 'worker')} the ring is {within(self.ratio)} times as fast{nodes}"


def _beside(line: Line, rings: Sequence[Line]) -> _Beside | None:
    """None where no ring of the same problem ran with as many workers, more than one."""
    for ring in rings:
        common = [n for n in line.groups if n > 1 and n in ring.groups]
        if ring.family == line.family and common:
            one, other = ring.groups[max(common)], line.groups[max(common)]
            ratio = faster(one, other)
            nodes = nodes_of(one.first), nodes_of(other.first)
            return _Beside(line, max(common), ratio, told(ratio, one, other), nodes)
    return None


def _ring_beats_server(served: Sequence[Line], rings: Sequence[Line]) -> Claim:
    found = []
    for line in served:
        pair, rest = _beside(line, rings), _rest(line, served)
        if pair is None:
            why = "no ring of the same problem ran with as many workers"
            found.append(_Found(line.model, rest, None, why))
        else:
            found.append(_Found(line.model, rest, pair.ring_wins, pair.why, pair.ratio.value))
    text = (
        "A ring scales out better than parameter servers: with the most workers that both ran with, it is faster, "
        f"beyond doubt and by {ENOUGH}. Servers are nodes beside the workers."
    )
    return _claim("ring-beats-server", text, THESIS, found, "The ring's speed, of the server's",
                  lambda value: f"{number(value)} times", _runs([*served, *rings]))  # fmt: skip


def _several_servers_win(several: Sequence[Line], rings: Sequence[Line]) -> Claim:
    by_problem: dict[tuple[str, str], list[Line]] = {}
    for line in several:
        rest = name(line, several, without=("model", "servers"))
        by_problem.setdefault((line.model, rest), []).append(line)
    found = []
    for (model, rest), members in by_problem.items():
        pairs = [pair for line in members if (pair := _beside(line, rings))]
        if not pairs:
            found.append(_Found(model, rest, None, "no ring of the same problem ran with as many workers"))
            continue
        wins = sorted((p for p in pairs if p.ring_wins is False), key=lambda p: p.line.servers)
        best = min(pairs, key=lambda p: p.ratio.value)
        shown = wins[0] if wins else best
        holds = True if wins else None if any(p.ring_wins is None for p in pairs) else False
        start = "the fewest that win are" if wins else "at best, with"
        why = f"{start} {count(shown.line.servers, 'server')}: {shown.why}"
        found.append(_Found(model, rest, holds, why, 1 / best.ratio.value))
    text = (
        "Against the thesis: with several servers, which it did not try, parameter servers overtake the ring; with "
        "the most workers that both ran with, some number of servers is faster, beyond doubt and by "
        f"{ENOUGH}."
    )
    return _claim("several-servers-win", text, "Y. Jiang et al., BytePS, OSDI 2020", found,
                  "The best servers' speed, of the ring's", lambda value: f"{number(value)} times",
                  _runs([*several, *rings]))  # fmt: skip
