"""Two settings compared: what differs between them, and whether one is significantly faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.analysis.checks import RunWarning, check_run
from paceline.analysis.scaling import Group
from paceline.analysis.setting import MACHINE, NETWORK
from paceline.analysis.statistics import ENOUGH_SAMPLES, Interval, ratio

# On shared machines runs of one setting vary by this much: a smaller difference of single runs is not significant.
BETWEEN_RUNS = 0.1


@dataclass(frozen=True)
class Difference:
    """A value that differs; `where` is spec or environment."""

    where: str
    name: str
    first: Any
    second: Any


@dataclass(frozen=True)
class Comparison:
    differences: tuple[Difference, ...]
    faster: Interval  # the second's samples/s over the first's
    verdict: str
    warnings: tuple[RunWarning, ...]
    runs: int  # of the setting that has fewer
    disturbed: bool
    too_short: bool


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
    said = verdict(faster, fewest, disturbed=disturbed, too_short=too_short)
    return Comparison(different, faster, said, tuple(warnings), fewest, disturbed, too_short)


@dataclass(frozen=True)
class Slower:
    """Whether the second is slower than the first by more than so many percent: None if the runs do not tell."""

    percent: float
    is_slower: bool | None
    why: str


def slower(found: Comparison, percent: float) -> Slower:
    """Slower means that the whole 95 % interval of the ratio of samples/s is below the limit.

    Single runs do not tell how much runs differ: the interval then has to be below the limit by BETWEEN_RUNS, too.
    """
    limit, faster = 1 - percent / 100, found.faster
    proof = limit * (1 - BETWEEN_RUNS) if found.runs == 1 else limit
    how = f"{faster.value:.3g} times as fast ({faster.low:.3g} to {faster.high:.3g}), and the limit is {limit:.3g}"
    if found.disturbed or found.too_short:
        what = "other programs disturbed these runs" if found.disturbed else "these runs are too short"
        return Slower(percent, None, f"cannot tell whether the second is more than {percent:g} % slower: {what}")
    if faster.high < proof:
        return Slower(percent, True, f"the second is more than {percent:g} % slower: it is {how}")
    if faster.low >= limit:
        return Slower(percent, False, f"the second is not more than {percent:g} % slower: it is {how}")
    few = "one run of each does not tell how much runs differ" if faster.high < limit else f"it is {how}"
    return Slower(percent, None, f"cannot tell whether the second is more than {percent:g} % slower: {few}; "
                  "make more runs of both, or longer ones")  # fmt: skip


def verdict(faster: Interval, runs: int, *, disturbed: bool = False, too_short: bool = False) -> str:
    """Whether the difference in speed is significant, in a sentence."""
    how = f"{faster.value:.3g} times as fast ({faster.low:.3g} to {faster.high:.3g})"
    if disturbed:
        return (
            f"no verdict, because other programs disturbed these runs: the second was measured {how}; repeat both on "
            f"an idle machine"
        )
    if too_short:
        return (
            f"no verdict, because these runs are too short: the second was measured {how}; run at least "
            f"{ENOUGH_SAMPLES} steps after warm-up, and several times as many if step times are autocorrelated"
        )
    if not faster.excludes(1.0):
        return f"no significant difference in speed: the second is {how}"
    if runs == 1 and abs(faster.value - 1) < BETWEEN_RUNS:
        return (
            f"no significant difference in speed: the second is {how} within these two runs, but runs of one setting "
            f"vary by as much; repeat both"
        )
    which = "faster" if faster.value > 1 else "slower"
    sure = "" if runs > 2 else "; this is based on few runs: make 3 of each"
    return f"the second is significantly {which}: {how}{sure}"
