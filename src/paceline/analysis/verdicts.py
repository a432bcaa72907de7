"""Claims, their cases, and the verdict over all cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.analysis.lines import ENOUGH_RUNS, Line
from paceline.analysis.trust import asynchronous
from paceline.analysis.wording import count, listing, numbers, sentence
from paceline.collectives.ring import RING

HOLDS, FAILS, IN_PART, UNTOLD = "holds", "fails", "holds in part", "undecided"
WORDS = {True: HOLDS, False: FAILS, None: UNTOLD}
MANY = 2  # if more cases agree, they are not listed


@dataclass(frozen=True)
class Case:
    """One model and number of servers: whether the claim holds there, or None if that is undecided."""

    label: str
    holds: bool | None
    why: str


@dataclass(frozen=True)
class Claim:
    name: str
    text: str  # with its threshold
    source: str
    verdict: str  # holds, fails, holds in part, undecided
    why: str
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Found:
    """A case by its parts, and the number that decided it."""

    model: str
    servers: int  # 0: none, or all numbers of them
    place: str  # what else distinguishes it
    holds: bool | None
    why: str
    figure: float | None = None
    reading: str = ""  # interpretation of the claim; each is decided separately

    @property
    def name(self) -> str:
        servers = count(self.servers, "server") if self.servers else ""
        return ", ".join(word for word in (self.model, servers, self.place, self.reading) if word)

    @property
    def case(self) -> Case:
        return Case(self.name, self.holds, self.why)


def place(line: Line, among: Sequence[Line]) -> str:
    """What tells a line from these, beside its model and servers; links by the real ones that they stand for."""
    always = ["strategy"] if asynchronous(line.widest) else []
    ways = {str(each.widest.setting.get("overlap")) for each in among if each.strategy == line.strategy}
    always += ["overlap"] if line.method.averaging == RING.name and len(ways) > 1 else []
    return line.label(among, without=("model", "servers"), always=always)


def fewest_runs(lines: Iterable[Line]) -> int:
    return min(len(one.runs) for line in lines for one in line.groups.values())


def claim(name: str, text: str, source: str, found: Sequence[Found], runs: int, what: str = "",
          form: Callable[[float], str] = str) -> Claim:  # fmt: skip
    """A claim with the verdict over all cases, and why: the extremes of the deciding number, and where it holds."""
    cases = tuple(each.case for each in found)
    known = [case.holds for case in cases if case.holds is not None]
    verdict = UNTOLD if not known else IN_PART if len(set(known)) == 2 else WORDS[known[0]]
    why = ""
    if known and len(known) < len(cases) and verdict != IN_PART:
        why = f"{sentence(verdict)} in {len(known)} of {len(cases)} cases; the others are undecided. "
        most = len(known) * 2 > len(cases)
        verdict = IN_PART if verdict == HOLDS else FAILS if most else UNTOLD
    why += sentence(cases[0].why) + "." if len(cases) == 1 else _extremes(found, what, form) + _where(found)
    if runs < ENOUGH_RUNS:
        why += f" Based on {count(runs, 'run')} of each setting: speeds are taken as accurate to 10 %."
    return Claim(name, text, source, verdict, why, cases)


def _extremes(found: Sequence[Found], what: str, form: Callable[[float], str]) -> str:
    figures = sorted((each.figure, each.name) for each in found if each.figure is not None)
    if len(figures) < 2:
        return ""
    (low, low_label), (high, high_label) = figures[0], figures[-1]
    return f"{what}: from {form(low)} ({low_label}) to {form(high)} ({high_label}). "


def _where(found: Sequence[Found]) -> str:
    """Where it holds and where not: a sentence for each interpretation."""
    said = []
    for reading in dict.fromkeys(each.reading for each in found):
        members = [each for each in found if each.reading == reading]
        text = _by_place(members)
        said.append(sentence(f"{reading}: {text}." if reading else f"{text}."))
    return " ".join(said)


def _by_place(members: Sequence[Found]) -> str:
    """By place and model; numbers of servers with the same result are in one clause."""
    places = dict.fromkeys((each.place, each.servers) for each in members)
    if len({each.holds for each in members}) == 1 and len(members) > MANY and len(places) > 1:
        return f"{WORDS[members[0].holds]} in all {len(members)} cases"
    clauses: dict[tuple[str, str], set[int]] = {}
    for where, servers in places:
        here = [each for each in members if (each.place, each.servers) == (where, servers)]
        clauses.setdefault((where, _by_model(here)), set()).add(servers)
    texts = []
    for (where, said), servers_of in clauses.items():
        words = [numbers(servers_of, "server") if servers_of != {0} else "", where]
        start = ", ".join(word for word in words if word)
        texts.append(f"{start}: {said}" if start else said)
    return "; ".join(texts)


def _by_model(here: Sequence[Found]) -> str:
    said = []
    for holds, word in WORDS.items():
        models = list(dict.fromkeys(each.model for each in here if each.holds is holds))
        if models:
            everyone = len(models) == len(here) > MANY
            said.append(f"{word} for {f'all {len(models)} models' if everyone else listing(models)}")
    return ", ".join(said)
