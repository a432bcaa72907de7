"""Doubts: what in a set of runs makes a claim weaker than it looks. Each is a sentence that a reader can act on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.analysis.runs import Run
from paceline.analysis.scaling import Curve, Group
from paceline.analysis.statistics import drift, two_humps

FEW_REPEATS = 3
MUCH_DRIFT = 0.1


@dataclass(frozen=True)
class Doubt:
    """What is doubtful, about which run or setting."""

    kind: str
    about: str
    text: str


def check_run(run: Run) -> Iterator[Doubt]:
    """What one run shows about itself."""
    name, summary, x = run.folder.name, run.summary, run.step_seconds
    if humps := two_humps(x):
        text = (
            f"its steps take either about {humps.fast:.3g} s or about {humps.slow:.3g} s ({humps.part_slow:.0%} of "
            f"them): the machine was in two states, and a median shows only one; repeat it on a quiet machine"
        )
        yield Doubt("two-humped", name, text)
    elif abs(change := drift(x)) > MUCH_DRIFT:
        how = "slower" if change > 0 else "faster"
        yield Doubt("drift", name, f"its last steps are {abs(change):.0%} {how} than its first: it had not settled")
    total, epochs = summary.total_seconds, sum(summary.epoch_seconds)
    if total is not None and epochs > total * 1.001:
        yield Doubt(
            "sum", name, f"its epochs took {epochs:.2f} s together, and the whole run {total:.2f} s: one is wrong"
        )
    cores = run.environment.get("cores")
    hosts = {row["host"] for row in run.environment.get("ranks", [])}
    machines = 1 if run.environment.get("lab") else len(hosts)
    processes = summary.workers * (summary.threads or 1)
    if cores and not run.emulated and processes > cores * machines:
        text = (
            f"{summary.workers} workers of {summary.threads or 1} thread(s) share {cores * machines} cores: it "
            f"measures contention; use emulated compute, or fewer workers"
        )
        yield Doubt("oversubscribed", name, text)
    if run.emulated:
        smaller = f", gradients {summary.shrink} times smaller" if summary.shrink > 1 else ""
        text = f"its compute is emulated ({summary.compute}{smaller}): times are of communication and waiting"
        yield Doubt("emulated", name, text)
    for flag in (run.environment.get("lab") or {}).get("flags", []):
        yield Doubt("lab", name, f"its lab could not reach its speed: {flag}")


def check_group(group: Group, label: str) -> Iterator[Doubt]:
    """What repeats show about each other."""
    if len(group.runs) < FEW_REPEATS:
        count = len(group.runs)
        yield Doubt(
            "repeats", label, f"{count} run{'s' if count > 1 else ''}: too few to know how much runs differ; make 3"
        )
        return
    middles = [float(np.median(run.step_seconds)) for run in group.runs]
    spread = (max(middles) - min(middles)) / float(np.median(middles))
    if spread > 0.2:
        yield Doubt("spread", label, f"its repeats differ by {spread:.0%}: differences smaller than that are not real")


def check_curve(curve: Curve, label: str) -> Iterator[Doubt]:
    """A baseline that flatters, and speedups that cannot be."""
    base = curve.baseline.first
    cores, threads = base.environment.get("cores"), base.summary.threads
    widest = max((point.workers * (point.group.first.summary.threads or 1) for point in curve.points), default=0)
    if not base.emulated and cores and threads and threads < min(cores, widest):
        text = (
            f"one worker used {threads} of {cores} cores, and many used {min(cores, widest)}: a part of the speedup is "
            f"cores that one could have used"
        )
        yield Doubt("baseline", label, text)
    for point in curve.points:
        if point.speedup.low > point.workers * 1.05:
            text = (
                f"{point.workers} workers are {point.speedup.value:.2f} times as fast as one: the baseline is slower "
                f"than it could be"
            )
            yield Doubt("superlinear", label, text)


def check_losses(groups: Sequence[Group]) -> Iterator[Doubt]:
    """Synchronous ways of one problem and seed that learned something else: replicas that differ."""
    seen: dict[tuple[object, ...], tuple[str, float]] = {}
    for group in groups:
        for run in group.runs:
            s = run.summary
            if not s.train_loss or s.strategy in ("ps-async", "ps-bounded") or run.spec.get("dropout") != 0.0:
                continue
            key = (
                s.model,
                s.data,
                s.global_batch,
                s.seed,
                s.epochs,
                s.steps,
                run.spec.get("lr"),
                run.spec.get("optimizer"),
            )
            name, loss = seen.setdefault(key, (run.folder.name, s.train_loss[-1]))
            if abs(loss - s.train_loss[-1]) > 0.02 * max(abs(loss), 1e-3):
                text = (
                    f"its loss is {s.train_loss[-1]:.4f}, and that of {name}, the same training, {loss:.4f}: "
                    f"the replicas are not the same model"
                )
                yield Doubt("differ", run.folder.name, text)


def all_doubts(groups: Sequence[Group], curves: Iterable[Curve]) -> list[Doubt]:
    """Everything, one of a kind and text only once."""
    found = [doubt for group in groups for run in group.runs for doubt in check_run(run)]
    for group in groups:
        s = group.first.summary
        found += check_group(group, f"{s.model}, {s.strategy}, {s.workers} workers, batch {s.batch_size}")
    for curve in curves:
        found += check_curve(curve, f"{curve.label['model']}, {curve.label['strategy']}")
    found += check_losses(groups)
    return list({(doubt.kind, doubt.about, doubt.text): doubt for doubt in found}.values())
