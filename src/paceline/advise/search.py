"""All ways to run a training: strategies, workers, batches and machines, each with draws of the time that it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.advise.advice import EXTRAPOLATED, MEASURED, PREDICTED
from paceline.advise.steps_needed import StepsLaw
from paceline.errors import UsageError
from paceline.predict.cluster import Cluster
from paceline.predict.fit import channel_of
from paceline.predict.forecast import DRAWS, Predictor, Simulated, beyond, setting_spec
from paceline.predict.noise import block_bootstrap
from paceline.predict.probes import Probe, options_of
from paceline.predict.ranges import Range
from paceline.predict.steps import Array
from paceline.strategies.table import TABLE, default

# How the times of runs of one setting differ, before repeats show it: a standard deviation, which counts as so many
# repeats.
USUAL_SPREAD, USUAL_REPEATS = 0.02, 4
SLOWER = 1.2  # settings that are so many times as slow as another one are not simulated further
GROWTH = (1, 2, 4, 8, 16)  # of the batch, where it is known how many updates each needs
MOST_OF_DATA = 0.1  # of the samples of an epoch, in one batch


@dataclass(frozen=True)
class Place:
    """Machines on which the training could run; `name` is how a sentence calls them.

    Without a cluster they are those of the probes. `prices` are for an hour of each machine, or of all if it is one;
    `memory` is that of a machine, and all ranks share it if there is only one (`shared`).
    """

    name: str
    cluster: Cluster | None
    most: int  # ranks
    prices: tuple[float, ...] = ()
    memory: int | None = None
    shared: bool = False

    def machines(self, ranks: int) -> int:
        return 1 if self.shared else ranks

    def fits(self, memory: Range, ranks: int) -> bool:
        """Whether ranks that need so much each fit into the memory of a machine."""
        return self.memory is None or memory.high * (ranks if self.shared else 1) <= self.memory

    def price(self, ranks: int) -> float | None:
        """For an hour of the machines of so many ranks."""
        count = self.machines(ranks)
        if not self.prices:
            return None
        return self.prices[0] * count if len(self.prices) == 1 else sum(self.prices[:count])


@dataclass(frozen=True)
class Candidate:
    """A setting. `spent` are draws of the seconds in which it makes the progress of one update with the batch of the
    command, and `updates` the updates that it needs for that.
    """

    place: Place
    found: Simulated
    batch: int
    updates: Array
    spent: Array
    basis: str
    beyond: tuple[str, ...]
    memory: Range
    fits: bool
    sure: bool  # whether a verdict may rest on it

    @property
    def workers(self) -> int:
        return self.found.spec.workers or 1

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.place.name, self.found.spec.strategy or "", self.workers, self.batch

    @property
    def typical(self) -> float:
        return float(self.spent[0])

    @property
    def at_most(self) -> float:
        """What it takes in nine cases of ten: of settings that are about equally fast, the better known is better."""
        return float(np.quantile(self.spent, 0.9))


def search(
    predictor: Predictor,
    places: Sequence[Place],
    strategies: Sequence[str],
    workers: Sequence[int],
    batches: Sequence[int],
    law: StepsLaw | None,
    left_out: list[str],
) -> list[Candidate]:
    """Every setting that can be predicted and is not much slower than another one with as many workers; `left_out` gets
    the reasons for the others. The first batch is that of the command, and is the only one without a law that says how
    many updates others need.
    """
    found = []
    tried = batches if law else batches[:1]
    probed = sorted(strategies, key=lambda name: TABLE[name].averaging not in predictor.fit.costs)  # these first
    for place in places:
        fastest: dict[tuple[int, int], float] = {}  # of those that fit
        slow = set[str]()  # with more workers, they are slower still
        for strategy, count in _settings(probed, workers):
            if strategy in slow:
                continue
            try:
                for batch, setting in _simulated(predictor, place, strategy, count, tried):
                    memory = Range(*predictor.memory.predict(setting.spec))
                    step, best = setting.typical, fastest.get((count, batch), np.inf)
                    if place.fits(memory, setting.spec.ranks):
                        fastest[count, batch] = min(step, best)
                    if step <= SLOWER * best:
                        found.append(_candidate(predictor, place, setting, batch, law, batches[0], memory))
                        continue
                    left_out.append(f"{strategy} with {count:,} {place.name}: {step / best:.1f} times as slow as "
                                    "another strategy")  # fmt: skip
                    if not setting.spec.method.part:
                        slow.add(strategy)
            except UsageError as error:
                left_out.append(f"{strategy} with {count:,} {place.name}: {error}")
    return found


def _settings(strategies: Sequence[str], workers: Sequence[int]) -> Iterator[tuple[str, int]]:
    yield default(1).name, 1
    for strategy in strategies:
        yield from ((strategy, count) for count in workers if count > 1 and not TABLE[strategy].single)


def _simulated(
    predictor: Predictor, place: Place, strategy: str, workers: int, batches: Sequence[int]
) -> Iterator[tuple[int, Simulated]]:
    spec = setting_spec(predictor.probes, strategy, workers, {})
    probed = {(probe.run.summary.strategy, probe.workers) for probe in predictor.probes}
    if place.shared and (strategy, workers) not in probed and workers <= place.most:
        raise UsageError("workers that share a machine are not predicted, but measured, and no run had this setting")
    for batch in batches:
        if spec.ranks <= place.most and batch >= spec.shares:
            given = {"batch_size": -(-batch // (spec.shares * spec.accumulate))}
            yield batch, predictor.simulate(strategy, workers, place.cluster, given)


def _candidate(
    predictor: Predictor,
    place: Place,
    found: Simulated,
    batch: int,
    law: StepsLaw | None,
    base: int,
    memory: Range,
) -> Candidate:
    updates = law.ratio(batch, base) if law else np.ones(DRAWS)
    spec, alone, fit = found.spec, found.spec.ranks == 1, predictor.fit
    usual = not fit.device and found.cluster.nodes[0].speed == predictor.probes[0].cluster.nodes[0].speed
    runs = _same(predictor.probes, found) if usual and (place.cluster is None or alone) else []
    step = measured_draws(runs, predictor.seed + spec.ranks) if runs and place.cluster is None else found.drawn
    ways = beyond(fit, predictor.probes, spec, found.cluster)
    return Candidate(
        place,
        found,
        batch,
        updates,
        np.resize(step, DRAWS) * updates,
        MEASURED if runs else EXTRAPOLATED if ways else PREDICTED,
        () if runs else ways,
        memory,
        place.fits(memory, spec.ranks),
        alone or channel_of(options_of(spec)) in fit.costs or not spec.method.part,
    )


def _same(probes: Sequence[Probe], found: Simulated) -> list[Probe]:
    """The probes with this setting."""
    spec = found.spec
    return [
        probe
        for probe in probes
        if (probe.run.summary.strategy, probe.workers, probe.samples) == (spec.strategy, spec.workers, spec.batch_size)
    ]


def measured_draws(runs: Sequence[Probe], seed: int = 0) -> Array:
    """The step's seconds of a setting that was run, as far as steps and repeats leave them open."""
    dice = np.random.default_rng(seed)
    logs = np.log([run.seconds.value for run in runs])
    within = [np.std(np.log(block_bootstrap(run.times, centre=run.centre))) for run in runs]
    freedom = USUAL_REPEATS + len(runs) - 1
    between = (USUAL_REPEATS * USUAL_SPREAD**2 + np.sum((logs - logs.mean()) ** 2)) / freedom
    error = np.sqrt((between + np.mean(np.square(within))) / len(runs))
    drawn: Array = np.exp(logs.mean() + dice.standard_t(freedom, DRAWS) * error)
    drawn[0] = np.exp(logs.mean())
    return drawn


def batches_of(base: int, samples: int | None) -> list[int]:
    """The batch of the command, and larger ones."""
    most = max(base, (samples or 0) * MOST_OF_DATA) if samples else base * max(GROWTH)
    return [base * times for times in GROWTH if base * times <= most]
