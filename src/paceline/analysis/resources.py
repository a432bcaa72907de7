"""Nodes and ranks over time, on one clock, and bytes per update through each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import fmean

import numpy as np

from paceline.analysis.breakdown import by_rank, computed
from paceline.analysis.runs import Run
from paceline.analysis.setting import nodes_of
from paceline.analysis.statistics import Series
from paceline.run.records import Node, NodeSample, Step

SHORTEST = 0.1  # seconds between samples: rates over less are noise
ENOUGH = 4  # sampling periods that steps must last, as it is not known when bytes were sent between two samples
COLUMNS = ("rx_packets", "tx_packets", "rx_bytes", "tx_bytes")


@dataclass(frozen=True)
class NodeSeries:
    """A node over time: each value is the mean over the period that ends at `seconds`; NaN if not known.

    Time 0 is the start of the first step of the run; earlier samples are omitted. Traffic is that of all interfaces
    except loopback, or of loopback if there is one node.
    """

    name: str
    role: str  # server, worker, 2 workers, server and worker …
    seconds: Series
    cores_busy: Series
    cores_of_run: Series  # those that ranks of this run use; NaN in a lab, where a node has no other processes
    cores: int | None
    memory_bytes: Series
    gpus_busy: Series  # share of time, the mean over its GPUs
    packets_in: Series  # per second, as all below
    packets_out: Series
    bits_in: Series
    bits_out: Series


@dataclass(frozen=True)
class RankSeries:
    """A worker over time: the shares of the period that ends at `seconds` in which it computed and waited."""

    rank: int
    role: str
    seconds: Series
    busy: Series
    waiting: Series
    samples_per_second: Series


@dataclass(frozen=True)
class NodeTraffic:
    """Traffic of a node per update, by the kernel's counters; NaN if there were too few steps."""

    name: str
    role: str
    bytes_in: float
    bytes_out: float
    packets_in: float
    packets_out: float


def roles(run: Run) -> dict[str, str]:
    """The roles of the ranks on each node, by its name."""
    found: dict[str, list[str]] = {}
    for row in run.environment.get("ranks", []):
        found.setdefault(row["host"], []).append("server" if row["rank"] < run.summary.servers else "worker")
    return {host: _role(rows.count("server"), rows.count("worker")) for host, rows in found.items()}


def _role(servers: int, workers: int) -> str:
    counts = {"server": servers, "worker": workers}
    return " and ".join(name if n == 1 else f"{n} {name}s" for name, n in counts.items() if n)


def _counters(run: Run, node: Node) -> Series:
    """Packets and bytes in and out, one row per sample; an interface that is not listed has carried nothing yet."""
    if not any(sample.interfaces for sample in node.samples):
        return np.full((len(node.samples), len(COLUMNS)), np.nan)
    alone = nodes_of(run) == 1
    rows = [[float(sum(getattr(traffic, column) for traffic in sample.counted(alone=alone))) for column in COLUMNS]
            for sample in node.samples]  # fmt: skip
    return np.array(rows)


def node_series(run: Run) -> list[NodeSeries]:
    """Every node that was sampled at least twice."""
    begin, by_node, found = run.began, roles(run), []
    for name, node in run.nodes.items():
        times = np.array([sample.time for sample in node.samples]) - begin
        if len(times) < 2:
            continue
        gaps = np.diff(times)
        kept = (gaps >= SHORTEST) & (times[1:] > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            rates = np.diff(_counters(run, node), axis=0) / gaps[:, None]
        rates = np.where(rates >= 0, rates, np.nan)[kept]  # a counter that decreased belongs to a new interface
        fields = ("cpu", "run_cpu", "memory_bytes")
        cpu, own, memory = (_known([getattr(s, field) for s in node.samples[1:]])[kept] for field in fields)
        own = np.full_like(cpu, np.nan) if node.own_processes else own
        gpus = _known([_gpus_busy(sample) for sample in node.samples[1:]])[kept]
        found.append(NodeSeries(name, by_node.get(name, ""), times[1:][kept], cpu, own, node.cores, memory, gpus,
                                rates[:, 0], rates[:, 1], rates[:, 2] * 8, rates[:, 3] * 8))  # fmt: skip
    return found


def preemptions(run: Run) -> float | None:
    """Preemptions per second of the main threads of the run while it trained, on all its nodes."""
    ended = max(steps[-1].time for steps in run.steps.values() if steps)
    found = [[s.preemptions for s in node.samples if s.preemptions is not None and run.began < s.time <= ended]
             for node in run.nodes.values()]  # fmt: skip
    return sum(map(fmean, filter(None, found))) if any(found) else None


def _gpus_busy(sample: NodeSample) -> float | None:
    known = [gpu.busy for gpu in sample.gpus if gpu.busy is not None]
    return fmean(known) if known else None


def _known(values: Sequence[float | None]) -> Series:
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def traffic(run: Run) -> list[NodeTraffic]:
    """Traffic in the steps after warm-up (never the first, which may include initial weights), interpolated.

    Traffic between epochs, such as for validation, belongs to no step and is not counted.
    """
    steps = run.steps[0]
    steps = steps[min(max(run.warm_up, 1), len(steps) - 1) :]
    by_node = roles(run)
    return [
        NodeTraffic(name, by_node.get(name, ""), *_moved(run, node, steps))
        for name, node in run.nodes.items()
        if len(node.samples) > 1
    ]


def _moved(run: Run, node: Node, steps: Sequence[Step]) -> tuple[float, float, float, float]:
    """Bytes in and out, packets in and out, per update."""
    times, counts = np.array([sample.time for sample in node.samples]), _counters(run, node)
    ends = np.array([step.time for step in steps])
    starts = ends - np.array([step.seconds for step in steps])
    inside = (starts >= times[0]) & (ends <= times[-1])
    lasted = ends[inside].max() - starts[inside].min() if inside.any() else 0.0
    if lasted < ENOUGH * node.period or (np.diff(counts, axis=0) < 0).any():
        return (np.nan,) * 4
    moved = [np.interp(ends, times, column) - np.interp(starts, times, column) for column in counts.T]
    packets_in, packets_out, bytes_in, bytes_out = (float(each[inside].sum() / inside.sum()) for each in moved)
    return bytes_in, bytes_out, packets_in, packets_out


def rank_series(run: Run, bins: int = 100) -> list[RankSeries]:
    """Utilisation of every worker, from the parts of its steps, which are assumed to be in their usual order.

    If cores were shared, a worker without a core waits, as in the breakdown.
    """
    begin, servers = run.began, run.summary.servers
    workers = {rank: steps for rank, steps in run.steps.items() if rank >= servers and steps}
    if not workers:
        return []
    edges = np.linspace(0, max(steps[-1].time for steps in workers.values()) - begin, bins + 1)
    # Ranks that average record the samples of all ranks; workers of servers their own.
    share = 1 if servers else run.summary.workers
    shared = any(parts.core for parts in by_rank(run).values())
    found = []
    for rank, steps in workers.items():
        rows = np.cumsum([astuple(_laid_out(step, share, shared)) for step in steps], axis=0)
        times, parts = _points(steps, rows, begin)
        busy, waiting, samples = (np.diff(np.interp(edges, times, part)) / np.diff(edges) for part in parts)
        found.append(RankSeries(rank, "worker", edges[1:], np.clip(busy, 0, 1), np.clip(waiting, 0, 1), samples))
    return found


@dataclass(frozen=True)
class _Laid:
    """Seconds of a step: computing, waiting for a core, other waiting, updating the weights; and its samples."""

    compute: float
    core: float
    waiting: float
    optimizer: float
    samples: float


def _laid_out(step: Step, share: int, shared: bool) -> _Laid:
    spans, (compute, core) = step.spans, computed(step)
    waiting = sum(spans.get(name, 0.0) for name in ("wait", "push", "send", "average"))
    parts = (compute, core) if shared else (compute + core, 0.0)
    return _Laid(*parts, waiting, spans.get("optimizer", 0.0), step.samples / share)


def _points(steps: Sequence[Step], totals: Series, begin: float) -> tuple[Series, tuple[Series, Series, Series]]:
    """Cumulative computing, waiting and samples of a worker at the end of the five parts of each step."""
    before = np.vstack([np.zeros(totals.shape[1]), totals[:-1]])
    ends = np.array([step.time for step in steps]) - begin
    starts = ends - np.array([step.seconds for step in steps])
    own = totals - before
    ready = starts + np.array([step.spans.get("input", 0.0) for step in steps])
    done, updating = ready + own[:, 0] + own[:, 1], ends - own[:, 3]
    times = np.stack([starts, ready, done, updating - own[:, 2], updating, ends], axis=1)
    busy = before[:, 0] + before[:, 3]
    busy_at = np.stack([busy] * 2 + [busy + own[:, 0]] * 3 + [busy + own[:, 0] + own[:, 3]], axis=1)
    waiting = before[:, 1] + before[:, 2]
    waiting_at = np.stack([waiting] * 2 + [waiting + own[:, 1]] * 2 + [waiting + own[:, 1] + own[:, 2]] * 2, axis=1)
    fraction = (times - starts[:, None]) / np.maximum(ends - starts, 1e-12)[:, None]
    samples_at = before[:, 4, None] + own[:, 4, None] * np.clip(fraction, 0, 1)
    ordered = np.maximum.accumulate(times.ravel())
    return ordered, (busy_at.ravel(), waiting_at.ravel(), samples_at.ravel())
