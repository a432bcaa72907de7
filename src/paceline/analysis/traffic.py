"""Bytes per update through a server or a node, and whether they grow with the number of workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from paceline.analysis.claim_file import LAWS, Reading
from paceline.analysis.lines import Line, faster, speed
from paceline.analysis.resources import traffic
from paceline.analysis.runs import Run
from paceline.analysis.scaling import Group
from paceline.analysis.setting import nodes_of
from paceline.analysis.statistics import Interval
from paceline.analysis.trust import allow, caveat, decide
from paceline.analysis.verdicts import Judged
from paceline.analysis.wording import count, number, percent, size, within

WIDTHS = {"float32": 4, "float64": 8}


@dataclass(frozen=True)
class Moved:
    """Bytes in and out per update, by workers; how they were counted; and the size of the gradient."""

    bytes: dict[int, float]
    how: str
    gradient: float | None

    def misfit(self, law: Callable[[int], float]) -> float:
        """The largest relative deviation from the best-fitting multiple of this law."""
        x, y = np.array([law(n) for n in self.bytes]), np.array(list(self.bytes.values()))
        return float(np.abs(y / (x * (x @ y) / (x @ x)) - 1).max())


@dataclass(frozen=True)
class Rate:
    """Bits per second with the fewest and with the most workers, and their ratio."""

    fewest: float
    most: float
    times: Interval
    caveat: str

    @property
    def why(self) -> str:
        shown = [f"{number(value / 1e6)} Mbit/s" for value in (self.fewest, self.most)]
        caveat = f"; {self.caveat}" if self.caveat else ""
        return f"{shown[0]}, and with the most workers {shown[1]}: {within(self.times)} times as much{caveat}"


def rate(line: Line, data: Moved) -> Rate:
    """Bytes per update times updates per second; each update uses one global batch."""
    few, most = (line.groups[n] for n in (min(data.bytes), max(data.bytes)))
    bits = [8 * data.bytes[one.workers] / one.first.summary.global_batch for one in (few, most)]  # a sample
    times = allow(faster(most, few), few, most)
    grown = Interval(*(value * bits[1] / bits[0] for value in (times.value, times.low, times.high)))
    return Rate(bits[0] * speed(few), bits[1] * speed(most), grown, caveat(few, most))


def moved(line: Line) -> Moved | str:
    """Bytes of the busiest server, or the mean over the nodes; a string says why they are not known."""
    groups = {n: one for n, one in line.groups.items() if line.servers or n > 1}
    if len(groups) < 2:
        least = "" if line.servers else " above one"
        return f"at least two numbers of workers{least} are needed, but {count(len(groups), 'such setting')} ran"
    if line.servers and any(one.first.summary.global_batch == one.first.summary.batch_size and n > 1
                            for n, one in groups.items()):  # fmt: skip
        return "each update uses the gradient of one worker, so bytes per update do not depend on the number of workers"
    for how, counted in (("by the kernel's counters", by_kernel), ("as counted by the ranks", by_ranks)):
        found = {n: _mean(one, counted) for n, one in groups.items()}
        if all(value > 0 for value in found.values()):  # nan is not
            return Moved(found, how, _gradient(line.first.first))
    return "its runs were too short to count bytes, or counted none"


def _mean(one: Group, counted: Callable[[Run], float]) -> float:
    return fmean(counted(run) for run in one.runs)


def by_kernel(run: Run) -> float:
    """NaN unless every rank is alone on its node."""
    wanted = "server" if run.summary.servers else "worker"
    if nodes_of(run) != run.summary.servers + run.summary.workers:
        return float("nan")
    values = [node.bytes_in + node.bytes_out for node in traffic(run) if node.role == wanted]
    if len(values) != (run.summary.servers or run.summary.workers):
        return float("nan")
    return float(np.max(values)) if run.summary.servers else fmean(values)  # a nan stays one


def by_ranks(run: Run) -> float:
    s = run.summary
    ranks = [sent + received for sent, received in zip(s.bytes_sent, s.bytes_received, strict=False)]
    if len(ranks) != s.servers + s.workers or not s.counted_steps:
        return float("nan")
    return (max(ranks[: s.servers]) if s.servers else fmean(ranks)) / s.counted_steps


def _gradient(run: Run) -> float | None:
    s = run.summary
    return None if not s.parameters else s.parameters * WIDTHS.get(run.spec.get("dtype", ""), 4) / s.shrink


def judge_bytes(line: Line, reading: Reading) -> Judged:
    """Whether bytes per update follow a law; a constant is compared with the fewest and with the most workers."""
    data = moved(line)
    if isinstance(data, str):
        return Judged(None, data)
    few, most = min(data.bytes), max(data.bytes)
    where, change = "the busiest server" if line.servers else "each node", data.bytes[most] / data.bytes[few]
    why = (
        f"an update moves {_sized(data, few)} through {where} with {count(few, 'worker')} and {_sized(data, most)} "
        f"with {most} ({data.how}): {number(change)} times as much for {most / few:.3g} times the workers"
    )
    if reading.law == "constant":
        return Judged(abs(change - 1) <= reading.within, why, change)
    off, top = data.misfit(LAWS[reading.law]), max(data.bytes.values())
    bound = (reading.most_gradients or float("inf")) * (data.gradient or float("inf"))
    law = "a straight line through zero" if reading.law == "n" else f"the law {reading.law}"
    return Judged(off <= reading.within and not top > bound, f"{why}, at most {percent(off)} off {law}", off)


def judge_rate(line: Line, reading: Reading) -> Judged:
    """The same for bits per second, with the intervals of speeds."""
    data = moved(line)
    if isinstance(data, str):
        return Judged(None, data)
    seen, (few, most) = rate(line, data), (min(data.bytes), max(data.bytes))
    law, pair = LAWS[reading.law], (line.groups[few], line.groups[most])
    times = law(most) / law(few)
    why = f"with {count(few, 'worker')} {seen.why}, for {most / few:.3g} times the workers"
    if reading.law != "constant":
        return Judged(decide(seen.times, (1 - reading.within) * times, *pair), why)
    low, high = 1 - reading.within, 1 + reading.within
    apart = seen.times.high < low or seen.times.low > high
    inside = low <= seen.times.low and seen.times.high <= high
    return Judged(None if seen.caveat or not (apart or inside) else inside, why)


def _sized(data: Moved, workers: int) -> str:
    value = data.bytes[workers]
    return size(value) + (f" ({number(value / data.gradient)} times the gradient)" if data.gradient else "")
