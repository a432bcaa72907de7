"""An outlook that nobody predicted: many strategies, part of it beyond what was measured, and names that are HTML."""

from __future__ import annotations

from paceline.analysis.statistics import Interval
from paceline.predict.forecast import Forecast
from paceline.predict.limit_map import RATES, Cell, LimitMap, columns
from paceline.predict.limits import COMPUTE, LATENCY, LINK, SERVER, Limit
from paceline.predict.outlook import Measured, Outlook
from paceline.predict.ranges import Range

MESSAGES = {"allreduce": 3e-4, "ring": 4e-4, "reduce-bcast": 1e-4, "local-sgd": 5e-5, "ps-sync": 2e-2}
COMPUTING, BATCH, BYTES = 0.08, 32, 2.8e6
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MANY = "more than 4 times the 4 workers of the probes"


def range_of(value: float, part: float) -> Range:
    return Range(value, value * (1 - part), value * (1 + part))


def forecast(strategy: str, workers: int) -> Forecast:
    seconds = COMPUTING + 0.02 + MESSAGES[strategy] * (workers - 1) + (workers > 1) * 0.05
    sure = 0.03 if workers <= 16 else 0.1
    beyond = [MANY] if workers > 16 else []
    beyond += ["this collective was not measured"] if strategy == "reduce-bcast" and workers > 1 else []
    speed = workers * BATCH / seconds
    limit = COMPUTE if workers < 8 else SERVER if strategy == "ps-sync" else LINK
    return Forecast(strategy, workers, workers * BATCH, range_of(seconds, sure), range_of(speed, sure),
                    range_of(speed / workers / (BATCH / 0.1), sure), round(2 * BYTES), range_of(6e8, 0.1), False,
                    tuple(beyond), limit,
                    seconds / 3)  # fmt: skip


def measured(strategy: str, workers: int, name: str) -> Measured:
    said = forecast(strategy if workers > 1 else "ring", workers)
    step, speed, part = (
        Interval(1.01 * each.value, each.value, 1.02 * each.value)
        for each in (said.step_seconds, said.samples_per_second, said.efficiency)
    )
    return Measured(name, strategy, workers, step, speed, part)


def limit_map_of(strategy: str) -> LimitMap:
    cells = []
    for rate in RATES:
        for workers in columns(max(WORKERS)):
            costs = {COMPUTE: COMPUTING, LATENCY: 4e-4 * workers, (SERVER if strategy == "ps-sync" else LINK):
                     8 * BYTES / rate * (workers if strategy == "ps-sync" else workers > 1)}  # fmt: skip
            cause = max(costs, key=lambda each: costs[each])
            beyond = () if rate == 1e9 and workers <= 16 else ("links that were not measured",)
            cells.append(Cell(workers, rate, Limit(cause, costs[cause], costs), beyond))
    return LimitMap(strategy, tuple(cells))


def made_up_outlook(name: str = "resnet18") -> Outlook:
    probes = [measured("sequential", 1, f"one-{name}")]
    probes += [measured(strategy, workers, f"{strategy}-{workers}-{name}")
               for strategy in ("ring", "ps-sync") for workers in (2, 4)]  # fmt: skip
    found = [forecast(strategy, workers) for strategy in MESSAGES for workers in WORKERS]
    return Outlook(name, "cifar10", f"links of {name}" if "<" in name else "links of 1gbit", False,
                   f"emulated:{COMPUTING}", 16, tuple(probes), tuple(found), tuple(map(limit_map_of, MESSAGES)),
                   (f"pipeline cannot have the options of {name}",))  # fmt: skip
