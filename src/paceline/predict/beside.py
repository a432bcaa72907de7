"""Predictions beside measurements: runs with the most workers, predicted from runs with fewer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.runs import Run
from paceline.data import table as datasets
from paceline.errors import UsageError
from paceline.models import table as models
from paceline.predict.fit import channel_of, fit_probes
from paceline.predict.forecast import Scored, check_cores, score
from paceline.predict.probes import ALIKE, SAME, Probe, checked_probe
from paceline.spec import resolve

# What keeps this short: a report must not take much longer.
MOST_CHANNELS = 3  # collectives, or servers, whose costs are fitted
MOST_RANKS = 8  # of a run that is predicted, or predicted from
DRAWS = 50


@dataclass(frozen=True)
class Beside:
    """Runs of one model, data set and machine, each with its prediction, and why others have none.

    `fewer` are the numbers of workers that predictions were made from.
    """

    name: str
    fewer: tuple[int, ...]
    scored: tuple[Scored, ...]
    left_out: tuple[str, ...] = ()

    @property
    def mean_error(self) -> float:
        return sum(abs(each.error) for each in self.scored) / len(self.scored)

    @property
    def inside(self) -> int:
        return sum(each.inside for each in self.scored)


def predictions_beside(runs: Sequence[Run]) -> list[Beside]:
    """For each model, data set and machine with runs of several numbers of workers. Imports torch if there are any."""
    found, left = list[Beside](), MOST_CHANNELS
    for probes in _alike(runs):
        most = max(probe.workers for probe in probes)
        fewer = [probe for probe in probes if probe.workers < most]
        held, why = _predictable([probe for probe in probes if probe.workers == most], fewer)
        channels = list(dict.fromkeys(channel_of(probe.options) for probe in held))
        fast, slow = channels[:left], channels[left:]
        if slow:
            why.append(f"{', '.join(slow)}: not predicted here, as it takes long; see `paceline predict --score`")
        held = [probe for probe in held if channel_of(probe.options) in fast]
        left -= len(fast)
        if held:
            found.append(_scored(held, fewer, fast, why))
        elif why:
            found.append(Beside(_name(probes), (), (), tuple(why)))
    return found


def _scored(held: Sequence[Probe], fewer: Sequence[Probe], channels: Sequence[str], why: Sequence[str]) -> Beside:
    """Predict from runs with the same collectives, and from those that tell how long computing takes."""
    least = min(probe.workers for probe in fewer)
    used = [probe for probe in fewer if probe.workers == least or channel_of(probe.options) in channels]
    numbers = tuple(sorted({probe.workers for probe in used}))
    try:
        fit = fit_probes(used, DRAWS)
        for run in held:
            check_cores(fit, used, run.spec, run.cluster)
        return Beside(_name(held), numbers, tuple(score(fit, used, held)), tuple(why))
    except UsageError as error:
        return Beside(_name(held), numbers, (), (*why, str(error)))
    except ValueError:  # of NumPy: times that no costs explain
        return Beside(_name(held), numbers, (), (*why, "nothing can be fitted to these times"))


def _alike(runs: Sequence[Run]) -> list[list[Probe]]:
    """Runs that can be probes, by what must be the same."""
    groups: dict[tuple[str, ...], list[Probe]] = {}
    for probe in filter(None, map(_usable, runs)):
        options = [repr(getattr(probe.spec, name)) for name in ALIKE]
        machine = [repr(probe.run.environment.get(name)) for name in SAME]
        groups.setdefault((*options, *machine, repr(probe.run.emulated)), []).append(probe)
    return [probes for probes in groups.values() if len({probe.workers for probe in probes}) > 1]


def _usable(run: Run) -> Probe | None:
    """None of runs that are disturbed, too short, large or damaged, and of a user's own models and data: reports run no
    code that run folders name.
    """
    if run.summary.ranks > MOST_RANKS or run.method.asynchronous:
        return None
    try:
        probe = checked_probe(run)
        resolve(("the run", probe.spec.values()), here=False)
        placed = len(probe.places) == run.summary.ranks and max(probe.places) < len(probe.cluster.nodes)
        ours = models.describe(probe.spec.model) and datasets.describe(probe.spec.data)
    except (UsageError, ValueError):
        return None
    same = (probe.spec.workers, probe.spec.strategy) == (run.summary.workers, run.summary.strategy)
    return probe if placed and ours and same else None


def _predictable(most: Sequence[Probe], fewer: Sequence[Probe]) -> tuple[list[Probe], list[str]]:
    """Those whose way to communicate was measured with fewer workers, and why others are not predicted."""
    known = {channel_of(probe.options) for probe in fewer if probe.run.summary.ranks > 1}
    held = [probe for probe in most if channel_of(probe.options) in known]
    others = dict.fromkeys(probe.run.summary.strategy for probe in most if probe not in held)
    why = [f"{name} has no run with fewer workers, but more than one" for name in others]
    return held, why


def _name(probes: Sequence[Probe]) -> str:
    spec = probes[0].spec
    return f"{spec.model} on {spec.data}"
