"""Bytes per update through a server or a node of a ring, and whether they grow with the number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from paceline.analysis.lines import Line, faster, speed
from paceline.analysis.resources import traffic
from paceline.analysis.runs import Run
from paceline.analysis.scaling import Group
from paceline.analysis.setting import nodes_of
from paceline.analysis.statistics import Interval
from paceline.analysis.trust import allow, decide, doubt
from paceline.analysis.verdicts import Claim, Found, claim, fewest_runs, place
from paceline.analysis.wording import count, number, percent, size, within

WIDTHS = {"float32": 4, "float64": 8}
FIT = 0.15  # allowed relative deviation from a law
CONSTANT = 0.25  # allowed relative change of a constant
OVERHEAD = 0.1  # headers and acknowledgements, relative to the gradient
THESIS = "D. Shi, 2019 (thesis), chapter 5"
UNIT = (
    "The thesis shows packets per second. Here, it is bytes per update, which do not depend on speed, and also the "
    "rate in bits per second, which does."
)
BYTES, RATE, BOUNDED, SAME = "in bytes per update", "as a rate", "bounded", "constant"


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
    doubt: str

    @property
    def why(self) -> str:
        shown = [f"{number(value / 1e6)} Mbit/s" for value in (self.fewest, self.most)]
        doubt = f"; {self.doubt}" if self.doubt else ""
        return f"{shown[0]}, and with the most workers {shown[1]}: {within(self.times)} times as much{doubt}"


def rate(line: Line, data: Moved) -> Rate:
    """Bytes per update times updates per second; each update uses one global batch."""
    few, most = (line.groups[n] for n in (min(data.bytes), max(data.bytes)))
    bits = [8 * data.bytes[one.workers] / one.first.summary.global_batch for one in (few, most)]  # an image
    times = allow(faster(most, few), few, most)
    grown = Interval(*(value * bits[1] / bits[0] for value in (times.value, times.low, times.high)))
    return Rate(bits[0] * speed(few), bits[1] * speed(most), grown, doubt(few, most))


def moved(line: Line) -> Moved | str:
    """Bytes of the busiest server, or the mean over the nodes of a ring; a string says why they are not known."""
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
    if len(ranks) != s.servers + s.workers or not s.steps:
        return float("nan")
    return (max(ranks[: s.servers]) if s.servers else fmean(ranks)) / s.steps


def _gradient(run: Run) -> float | None:
    s = run.summary
    return None if not s.parameters else s.parameters * WIDTHS.get(run.spec.get("dtype", ""), 4) / s.shrink


def server_traffic(served: Sequence[Line]) -> Claim:
    found = []
    for line in served:
        where, data = place(line, served), moved(line)
        if isinstance(data, str):
            found.append(Found(line.model, line.servers, where, None, data))
            continue
        off, few, most = data.misfit(lambda n: n), min(data.bytes), max(data.bytes)
        why = (
            f"an update moves {size(data.bytes[few])} through the busiest server with {count(few, 'worker')} and "
            f"{size(data.bytes[most])} with {most} ({data.how}): {number(data.bytes[most] / data.bytes[few])} times "
            f"as much for {most / few:.3g} times the workers, at most {percent(off)} off a straight line"
        )
        found.append(Found(line.model, line.servers, where, off <= FIT, why, off, BYTES))
        seen = rate(line, data)
        grows = decide(seen.times, (1 - FIT) * most / few, line.groups[few], line.groups[most])
        why = f"with {count(few, 'worker')} {seen.why}, for {most / few:.3g} times the workers"
        found.append(Found(line.model, line.servers, where, grows, why, reading=RATE))
    text = (
        f"Traffic at the parameter server grows in proportion to the workers: bytes in and out per update are within "
        f"{percent(FIT)} of a straight line through zero. {UNIT} The rate of a saturated link cannot grow."
    )
    return claim("server-traffic-grows", text, f"{THESIS}, of Figure 5.1", found, fewest_runs(served),
                 "Largest deviation from that line", percent)  # fmt: skip


def ring_traffic(rings: Sequence[Line]) -> Claim:
    found = []
    for line in rings:
        where, data = place(line, rings), moved(line)
        if isinstance(data, str):
            found.append(Found(line.model, 0, where, None, data))
            continue
        few, most = min(data.bytes), max(data.bytes)
        off, top = data.misfit(lambda n: (n - 1) / n), max(data.bytes, key=lambda n: data.bytes[n])
        bound = 4 * data.gradient * (1 + OVERHEAD) if data.gradient else float("inf")
        why = f"at most {percent(off)} off 2(n-1)/n of the gradient each way; the maximum is {_sized(data, top)}"
        found.append(Found(line.model, 0, where, off <= FIT and data.bytes[top] <= bound, why, reading=BOUNDED))
        change, due = data.bytes[most] / data.bytes[few], (most - 1) / most * few / (few - 1)
        why = (
            f"an update moves {_sized(data, few)} through each node with {count(few, 'worker')} and "
            f"{_sized(data, most)} with {most} ({data.how}): {number(change)} times as much, {number(due)} expected "
            f"of a ring"
        )
        found.append(Found(line.model, 0, where, abs(change - 1) <= CONSTANT, why, change, SAME))
        seen = rate(line, data)
        why = f"with {count(few, 'worker')} {seen.why}"
        found.append(Found(line.model, 0, where, _constant(seen), why, reading=RATE))
    text = (
        f"Traffic of each node in a ring stays constant as workers are added. A ring moves 2(n-1)/n of the gradient "
        f"each way per update: the gradient once with 2 workers, 1.67 times with 6, and never twice. So the claim is "
        f"checked in three ways. Bounded: bytes in and out follow that formula within {percent(FIT)}, and their sum "
        f"stays below four times the gradient; this is what a correct ring does. Constant: they change by at most "
        f"{percent(CONSTANT)} from the fewest workers to the most; a correct ring does that from 4 or 5 workers on, "
        f"but not from 2. As a rate: the same for bits per second. {UNIT}"
    )
    return claim("ring-traffic-constant", text, f"{THESIS}, of Figures 4.15 and 4.18", found, fewest_runs(rings),
                 "Bytes with the most workers over the fewest", lambda value: f"{number(value)} times")  # fmt: skip


def _constant(seen: Rate) -> bool | None:
    low, high = 1 - CONSTANT, 1 + CONSTANT
    if seen.doubt:
        return None
    if low <= seen.times.low and seen.times.high <= high:
        return True
    return False if seen.times.high < low or seen.times.low > high else None


def _sized(data: Moved, workers: int) -> str:
    value = data.bytes[workers]
    return size(value) + (f" ({number(value / data.gradient)} times the gradient)" if data.gradient else "")
