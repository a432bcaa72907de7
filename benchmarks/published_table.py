"""Predicts rows of a published table from its first two rows, and looks for rows that contradict each other.

    python benchmarks/published_table.py

The table is Table 2 of Wang and Yang, Distributed and Parallel Deep Learning, as experiments/mpi-mnist.toml has it:
epochs of MNIST with 1, 2, 4 and 8 processes on 1, 2 and 4 nodes with 40 cores each, batches of 128 for each process,
gradients of 690,590 values that are reduced to one process and broadcast. Predicted are all rows but those of 1 and 2
processes on one node. A step is compute, then Paceline's simulation of reduce-bcast. What is not known is drawn:

- compute of a process, with p of them on a node: as in the row of 2, times a log-normal factor for each doubling of p
- the state of the machine: of the five epochs of one process, three took 142 s and two 82 s
- messages and the network, whose speed the paper does not give: Paceline's assumptions without measurements
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.predict.cluster import Cluster, Machine, alike, spread
from paceline.predict.collective import Group, seconds
from paceline.predict.fit import LEAST_ERROR, drawn_prior

Array = NDArray[np.float64]
FILE = Path(__file__).parent.parent / "experiments" / "mpi-mnist.toml"
SAMPLES, BATCH, EPOCHS, PARAMETERS, CORES = 60_000, 128, 5, 690_590, 40
ALONE = (142.0, 142.0, 142.0, 82.0, 82.0)  # seconds of each epoch of one process: the note of the file's first row
# Assumptions: standard deviations of logarithms.
DOUBLING = 0.1  # how much slower each of twice as many processes on a node is
NETWORK, NETWORK_FACTOR = 10e9, 3.0  # bit/s
CHANNEL = "reduce-bcast"
DRAWS, COSTS = 4000, 40


@dataclass(frozen=True)
class Row:
    nodes: int
    processes: int
    epoch: float  # seconds, the median of five
    total: float

    @property
    def steps(self) -> int:
        """In an epoch."""
        return ceil(SAMPLES / BATCH / self.processes)

    @property
    def step(self) -> float:
        return self.epoch / self.steps


def read_rows(path: Path = FILE) -> list[Row]:
    table = tomllib.loads(path.read_text())["paper"]
    return [
        Row(row["match"]["nodes"], row["match"]["workers"], row["epoch_seconds"], row["total_seconds"]) for row in table
    ]


def messages(row: Row, dice: np.random.Generator) -> Array:
    """Seconds of averaging, for some draws of what messages and the network cost."""
    found = []
    if row.processes == 1:
        return np.zeros(1)
    for _ in range(COSTS):
        costs = drawn_prior(CHANNEL, dice)
        rate = NETWORK * NETWORK_FACTOR ** dice.standard_normal()
        group = Group(_cluster(row.nodes, rate), spread(row.processes, row.nodes), costs)
        found.append(seconds(CHANNEL, group, PARAMETERS, 4))
    return np.array(found)


def _cluster(nodes: int, rate: float) -> Cluster:
    if nodes == 1:
        return Cluster((Machine(1e12, 1e12),), cores=CORES)
    return replace(alike(nodes, rate), cores=CORES)


def predict(rows: Sequence[Row], row: Row, *, states: bool, seed: int = 0) -> Array:
    """Draws of the seconds of an epoch. Without `states`, the machine is always as it was in the row of 2 processes."""
    dice = np.random.default_rng(seed)
    two = next(each for each in rows if (each.nodes, each.processes) == (1, 2))
    was, now = (_states(two, dice), dice.choice(ALONE, DRAWS)) if states else (np.ones(DRAWS),) * 2
    compute = (two.step - dice.choice(messages(two, dice), DRAWS)) * now / was
    doublings = abs(log2(row.processes / row.nodes) - 1)
    compute *= np.exp(dice.standard_normal(DRAWS) * np.hypot(LEAST_ERROR, DOUBLING * np.sqrt(doublings)))
    drawn: Array = (compute + dice.choice(messages(row, dice), DRAWS)) * row.steps
    return drawn


def _states(two: Row, dice: np.random.Generator) -> Array:
    """The state of the machine in the row of 2 processes: how likely each is follows from how much slower they were."""
    alone = np.array(ALONE)
    slower = np.log(two.step / (alone / ceil(SAMPLES / BATCH)))
    likely = np.exp(-((slower / DOUBLING) ** 2) / 2)
    return dice.choice(alone, DRAWS, p=likely / likely.sum())


def contradictions(rows: Sequence[Row]) -> list[str]:
    """What cannot be, if epochs are as long as their median, and every process always does the same work in a step."""
    found = []
    for row in rows:
        name, sum_ = f"{row.processes} processes, nodes: {row.nodes}", EPOCHS * row.epoch
        if row.total < sum_:
            found.append(f"{name}: {EPOCHS} epochs of {row.epoch:g} s are {sum_:.1f} s, the total is {row.total:g} s")
        elif row.total - sum_ > 15:
            found.append(f"{name}: the total, {row.total:g} s, is {row.total - sum_:.1f} s more than {EPOCHS} epochs")
    fewer = {row.processes: row for row in reversed(rows) if row.nodes == 1}
    for row in rows:
        half = fewer.get(row.processes // 2)
        if half and row.step < 0.95 * half.step:
            found.append(
                f"{row.processes} processes, nodes: {row.nodes}: a step takes {row.step:.3f} s, with half as many "
                f"{half.step:.3f} s, although it has the same compute and more messages"
            )
    return found


def main() -> None:
    rows = read_rows()
    print("nodes  processes  s/step  measured epoch  one state             two states            inside")
    for row in rows:
        line = f"{row.nodes:5}  {row.processes:9}  {row.step:6.3f}  {row.epoch:12.2f} s"
        if row.nodes == 1 and row.processes <= 2:
            print(f"{line}  (known)")
            continue
        shown, inside = "", []
        for states in (False, True):
            low, middle, high = np.quantile(predict(rows, row, states=states), [0.05, 0.5, 0.95])
            shown += f"  {f'{middle:.1f} s ({low:.1f}–{high:.1f})':<20}"
            inside.append("yes" if low <= row.epoch <= high else "no")
        print(f"{line}{shown}  {', '.join(inside)}")
    for reason in contradictions(rows):
        print(f"- {reason}")


if __name__ == "__main__":
    main()
