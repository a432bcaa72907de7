"""Warnings about runs whose measurements are less reliable than they look. Each says what the reader can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from paceline.analysis.resources import preemptions
from paceline.analysis.runs import Run
from paceline.analysis.scaling import Curve, Group, along_workers
from paceline.analysis.setting import MACHINE
from paceline.analysis.statistics import ENOUGH_SAMPLES, Interval, bimodal, drift, ratio
from paceline.analysis.wording import count, listing, some
from paceline.options import LEARNING, PROBLEM
from paceline.spec import WARMUP, warmup

FEW_REPEATS = 3
MUCH_DRIFT = 0.1
# A speedup of n workers is superlinear if it exceeds n by the first margin, or its whole interval by the second.
ABOVE_IDEAL, SURELY_ABOVE = 0.02, 0.005
# The same two margins for an efficiency that rises from one number of workers to the next.
RISE, SURE_RISE = 0.1, 0.02
# Properties of models in run folders that do not record them, of minor versions 0 and 1; no other model has them.
OLDER = {
    **dict.fromkeys(("mlp", "shallow-cnn"), ()),
    **dict.fromkeys(("mnist-cnn", "alexnet", "vgg16", "vgg19"), ("dropout",)),
    **dict.fromkeys(("resnet18", "resnet50", "resnet152", "resnet50v2", "resnet101v2", "resnet152v2"), ("batch-norm",)),
}
# Options that make no difference for the loss, or are decided apart: dropout and batch-norm by the model.
NOT_LEARNED = ("lr", *WARMUP, "dropout", "sync_batchnorm", "node_speed", "node_cores")


@dataclass(frozen=True)
class RunWarning:
    """A warning `about` a run or a setting; `groups` are settings whose speeds contradict each other."""

    kind: str
    about: str
    text: str
    groups: tuple[Group, ...] = field(default=(), repr=False, compare=False)


def check_run(run: Run) -> Iterator[RunWarning]:
    """Warnings that one run gives by itself."""
    name, summary, x = run.folder.name, run.summary, run.step_seconds
    if run.disturbed:
        yield RunWarning(
            "disturbed", name, f"{run.disturbed} while it trained{_preempted(run)}: do not compare its times"
        )
    if humps := bimodal(x):
        text = (
            f"its step times have two modes, about {humps.fast:.3g} s and about {humps.slow:.3g} s "
            f"({humps.part_slow:.0%} of the steps), and the median shows only one; repeat it on an idle machine"
        )
        yield RunWarning("bimodal", name, text)
    elif abs(change := drift(x)) > MUCH_DRIFT:
        how = "slower" if change > 0 else "faster"
        yield RunWarning(
            "drift", name, f"its last steps are {abs(change):.0%} {how} than its first: step times had not stabilised"
        )
    total, epochs = summary.total_seconds, sum(summary.epoch_seconds)
    if total is not None and epochs > total * 1.001:
        yield RunWarning("sum", name, f"its epochs took {epochs:.2f} s in total, but the whole run only {total:.2f} s")
    if run.crowded:
        shared, alone = f"{count(run.cores or 0, 'core')}{_preempted(run)}", summary.workers == 1
        threads = count(summary.threads or 1, "thread")
        text = (
            f"{count(summary.workers, 'worker')} with {threads} {'has' if alone else 'each share'} {shared}: "
            f"it measures contention; use {'fewer threads' if alone else 'emulated compute, or fewer workers'}"
        )
        yield RunWarning("oversubscribed", name, text)
    if run.emulated:
        smaller = f", gradients {summary.shrink} times smaller" if summary.shrink > 1 else ""
        text = f"its compute is emulated ({summary.compute}{smaller}): times show communication and waiting only"
        yield RunWarning("emulated", name, text)
    for flag in (run.environment.get("lab") or {}).get("flags", []):
        yield RunWarning("lab", name, f"the links of its lab did not reach their speed: {flag}")


def _preempted(run: Run) -> str:
    """How often its ranks were preempted, if known."""
    often = preemptions(run)
    return "" if often is None else f" (its ranks were preempted {often:,.0f} times per second)"


def check_group(group: Group, among: Sequence[Group]) -> Iterator[RunWarning]:
    """Warnings about the repeats of one setting."""
    about = group.label(among)
    if group.too_short:
        steps = sum(len(run.seconds_per_sample) for run in group.runs)
        worth = sum(run.effective_samples for run in group.runs)
        why = "" if worth > 0.9 * steps else f", equivalent to {worth:.0f} independent ones because of autocorrelation"
        text = f"{count(steps, 'step')} after warm-up{why}: too short to rank; at least {ENOUGH_SAMPLES} are needed"
        yield RunWarning("short", about, text)
    if len(group.runs) < FEW_REPEATS:
        runs = count(len(group.runs), "run")
        yield RunWarning("repeats", about, f"{runs}: too few to know how much runs vary; make at least {FEW_REPEATS}")
        return
    middles = [float(np.median(run.step_seconds)) for run in group.runs]
    spread = (max(middles) - min(middles)) / float(np.median(middles))
    if spread > 0.2:
        yield RunWarning(
            "spread", about, f"its repeats differ by {spread:.0%}: smaller differences are not significant"
        )


def check_curve(curve: Curve, among: Sequence[Group]) -> Iterator[RunWarning]:
    """Warnings about a baseline with fewer cores, and about speedups that more workers alone cannot explain."""
    base = curve.baseline.first
    cores, threads = base.environment.get("cores"), base.summary.threads
    widest = max((point.workers * (point.group.first.summary.threads or 1) for point in curve.points), default=0)
    if not base.emulated and cores and threads and threads < min(cores, widest):
        text = f"one worker used {threads} of {cores} cores, several workers {min(cores, widest)}"
        yield RunWarning("baseline", curve.baseline.label(among), text)
    for point in curve.points:
        if _exceeds(point.speedup, point.workers, ABOVE_IDEAL, SURELY_ABOVE):
            text = (
                f"it is {point.speedup.value:.2f} times as fast as one worker: the baseline was slower than it could "
                f"be, or the workers gained from caches or from a change in the state of the machine"
            )
            yield RunWarning("superlinear", point.group.label(among), text, (curve.baseline, point.group))
    efficiencies = ", ".join(f"{point.efficiency.value:.2f}" for point in curve.points)
    workers = ", ".join(str(point.workers) for point in curve.points)
    against = f"efficiencies of {efficiencies} with {workers} workers are inconsistent: "
    yield from check_neighbours([point.group for point in curve.points], among, against)


def check_neighbours(line: Sequence[Group], among: Sequence[Group], against: str = "") -> Iterator[RunWarning]:
    """A warning if settings that differ only in their workers are faster than the added workers can explain.

    `against` is the start of its text.
    """
    rises, groups = list[str](), list[Group]()
    for fewer, more in pairwise(line):
        gain = ratio(fewer.series, more.series)
        if _exceeds(gain, more.workers / fewer.workers, RISE, SURE_RISE):
            rises.append(f"{more.workers} workers are {gain.value:.2f} times as fast as {fewer.workers}")
            groups += [fewer, more]
    if rises:
        text = (
            f"{against}{listing(rises)}, more than the added workers can explain; repeat both, as the state of the "
            f"machine probably changed between them"
        )
        yield RunWarning("efficiency", line[-1].label(among), text, tuple(groups))


def _exceeds(speedup: Interval, ideal: float, clearly: float, surely: float) -> bool:
    """Whether a speedup exceeds the ideal: its value by the first margin, or its whole interval by the second."""
    return speedup.value > ideal * (1 + clearly) or speedup.low > ideal * (1 + surely)


def _divides_alike(run: Run) -> bool:
    """Whether its model trains the same however a batch is divided.

    Dropout is different on each worker, and batch-norm is over a worker's own part of the batch, or a micro-batch.
    """
    properties = _properties(run)
    if properties is None or "dropout" in properties:
        return False
    if "batch-norm" not in properties:
        return True
    return run.microbatches == 1 and (bool(run.spec.get("sync_batchnorm")) or run.replicas == 1)


def _properties(run: Run) -> Sequence[str] | None:
    """Whether its model has dropout and batch-norm; None where that is not known."""
    recorded, older, dropout = run.summary.model_properties, OLDER.get(run.summary.model), run.spec.get("dropout")
    if recorded is not None or older is None:
        return recorded
    return older if dropout is None else [*(set(older) - {"dropout"}), *["dropout"] * (dropout > 0)]


def _training(one: Group, run: Run) -> str:
    """Everything that determines what a synchronous run trains, except how its batches are divided."""
    s, spec = run.summary, run.spec
    rate, scale = spec.get("lr"), run.replicas if spec.get("scale_lr", True) else 1
    grows = warmup(spec, scale)
    warm = (grows, rate if scale > 1 else 0) if grows[0] else None
    whole = rate if rate is None else round(rate * scale, 12)
    same = one.setting.key((PROBLEM, LEARNING), names=("validation",), without=NOT_LEARNED)
    return repr((s.global_batch, s.seed, s.epochs, s.steps, whole, warm, same))


def check_losses(groups: Sequence[Group]) -> Iterator[RunWarning]:
    """Synchronous runs of the same training whose losses differ in the first epoch.

    Later epochs are not compared: rounding errors grow with every step.
    """
    seen: dict[str, tuple[str, float]] = {}
    for group, run in ((one, run) for one in groups for run in one.runs):
        s = run.summary
        if (
            not s.train_loss
            or run.emulated
            or not run.method.exact
            or s.own_figures.get("lost_workers")
            or not _divides_alike(run)
        ):
            continue
        name, loss = seen.setdefault(_training(group, run), (run.folder.name, s.train_loss[0]))
        if not abs(loss - s.train_loss[0]) <= 0.02 * max(abs(loss), 1e-3):
            text = (
                f"its loss in the first epoch is {s.train_loss[0]:.4f}, but {loss:.4f} in {name}, which should have "
                f"trained the same model"
            )
            yield RunWarning("differ", run.folder.name, text)


def check_machines(groups: Sequence[Group]) -> Iterator[RunWarning]:
    """A warning if runs come from several machines or versions, and so cannot be compared."""
    runs: dict[str, int] = {}
    machines = {one.setting.key((MACHINE,)): one.setting.only(MACHINE) for one in groups}
    for one in groups:
        name = machines[one.setting.key((MACHINE,))].label(machines.values(), always=()) or "unknown"
        runs[name] = runs.get(name, 0) + len(one.runs)
    if len(machines) > 1:
        kinds = some([f"{name} ({count(n, 'run')})" for name, n in runs.items()])
        text = (
            f"they come from {len(machines)} machines or versions: {kinds}; speedups are computed within each of them"
        )
        yield RunWarning("mixed", "all runs", text)


def check_lines(groups: Sequence[Group], curves: Sequence[Curve]) -> Iterator[RunWarning]:
    """Checks numbers of workers for which there is no run of one worker; the others are in curves."""
    checked = {(curve.kind, id(point.group)) for curve in curves for point in curve.points}
    for kind in ("strong", "weak"):
        for members in along_workers(groups, kind):
            line = list(members.values())
            if not any((kind, id(one)) in checked for one in line):
                yield from check_neighbours(line, groups)


def all_warnings(groups: Sequence[Group], curves: Sequence[Curve]) -> list[RunWarning]:
    """All warnings, each once."""
    found = [*check_machines(groups)]
    found += [warning for group in groups for run in group.runs for warning in check_run(run)]
    found += [warning for group in groups for warning in check_group(group, groups)]
    found += [warning for curve in curves for warning in check_curve(curve, groups)]
    found += check_lines(groups, curves)
    found += check_losses(groups)
    return list({(warning.kind, warning.about, warning.text): warning for warning in found}.values())
