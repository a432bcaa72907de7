"""Claims, their cases, and the verdict over all cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.analysis.lines import ENOUGH_RUNS
from paceline.analysis.wording import count, listing, sentence

SUPPORTED, CONTRADICTED, IN_PART, OPEN = "supported", "contradicted", "supported in part", "undecided"
WORDS = {True: SUPPORTED, False: CONTRADICTED, None: OPEN}
MANY = 2  # if more cases agree, they are not listed


@dataclass(frozen=True)
class Judged:
    """Whether a claim holds somewhere, or None where the runs cannot decide; why; and the number that decided."""

    holds: bool | None
    why: str
    figure: float | None = None


@dataclass(frozen=True)
class Case:
    """A claim asked of one model, and of one line of settings, which `place` names."""

    model: str
    place: str
    holds: bool | None
    why: str
    figure: float | None = None
    reading: str = ""  # interpretation of the claim; each is decided separately

    @property
    def name(self) -> str:
        return ", ".join(word for word in (self.model, self.place, self.reading) if word)


@dataclass(frozen=True)
class Claim:
    name: str
    text: str
    source: str
    verdict: str
    why: str
    cases: tuple[Case, ...]


def claim(name: str, text: str, source: str, cases: Sequence[Case], runs: int, what: str,
          form: Callable[[float], str]) -> Claim:  # fmt: skip
    """A claim with the verdict over all cases, and why: the extremes of the deciding number, and where it holds."""
    known = [case.holds for case in cases if case.holds is not None]
    verdict = OPEN if not known else IN_PART if len(set(known)) == 2 else WORDS[known[0]]
    why = ""
    if known and len(known) < len(cases) and verdict != IN_PART:
        why = f"{sentence(verdict)} in {len(known)} of {len(cases)} cases; the others are undecided. "
        most = len(known) * 2 > len(cases)
        verdict = IN_PART if verdict == SUPPORTED else CONTRADICTED if most else OPEN
    why += sentence(cases[0].why) + "." if len(cases) == 1 else _extremes(cases, what, form) + _where(cases)
    if runs < ENOUGH_RUNS:
        why += f" Based on {count(runs, 'run')} of each setting: speeds are taken as accurate to 10 %."
    return Claim(name, text, source, verdict, why, tuple(cases))


def _extremes(found: Sequence[Case], what: str, form: Callable[[float], str]) -> str:
    figures = sorted((each.figure, each.name) for each in found if each.figure is not None)
    if len(figures) < 2 or not what:
        return ""
    (low, low_label), (high, high_label) = figures[0], figures[-1]
    return f"{what}: from {form(low)} ({low_label}) to {form(high)} ({high_label}). "


def _where(found: Sequence[Case]) -> str:
    """Where it holds and where not: a sentence for each interpretation."""
    said = []
    for reading in dict.fromkeys(each.reading for each in found):
        members = [each for each in found if each.reading == reading]
        text = _by_place(members)
        named = bool(reading) or text.startswith(tuple(WORDS.values()))  # others start with a strategy's name
        said.append(sentence(f"{reading}: {text}." if reading else f"{text}.") if named else f"{text}.")
    return " ".join(said)


def _by_place(members: Sequence[Case]) -> str:
    """By what tells the cases apart, and by model."""
    places = list(dict.fromkeys(each.place for each in members))
    if len({each.holds for each in members}) == 1 and len(members) > MANY and len(places) > 1:
        return f"{WORDS[members[0].holds]} in all {len(members)} cases"
    said = [(place, _by_model([each for each in members if each.place == place])) for place in places]
    return "; ".join(f"{place}: {text}" if place else text for place, text in said)


def _by_model(here: Sequence[Case]) -> str:
    said = []
    for holds, word in WORDS.items():
        models = list(dict.fromkeys(each.model for each in here if each.holds is holds))
        if models:
            everyone = len(models) == len(here) > MANY
            said.append(f"{word} for {f'all {len(models)} models' if everyone else listing(models)}")
    return ", ".join(said)
