"""Two settings side by side: what differs between them, and whether one is really faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.analysis.checks import RunWarning, check_run
from paceline.analysis.scaling import Group
from paceline.analysis.setting import MACHINE, NETWORK
from paceline.analysis.statistics import ENOUGH_SAMPLES, Interval, ratio

# Runs of one setting differ by this much on machines that are shared; of single runs, less proves nothing.
BETWEEN_RUNS = 0.1


@dataclass(frozen=True)
class Difference:
    """A value that is not the same in both; `where` it is: spec or environment."""

    where: str
    name: str
    first: Any
    second: Any


@dataclass(frozen=True)
class Comparison:
    differences: tuple[Difference, ...]
    faster: Interval  # the second's images/s over the first's
    verdict: str
    warnings: tuple[RunWarning, ...]


def compare(first: Group, second: Group) -> Comparison:
    one, two = first.setting, second.setting
    here = {name for each in (one, two) for name in each.only(MACHINE, NETWORK).facts}
    different = tuple(
        Difference("environment" if name in here else "spec", name, one.plain(name), two.plain(name))
        for name in one.difference(two)
        if name != "lab"
    )
    faster = ratio(first.series, second.series)
    warnings = [warning for group in (first, second) for run in group.runs for warning in check_run(run)]
    fewest = min(len(first.runs), len(second.runs))
    disturbed = any(run.disturbed for group in (first, second) for run in group.runs)
    too_short = first.too_short or second.too_short
    return Comparison(
        different, faster, verdict(faster, fewest, disturbed=disturbed, too_short=too_short), tuple(warnings)
    )


def verdict(faster: Interval, runs: int, *, disturbed: bool = False, too_short: bool = False) -> str:
    """Whether the difference is real, in a sentence."""
    how = f"{faster.value:.3g} times as fast ({faster.low:.3g} to {faster.high:.3g})"
    if disturbed:
        return (
            f"no verdict, because other programs disturbed these runs: the second was measured {how}; repeat both on a "
            f"machine that does nothing else"
        )
    if too_short:
        return (
            f"no verdict, because these runs are too short: the second was measured {how}; make {ENOUGH_SAMPLES} steps "
            f"or more after warm-up, and several times as many where neighbouring steps are alike"
        )
    if not faster.excludes(1.0):
        return f"no difference in speed that can be told from chance: the second is {how}"
    if runs == 1 and abs(faster.value - 1) < BETWEEN_RUNS:
        return (
            f"the second is {how}, within these two runs; but runs of one setting differ by as much: it is not shown "
            f"to be real; repeat both"
        )
    which = "faster" if faster.value > 1 else "slower"
    sure = "" if runs > 2 else "; it rests on few runs: 3 of each would say more"
    return f"the second is really {which}: {how}{sure}"
