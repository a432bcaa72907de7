"""Whether a ring is faster than parameter servers, and whether several servers are faster than a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.compare import BETWEEN_RUNS
from paceline.analysis.lines import ENOUGH_RUNS, MATTERS, Line, faster
from paceline.analysis.setting import nodes_of
from paceline.analysis.statistics import Interval
from paceline.analysis.trust import allow, beats, doubt
from paceline.analysis.verdicts import Claim, Found, claim, fewest_runs, place
from paceline.analysis.wording import count, number, percent, within

ENOUGH = f"{percent(MATTERS)} or more ({percent(BETWEEN_RUNS)} where there are fewer than {ENOUGH_RUNS} runs)"
NO_RING = "no ring ran the same problem with as many workers"
OVERLAP = (
    "In Paceline, workers of a server send gradients after backward; a ring with overlap averages during backward. "
    "This is a property of the implementation, not of the method: a ring without overlap is the fair comparison, and "
    "if only a ring with overlap ran, part of the difference may come from overlap."
)


@dataclass(frozen=True)
class Beside:
    """A line of servers and a ring of the same problem, with the most workers that both ran with."""

    line: Line
    workers: int
    ratio: Interval  # speed of the ring relative to the servers
    ring_wins: bool | None
    against: str
    beside: str  # numbers of nodes, if they differ
    doubt: str

    @property
    def why(self) -> str:
        doubt = f"; {self.doubt}" if self.doubt else ""
        speed = f"with {count(self.workers, 'worker')} the ring is {within(self.ratio)} times as fast"
        return f"{speed}{self.beside}{doubt}"


def besides(line: Line, rings: Sequence[Line]) -> list[Beside]:
    """One for each ring of the same problem that ran with the same number of workers, more than one."""
    found = []
    same = [ring for ring in rings if ring.family == line.family]
    for ring in same:
        common = [n for n in line.groups if n > 1 and n in ring.groups]
        if common:
            one, other = ring.groups[max(common)], line.groups[max(common)]
            ratio, ours, theirs = faster(one, other), nodes_of(one.first), nodes_of(other.first)
            beside = "" if ours == theirs else f", on {ours} nodes instead of {theirs}"
            found.append(Beside(line, max(common), allow(ratio, one, other), beats(ratio, one, other),
                                _against(ring, max(common), same), beside, doubt(one, other)))  # fmt: skip
    return found


def _against(ring: Line, workers: int, among: Sequence[Line]) -> str:
    """Which ring: with or without overlap, and what else distinguishes it from the others."""
    one = ring.groups[workers]
    chosen = {run.summary.overlap for run in one.runs}
    asked = one.setting.get("overlap")
    how = " with overlap" if chosen == {True} or (chosen == {None} and asked == "on") else ""
    how = " without overlap" if chosen == {False} or (chosen == {None} and asked == "off") else how
    rest = ring.label(among, without=("strategy", "servers", "overlap", "model"))
    return f"against a ring{how}{', ' + rest if rest else ''}"


def ring_beats_server(served: Sequence[Line], rings: Sequence[Line]) -> Claim:
    found = []
    for line in served:
        where, pairs = place(line, served), besides(line, rings)
        if not pairs:
            found.append(Found(line.model, line.servers, where, None, NO_RING))
        for pair in pairs:
            figure = pair.ratio.value
            found.append(Found(line.model, line.servers, where, pair.ring_wins, pair.why, figure, pair.against))
    text = (
        "A ring scales better than parameter servers: with the most workers that both ran with, it is significantly "
        f"faster, by {ENOUGH}. Servers run on additional nodes. {OVERLAP}"
    )
    return claim("ring-beats-server", text, "D. Shi, 2019 (thesis), chapter 5", found, fewest_runs([*served, *rings]),
                 "Speed of the ring relative to the servers", lambda value: f"{number(value)} times")  # fmt: skip


def several_servers_win(several: Sequence[Line], rings: Sequence[Line]) -> Claim:
    """For each problem and ring: whether any number of servers is faster than that ring."""
    problems: dict[tuple[str, str], list[Line]] = {}
    for line in several:
        problems.setdefault((line.model, place(line, several)), []).append(line)
    found = []
    for (model, where), members in problems.items():
        pairs = [pair for line in members for pair in besides(line, rings)]
        if not pairs:
            found.append(Found(model, 0, where, None, NO_RING))
        for against in dict.fromkeys(pair.against for pair in pairs):
            found.append(_won(where, [pair for pair in pairs if pair.against == against]))
    text = (
        "Contrary to the thesis, which used one server, several parameter servers are faster than a ring: with the "
        "most workers that both ran with, some number of servers is significantly faster, by "
        f"{ENOUGH}. As above, a ring without overlap is the fair comparison."
    )
    return claim("several-servers-win", text, "Y. Jiang et al., BytePS, OSDI 2020", found,
                 fewest_runs([*several, *rings]), "Speed of the best servers relative to the ring",
                 lambda value: f"{number(value)} times")  # fmt: skip


def _won(where: str, pairs: Sequence[Beside]) -> Found:
    wins = sorted((pair for pair in pairs if pair.ring_wins is False), key=lambda pair: pair.line.servers)
    best = min(pairs, key=lambda pair: pair.ratio.value)
    shown = wins[0] if wins else best
    holds = True if wins else None if any(pair.ring_wins is None for pair in pairs) else False
    start = "already with" if wins else "at best, with"
    why = f"{start} {count(shown.line.servers, 'server')}: {shown.why}"
    return Found(shown.line.model, 0, where, holds, why, 1 / best.ratio.value, shown.against)
