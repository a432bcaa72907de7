"""The bytes that an update moves through a server, or through a node of a ring, by the number of workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from paceline.analysis.lines import Line
from paceline.analysis.resources import traffic
from paceline.analysis.runs import Run
from paceline.analysis.scaling import Group, nodes_of
from paceline.analysis.wording import count

WIDTHS = {"float32": 4, "float64": 8}


@dataclass(frozen=True)
class Moved:
    """Bytes in and out an update, by workers; how they were counted; and the gradient's own size."""

    bytes: dict[int, float]
    how: str
    gradient: float | None

    def misfit(self, law: Callable[[int], float]) -> float:
        """How far, as a part, the numbers are at most from the multiple of this law that fits best."""
        x, y = np.array([law(n) for n in self.bytes]), np.array(list(self.bytes.values()))
        return float(np.abs(y / (x * (x @ y) / (x @ x)) - 1).max())


def moved(line: Line) -> Moved | str:
    """Of a line of servers the busiest one's; of a ring each node's, the mean. A string says why it cannot be told."""
    groups = {n: one for n, one in line.groups.items() if line.servers or n > 1}
    if len(groups) < 2:
        least = "" if line.servers else ", two or more,"
        return f"it takes two numbers of workers{least} and {count(len(groups), 'such setting')} ran"
    if line.servers and any(one.first.summary.global_batch == one.first.summary.batch_size and n > 1
                            for n, one in groups.items()):  # fmt: skip
        return "each update is of one worker's gradient, so that an update's bytes do not depend on the workers"
    for how, counted in (("by the kernel's counters", _by_kernel), ("as the ranks counted", _by_ranks)):
        found = {n: _mean(one, counted) for n, one in groups.items()}
        if all(value > 0 for value in found.values()):  # nan is not
            return Moved(found, how, _gradient(line.first.first))
    return "its runs were too short to count bytes, or counted none"


def _mean(one: Group, counted: Callable[[Run], float]) -> float:
    return fmean(counted(run) for run in one.runs)


def _by_kernel(run: Run) -> float:
    """Nan unless every rank has a node to itself."""
    wanted = "server" if run.summary.servers else "worker"
    if nodes_of(run) != run.summary.servers + run.summary.workers:
        return float("nan")
    values = [node.bytes_in + node.bytes_out for node in traffic(run) if node.role == wanted]
    if len(values) != (run.summary.servers or run.summary.workers):
        return float("nan")
    return float(np.max(values)) if run.summary.servers else fmean(values)  # a nan stays one


def _by_ranks(run: Run) -> float:
    s = run.summary
    ranks = [sent + received for sent, received in zip(s.bytes_sent, s.bytes_received, strict=False)]
    if len(ranks) != s.servers + s.workers or not s.steps:
        return float("nan")
    return (max(ranks[: s.servers]) if s.servers else fmean(ranks)) / s.steps


def _gradient(run: Run) -> float | None:
    s = run.summary
    return None if not s.parameters else s.parameters * WIDTHS.get(run.spec.get("dtype", ""), 4) / s.shrink
