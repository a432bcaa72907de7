"""The claims of a thesis about parameter servers and rings, each with a verdict that is computed from the runs.

Dongwei Shi, Comparison of Distributed Training Architecture for Convolutional Neural Network in Cloud, 2019, trained
with one server. Each claim is checked for every model and number of servers, to show where it stops holding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.analysis.claim_rivals import ring_beats_server, several_servers_win
from paceline.analysis.claim_traffic import THESIS, ring_traffic, server_traffic
from paceline.analysis.lines import Line, all_lines, faster
from paceline.analysis.scaling import Curve, Group
from paceline.analysis.statistics import Interval
from paceline.analysis.trust import allow, decide, doubt
from paceline.analysis.verdicts import FAILS, HOLDS, IN_PART, UNTOLD, Case, Claim, Found, claim, fewest_runs, place
from paceline.analysis.wording import count, percent, percents, within
from paceline.collectives.ring import RING

__all__ = ["FAILS", "HOLDS", "IN_PART", "UNTOLD", "Case", "Claim", "claims"]

LEVEL = 0.25  # of the ideal gain: a smaller gain is levelling off
PROPORTIONAL = 0.7  # efficiency


def claims(groups: Sequence[Group], curves: Iterable[Curve]) -> list[Claim]:
    """All claims, if a study has both parameter servers and rings; else none."""
    every = all_lines(groups)
    served = [line for line in every if line.servers]
    rings = [line for line in every if line.method.averaging == RING.name]
    if not served or not rings:
        return []
    made = [
        _levels_off(_with_a_course(served)),
        _proportional(_with_a_course(rings), list(curves)),
        server_traffic(_with_a_course(served)),
        ring_traffic(_with_a_course(rings)),
        ring_beats_server(served, rings),
    ]
    several = [line for line in served if line.servers > 1]
    return [*made, several_servers_win(several, rings)] if several else made


def _with_a_course(lines: Sequence[Line]) -> list[Line]:
    """Without lines that have one number of workers, for models that have longer lines."""
    models = {line.model for line in lines if len(line.groups) > 1}
    return [line for line in lines if len(line.groups) > 1 or line.model not in models]


def _open(*groups: Group) -> str:
    """Why it is undecided, as the end of a sentence."""
    found = doubt(*groups)
    return f"; {found}" if found else ""


def _levels_off(served: Sequence[Line]) -> Claim:
    found = []
    for line in served:
        where, most = place(line, served), max(line.groups)
        fewer = [n for n in line.groups if n < most]
        if not fewer:
            why = f"only {count(most, 'worker')} ran: a trend needs at least two numbers of workers"
            found.append(Found(line.model, line.servers, where, None, why))
            continue
        half = min(fewer, key=lambda n: (abs(n - most / 2), n))
        pair, ideal = (line.groups[most], line.groups[half]), most / half
        gain = allow(faster(*pair), *pair)
        part = Interval(*((value - 1) / (ideal - 1) for value in (gain.value, gain.low, gain.high)))
        reaches = decide(part, LEVEL, *pair)
        why = (
            f"from {half} to {count(most, 'worker')} it is {within(gain)} times as fast, where {ideal:.3g} would "
            f"be ideal: {percents(part)} of the ideal gain{_open(*pair)}"
        )
        holds = None if reaches is None else not reaches
        found.append(Found(line.model, line.servers, where, holds, why, part.value))
    text = (
        f"The speedup of a parameter server levels off: from about half of the workers to the most, the gain is less "
        f"than {percent(LEVEL)} of the ideal gain."
    )
    return claim("server-levels-off", text, f"{THESIS}, of Figure 4.3", found, fewest_runs(served),
                 "Gain of the last workers, relative to the ideal gain", percent)  # fmt: skip


def _proportional(rings: Sequence[Line], curves: Sequence[Curve]) -> Claim:
    found = []
    for line in rings:
        where, most = place(line, rings), max(line.groups)
        beside = _baseline(line, curves)
        if beside is None:
            why = f"only {count(most, 'worker')} ran: there is no smaller number to compare with"
            found.append(Found(line.model, 0, where, None, why))
            continue
        pair, ideal = (line.widest, beside), most / beside.workers
        gain = allow(faster(*pair), *pair)
        efficiency = Interval(gain.value / ideal, gain.low / ideal, gain.high / ideal)
        why = (
            f"{count(most, 'worker')} reach {percents(efficiency)} of the ideal speed, relative to {beside.workers}"
            f"{_open(*pair)}"
        )
        found.append(Found(line.model, 0, where, decide(efficiency, PROPORTIONAL, *pair), why, efficiency.value))
    text = (
        f"The speedup of a ring is roughly proportional to its nodes: with the most workers, the efficiency is "
        f"at least {percent(PROPORTIONAL)}."
    )
    return claim("ring-proportional", text, f"{THESIS}, of Figure 4.4", found, fewest_runs(rings),
                 "Efficiency with the most workers", percent)  # fmt: skip


def _baseline(line: Line, curves: Sequence[Curve]) -> Group | None:
    """The baseline of its curve, or its own setting with the fewest workers; None if there are no fewer."""
    own = [curve for curve in curves if curve.kind == line.kind and any(p.group is line.widest for p in curve.points)]
    beside = own[0].baseline if own else line.groups[min(line.groups)]
    return beside if beside.workers < max(line.groups) else None
