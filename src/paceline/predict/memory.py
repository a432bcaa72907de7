"""The memory of a rank: its tensors are counted, and the rest is fitted to the peak memory of probes.

    peak = base + tensors that stay + factor × tensors of a step or of an evaluation, whichever are more
           + smaller factor × the other ones + more with each doubling of the threads

Base is what a process needs anyway: the interpreter, torch and other libraries. The factor is above 1, because the
library that computes layers has buffers of its own; the smaller factor is not 0, because freed memory is not always
used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.collectives.plan import WINDOW, Recv
from paceline.predict.collective import MOST_SIMULATED
from paceline.predict.probes import Probe, options_of
from paceline.predict.steps import Array
from paceline.server.layout import Layout
from paceline.spec import RunSpec

if TYPE_CHECKING:
    from paceline.predict.live import ModelTensors

MB = 1e6
# A worker's base, a server's base, both factors, and each doubling of the threads: what is assumed before anything is
# measured, and its standard deviation.
PRIOR = np.array([250 * MB, 210 * MB, 1.3, 0.8, 20 * MB])
PRIOR_ERROR = np.array([80 * MB, 60 * MB, 0.3, 0.3, 20 * MB])
# A peak differs from run to run by this much, and by this part of it (standard deviation).
NOISE, RELATIVE_NOISE = 5 * MB, 0.04
QUANTILE = 1.645  # of a 90 % interval
# On a device that was not measured, its library may use this many times the tensors of a step.
MOST_ESTIMATED = 1.5


@dataclass(frozen=True)
class Need:
    """The bytes of a rank's tensors: those that stay, and besides them those of a step and of an evaluation."""

    stays: float
    step: float = 0.0
    evaluation: float = 0.0
    server: bool = False
    threads: int = 1

    @property
    def row(self) -> Array:
        """What PRIOR is multiplied by."""
        less, more = sorted([self.step, self.evaluation])
        return np.array([not self.server, self.server, more, less, np.log2(self.threads)], dtype=float)


def needs_of(spec: RunSpec, tensors: ModelTensors, threads: int = 1) -> list[Need]:
    """Of a worker, and of a server if there are any."""
    options, workers = options_of(spec), spec.workers or 1
    servers, share = options["servers"], _share(spec)
    gradients = tensors.trained * share
    stays, keep = (tensors.weights + tensors.optimizer(spec) * tensors.trained) * share, True
    if servers:  # one vector of weights, one of gradients, and the weights that arrive
        stays = 3.0 * tensors.weights
    elif workers > 1:  # gradients are in buckets, or all weights are copied to one vector
        keep = not spec.method.averaging
        stays += gradients + _scratch(spec, tensors)
    step, evaluation = tensors.step(spec, keep_gradients=keep) * share, 0.0
    if spec.test and not spec.emulated:
        evaluation = tensors.evaluation(spec) * share + gradients * (keep and not servers)
    found = [Need(stays, step, evaluation, threads=threads)]
    return [*found, _server(spec, tensors, servers)] if servers else found


def _share(spec: RunSpec) -> float:
    """The part of the model that a worker has, if all parts are equal."""
    grid = spec.method.grid(options_of(spec))
    return 1 / (grid.stages * grid.shards)


def _server(spec: RunSpec, tensors: ModelTensors, servers: int) -> Need:
    """The initial weights, and a copy while they are made; of its own part: weights, optimizer state, a copy that is
    sent, and a gradient of each worker.
    """
    layout = Layout(tensors.weights // 4, tensors.trained // 4, servers, 4)
    part = max(layout.bytes_of_server(server) for server in range(servers))
    others = tensors.weights - part  # the leader collects them at the end
    own = part * (2 + tensors.optimizer(spec) + (spec.workers or 1))
    return Need(2 * tensors.weights + others + own, server=True)


def _scratch(spec: RunSpec, tensors: ModelTensors) -> int:
    """The buffers for pieces that a rank receives and adds to its own."""
    collective = AVERAGINGS[options_of(spec)["averaging"]]
    limit = int(spec.bucket_mb * 2**20) if spec.method.averaging else tensors.trained
    length = min(tensors.trained, limit) // 4
    plan = collective.plan(0, min(spec.workers or 1, MOST_SIMULATED), length)
    added = [each.stop - each.start for each in plan if isinstance(each, Recv) and each.add]
    return 4 * min(WINDOW, len(added)) * max(added, default=0)


@dataclass(frozen=True)
class MemoryModel:
    """PRIOR after the probes: means and covariance; None if probes do not have the memory of a real training."""

    tensors: ModelTensors
    mean: Array | None
    covariance: Array
    noise: float = 1.0  # relative to NOISE
    cores: int = 1

    @property
    def estimated(self) -> bool:
        return self.mean is None

    def predict(self, spec: RunSpec) -> tuple[float, float, float]:
        """The bytes of the rank that needs most, and a 90 % interval."""
        threads = spec.threads or max(1, self.cores // (spec.workers or 1))
        needs = needs_of(spec, self.tensors, threads)
        return max(_estimate(need) if self.mean is None else self._fitted(need, self.mean) for need in needs)

    def _fitted(self, need: Need, mean: Array) -> tuple[float, float, float]:
        value = need.stays + float(need.row @ mean)
        error = float(np.hypot(np.sqrt(need.row @ self.covariance @ need.row), self.noise * _noise(value)))
        return value, max(need.stays, value - QUANTILE * error), value + QUANTILE * error


def _estimate(need: Need) -> tuple[float, float, float]:
    """Of a device that was not measured: its tensors, and what a library may add; without the libraries themselves."""
    value = need.stays + need.step
    return value, value, need.stays + MOST_ESTIMATED * need.step


def fit_memory(probes: Sequence[Probe], spec: RunSpec) -> MemoryModel:
    """Of the spec's model; without probes, it estimates the memory of a device. Imports torch."""
    from paceline.predict.live import ModelTensors

    tensors, covariance = ModelTensors(spec), np.diag(PRIOR_ERROR**2)
    measured = [each for probe in probes if _on_cpu(probe) for each in _peaks(probe, tensors)]
    if not measured:
        return MemoryModel(tensors, None, covariance)
    needs, peaks = [need for need, _ in measured], np.array([peak for _, peak in measured])
    rows = np.array([need.row for need in needs])
    rest = peaks - [need.stays for need in needs] - rows @ PRIOR
    weights = 1 / np.array([_noise(peak) for peak in peaks]) ** 2
    covariance = np.linalg.inv(np.linalg.inv(covariance) + (rows.T * weights) @ rows)
    change = covariance @ (rows.T @ (weights * rest))
    left = (rest - rows @ change) ** 2 * weights
    noise = max(1.0, float(np.sqrt(left.sum() / max(1, len(left) - 2))))
    return MemoryModel(tensors, PRIOR + change, covariance, noise, int(probes[0].cluster.cores))


def _noise(peak: float) -> float:
    return float(np.hypot(NOISE, RELATIVE_NOISE * peak))


def _on_cpu(probe: Probe) -> bool:
    """Whether the memory of its processes is all that its training needed."""
    return not probe.run.emulated and (probe.spec.device == "cpu" or not probe.run.environment.get("gpus"))


def _peaks(probe: Probe, tensors: ModelTensors) -> list[tuple[Need, float]]:
    """The needs of the rank with the highest peak, among workers and among servers."""
    peaks, servers = probe.run.summary.peak_rss_bytes, probe.servers
    if len(peaks) < probe.run.summary.ranks:
        return []
    needs = needs_of(probe.spec, tensors, probe.run.summary.threads or 1)
    parts = (peaks[servers:], peaks[:servers])
    return [(need, float(max(own))) for need, own in zip(needs, parts, strict=False) if max(own, default=0)]
