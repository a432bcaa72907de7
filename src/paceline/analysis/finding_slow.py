"""What the steps of each setting wait for, and which rank is slow: the verdict that its runs ended with, once more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline.analysis.finding_many import Rows
from paceline.analysis.runs import Run
from paceline.analysis.scaling import Group, disturbed
from paceline.analysis.slow import LAST_STEPS, Judgement, judge
from paceline.analysis.wording import sentence


def verdicts(groups: Sequence[Group]) -> tuple[str, Rows]:
    """A sentence about one setting with several workers, or a table of several; "" if no run is long enough."""
    several = [one for one in groups if one.workers > 1 and not disturbed(one)]
    known = [(one.label(groups), found) for one in several if (found := _of_group(one))]
    if len(known) == 1:
        (name, (said, advice)) = known[0]
        return f"The steps of {name}: {said}. Try {advice}.", ()
    if not known:
        return "", ()
    rows = [(name, sentence(said), advice) for name, (said, advice) in known]
    return "What the steps of each setting wait for, and what to try:", (("setting", "verdict", "try"), *rows)


def _of_group(one: Group) -> tuple[str, str] | None:
    """What most of its runs say, and the advice; in how many, if they differ."""
    found = [judged for run in one.runs if (judged := _of_run(run))]
    if not found:
        return None
    (most, times), *others = Counter((each.kind, each.rank) for each in found).most_common()
    chosen = next(each for each in found if (each.kind, each.rank) == most)
    return chosen.sentence + (f" (in {times} of {len(found)} runs)" if others else ""), chosen.advice


def _of_run(run: Run) -> Judgement | None:
    hosts = {row["rank"]: row["host"] for row in run.environment.get("ranks", [])}
    return judge({rank: steps[-LAST_STEPS:] for rank, steps in run.steps.items()}, hosts, run.summary)
