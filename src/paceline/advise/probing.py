"""Makes the short runs that advice rests on, in rounds: each setting once in a round, in another order each time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.advise.noise_scale import Unknown
from paceline.advise.steps_needed import learning_rate
from paceline.bench.experiment import Experiment, make_experiment
from paceline.bench.run import Say, bench
from paceline.bench.store import Store
from paceline.errors import PacelineError
from paceline.layout import cores
from paceline.options import LENGTH, NOTHING
from paceline.predict.probes import SHORTEST, Probe, usable_probes
from paceline.run.folder import read_summary
from paceline.spec import FIELDS, OWN
from paceline.strategies.table import TABLE, default

TRIAL = 6  # steps of the run that says how long a step takes
RUN_SECONDS = 8.0  # of the steps of each run
FEWEST, MOST = 20, SHORTEST + 25  # steps of a run
MOST_ROUNDS = 5
LAB_WORKERS = 4  # of runs in a lab
BRANCHES = (1, 2, 8)  # times the batch, of runs that tell how many updates larger batches need
WARM_UP = 10  # steps of these
SCHEDULE = ("warmup_epochs", "decay_every", "decay_factor")  # that they do not have
# Options of the training that runs have otherwise; those that affect its length only, or nothing, are left out as well.
OTHER = ("workers", "strategy", "batch_size", "global_batch", "best_by")


class ProbesFailed(PacelineError):
    """A run failed, or none can be used."""


@dataclass(frozen=True)
class Probing:
    """What is run: the options of the training, with these strategies, numbers of workers and batch of an update."""

    options: Mapping[str, Any]
    strategies: Sequence[str]
    workers: Sequence[int]
    batch: int
    lab: str | None
    folder: Path
    title: str
    emulated: bool = False  # compute takes as long for a sample with any batch
    transport: str | None = None  # of workers that average with each other; the default unless given

    def rounds(self, say: Say, *, fresh: bool = False) -> Iterator[tuple[list[Probe], list[str], float]]:
        """After each round: the runs that can be used, why others cannot, and the seconds that all of them took.

        Raises KeyboardInterrupt when it is stopped, and ProbesFailed if a run fails.
        """
        store, began = Store(self.folder), time.monotonic()
        first = self._experiment([{"workers": 1, "strategy": default(1).name, "steps": TRIAL}], 1, {})
        self._run(first, store, say, fresh=fresh)
        summary = read_summary(self.folder / first.tasks()[0].name)
        step = (summary.update_seconds if summary else None) or RUN_SECONDS
        steps = min(MOST, max(FEWEST, round(RUN_SECONDS / step)))
        # Trying out overlap takes more steps than there is time for.
        own = {} if steps >= SHORTEST or "overlap" in self.options else {"overlap": "on"}
        for repeats in range(1, MOST_ROUNDS + 1):
            experiment = self._experiment(self._grids(steps), repeats, own)
            self._run(experiment, store, say)
            probes, unused = usable_probes([self.folder / task.name for task in experiment.tasks()])
            yield probes, unused, time.monotonic() - began

    def branches(self, samples: int, lr: float, optimizer: str, say: Say) -> list[Path]:
        """The folders of runs with several batches, each of so many samples, to see how many updates each needs. Their
        learning rates grow with the batch, as far as is usual without knowing more.
        """
        sizes = [self.batch * times for times in BRANCHES]
        grids = [
            {
                "workers": 2,
                "strategy": default(2).name,
                "global_batch": size,
                "steps": max(FEWEST, -(-samples // size)),
                "lr": float(f"{learning_rate(optimizer, lr, self.batch, size, Unknown('')):.3g}"),
                "decay": "none",
                "warmup_steps": WARM_UP,
                "record_norms": 1,
            }
            for size in sizes
        ]
        plain = {name: value for name, value in self.options.items() if name not in SCHEDULE}
        experiment = replace(self, options=plain)._experiment(grids, 1, {})
        self._run(experiment, Store(self.folder), say)
        return [self.folder / task.name for task in experiment.tasks()]

    def _grids(self, steps: int) -> list[dict[str, Any]]:
        """One process with the whole batch, and with a part of it, as workers have; several with all of it."""
        several = self.several
        alone = {"workers": 1, "strategy": default(1).name, "steps": steps}
        found = [alone]
        if self.batch > 1 and not self.emulated:
            parts = max(several, default=2) * int(self.options.get("accumulate", 1))
            found.append(alone | {"batch_size": -(-self.batch // parts)})
        found += [{"workers": number, "strategy": strategy, "steps": self._steps(strategy, number, steps)}
                  | ({"transport": self.transport} if self.transport and "servers" not in TABLE[strategy].names else {})
                  for number in several for strategy in self.strategies]  # fmt: skip
        return found

    @property
    def several(self) -> list[int]:
        """Numbers of workers that are run: each has a core, or a node of the lab, and a sample."""
        most = min(self.batch, LAB_WORKERS if self.lab else cores())
        return [number for number in self.workers if 1 < number <= most]

    def _steps(self, strategy: str, workers: int, steps: int) -> int:
        """Where each worker makes updates of its own, as many rounds of them."""
        return steps * workers if TABLE[strategy].updates_by_worker else steps

    def _experiment(self, grids: Sequence[Mapping[str, Any]], repeats: int, own: Mapping[str, Any]) -> Experiment:
        left_out = {name for name, made in FIELDS.items() if made.metadata["affects"] in (LENGTH, NOTHING)} | {*OTHER}
        fixed = {name: value for name, value in self.options.items() if name not in left_out} | {"test": False}
        many = {name: value for name, value in fixed.items() if name in OWN} | dict(own)
        fixed = {name: value for name, value in fixed.items() if name not in OWN}
        if self.lab:
            preset = ":" not in self.lab and not self.lab.endswith(".toml")
            fixed["lab"] = f"{self.lab}:{{ranks}}" if preset else self.lab
        full = []
        for grid in grids:
            batch = {} if {"batch_size", "global_batch"} & set(grid) else {"global_batch": self.batch}
            kept = {name: value for name, value in many.items() if name in TABLE[grid["strategy"]].names}
            full.append({**kept, **batch, **grid})
        fixed = {name: value for name, value in fixed.items() if not all(name in grid for grid in full)}
        return make_experiment({"title": self.title, "fixed": fixed, "grid": full}, Path("advise"), repeats=repeats)

    def _run(self, experiment: Experiment, store: Store, say: Say, *, fresh: bool = False) -> None:
        outcome = bench(experiment, store, say, fresh=fresh)
        if outcome.stopped:
            say("The same command continues", "\n")
            raise KeyboardInterrupt
        if outcome.failed:
            raise ProbesFailed(f"a run failed: {next(iter(outcome.failed.values()))}")
