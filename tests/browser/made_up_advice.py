"""An advice that nobody computed: settings on two places, all bases, prices, a deadline, and names that are HTML."""

from __future__ import annotations

from paceline.advise.advice import (
    EXTRAPOLATED,
    MEASURED,
    PREDICTED,
    Advice,
    BatchPoint,
    Choice,
    Learning,
    LinkPoint,
    Pricing,
)
from paceline.predict.limits import COMPUTE, LATENCY, LINK
from paceline.predict.ranges import Range

HERE, CLUSTER = "processes on this machine", "machines over 1 Gbit/s links"
COSTS = {"allreduce": 0.010, "ring": 0.014, "ps-sync": 0.09}  # seconds of a step for each further worker
COMPUTING, STEPS, BATCH, CRITICAL = 0.4, 90_000, 64, 700.0
MARGIN, PRICE = 0.1, 0.9
MANY = "more than 4 times the 4 workers of the probes"
NOT_LINKED = "links that were not measured"
RATES = (1e7, 5e7, 1e8, 2e8, 5e8, 1e9, 2e9, 5e9, 1e10, 2.5e10, 1e11)


def range_of(value: float, part: float) -> Range:
    return Range(value, value * (1 - part), value * (1 + part))


def updates(batch: int) -> float:
    """As a multiple of those with BATCH."""
    return (1 + CRITICAL / batch) / (1 + CRITICAL / BATCH)


def choice(where: str, strategy: str, workers: int, batch: int, *, name: str = "") -> Choice:
    step = COMPUTING * batch / BATCH / workers + COSTS.get(strategy, 0.0) * (workers - 1) + 0.01
    beyond = tuple(what for what, applies in ((MANY, workers > 16), (NOT_LINKED, where != HERE)) if applies)
    basis = EXTRAPOLATED if workers > 16 else MEASURED if where == HERE and workers <= 2 else PREDICTED
    part = {MEASURED: 0.02, PREDICTED: 0.06, EXTRAPOLATED: 0.25}[basis]
    steps = STEPS * updates(batch)
    whole, relative = step * steps, step * steps / ((COMPUTING + 0.01) * STEPS)
    machines = 1 if where == HERE else workers + (strategy == "ps-sync")
    memory = 2.1e9 + 1.5e7 * batch / workers
    return Choice(
        where + name,
        strategy,
        workers,
        machines,
        batch,
        None if batch == BATCH else 0.01 * (batch / BATCH) ** 0.5,
        basis,
        beyond if basis == EXTRAPOLATED else (),
        range_of(step, part),
        range_of(steps, 0.1),
        range_of(whole, part),
        range_of(relative, part),
        0.97 if relative * (1 + part) < 1 / (1 + MARGIN) else 0.002,
        range_of(machines * whole / 3600 * PRICE, part),
        range_of(memory, 0.1),
        memory < 8e9,
        COMPUTE if workers < 8 else LATENCY if strategy == "ps-sync" else LINK,
        step / 3,
        step / 2,
        step / 3,
        120_000_000,
        f"paceline train resnet18{name} --data cifar10 --strategy {strategy} --workers {workers} "
        f"--global-batch {batch} --epochs 90 --transport gloo",
    )


def link_points() -> tuple[LinkPoint, ...]:
    found = []
    for workers in (2, 4, 8, 16):
        for rate in RATES:
            relative = 1 / workers + 8 * 4.5e7 / rate / COMPUTING + 0.01 * workers
            found.append(LinkPoint(rate, workers, "ring" if rate > 1e8 else "allreduce", range_of(relative, 0.12), 0.5))
    return tuple(found)


def made_up_advice(name: str = "") -> Advice:
    """`name` is added to everything that a user could have named."""
    alone = choice(HERE, "sequential", 1, BATCH, name=name)
    found = [alone]
    found += [choice(where, strategy, workers, batch, name=name)
              for where, most in ((HERE, 4), (CLUSTER, 64)) for strategy in COSTS for workers in (2, 4, 8, 16, 32, 64)
              if workers <= most for batch in (BATCH, 4 * BATCH, 16 * BATCH)]  # fmt: skip
    found.sort(key=lambda each: each.relative.value)
    fitting = [each for each in found if each.fits]
    front: list[Choice] = []
    for each in fitting:
        if each.money and (not front or each.money.value < (front[-1].money or each.money).value):
            front.append(each)
    best = next(each for each in fitting if each.basis == PREDICTED)
    cheap = next(each for each in fitting if each.money and each.money.high < 12)
    batches = tuple(BatchPoint(BATCH * 2**power, range_of(updates(BATCH * 2**power), 0.02 * power))
                    for power in range(5))  # fmt: skip
    return Advice(
        f"resnet18{name}",
        "cifar10",
        f"paceline train resnet18{name} --data cifar10 --epochs 90",
        "emulated:0.4",
        CLUSTER,
        MARGIN,
        True,
        f"Distribute: {best.workers} {best.where} with {best.strategy} would take {best.relative.value:.2f} of the "
        "time of one (predicted).",
        (
            f"One process{name} takes 10.3 h (10.0 h–10.5 h).",
            f"To distribute: `{best.command}`",
            "It is worth it from 2 Gbit/s on with 4 machines (predicted).",
        ),
        alone,
        best,
        next(each for each in fitting if each.where.startswith(HERE)),
        tuple(found),
        tuple(front),
        next(each for each in reversed(fitting) if each.seconds and each.seconds.high < 4 * 3600),
        cheap,
        4 * 3600.0,
        12.0,
        link_points(),
        Learning("", range_of(CRITICAL, 0.3), range_of(1.1 * CRITICAL, 0.2), batches),
        Pricing("EUR", f"prices.toml{name}", "2026-10-01", True),
        312.0,
        7,
        (f"pipeline cannot have the options of this command{name}", "ps-async: `--momentum` is not used by it"),
    )
