"""Settings by what they train and where: only settings of one problem are compared in speed and accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.lines import ENOUGH_RUNS
from paceline.analysis.scaling import Curve, Group, Point
from paceline.analysis.setting import MACHINE, NETWORK, shared
from paceline.analysis.wording import count, sentence
from paceline.options import PROBLEM


@dataclass(frozen=True)
class Problem:
    """Settings that can be compared; the label distinguishes it from other problems, and is empty if there are none."""

    label: str
    groups: tuple[Group, ...]
    all_few: bool  # settings of all problems have few runs, which is said once for all of them

    def has(self, one: Group) -> bool:
        return any(one is each for each in self.groups)

    def say(self, text: str) -> str:
        """A sentence about the problem, with its label."""
        return f"{self.label}: {text}" if self.label else sentence(text)

    def few(self, *groups: Group) -> str:
        """A warning if these settings have few runs and others have more."""
        runs = min(len(one.runs) for one in groups)
        if runs >= ENOUGH_RUNS or self.all_few:
            return ""
        return f" It rests on {count(runs, 'run')}{' of each setting' if len(groups) > 1 else ''}."

    def points(self, curves: Sequence[Curve]) -> list[tuple[Curve, Point]]:
        """The points of the curves that belong to its settings with more than one worker."""
        return [(c, p) for c in curves if self.has(c.baseline) for p in c.points if p.workers > 1]


def problems(groups: Sequence[Group]) -> list[Problem]:
    """Problems in the order of their first settings."""
    found: dict[str, list[Group]] = {}
    for one in groups:
        found.setdefault(one.setting.key((PROBLEM, MACHINE), names=("links",)), []).append(one)
    settings = [shared([one.setting for one in members]).only(PROBLEM, MACHINE, NETWORK) for members in found.values()]
    all_few = all(len(one.runs) < ENOUGH_RUNS for one in groups)
    return [Problem(setting.label(settings, always=()), tuple(members), all_few)
            for setting, members in zip(settings, found.values(), strict=True)]  # fmt: skip
