"""What a storm cost a training, from the records of its workers."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from paceline.chaos.storm import Fault
from paceline.run.atomic import write_whole
from paceline.run.folder import CHAOS, rank_files
from paceline.run.lines import read_sound_lines
from paceline.run.records import SCHEMA, Regrouped, Step, Summary
from paceline.strict_json import dump

WINDOW_SECONDS = 1.0


@dataclass(frozen=True)
class Made:
    """An update: when it was complete, how long it took, and the generation that made it."""

    time: float
    seconds: float
    generation: int


@dataclass(frozen=True)
class Outcome:
    """`recovered` is how long after each loss of a member the next update was complete, `back` how long after it the
    worker took part again; in seconds. `goodput` compares samples with what the same workers would have made at the
    speed that the run had between faults, and `participation` the workers' time in updates with all of their time.
    """

    seconds: float
    faults: Sequence[Fault]
    seed: int
    generations: int
    again: int  # updates that were made by two generations, as far as they are recorded
    goodput: float | None
    participation: float
    recovered: Sequence[float] = field(default_factory=list)
    back: Sequence[float] = field(default_factory=list)
    schema: int = SCHEMA

    def write(self, folder: Path) -> None:
        write_whole(folder / CHAOS, dump(asdict(self), indent=1) + "\n")

    def lines(self) -> list[str]:
        """For people."""
        kinds = {fault.kind for fault in self.faults}
        how = ", ".join(f"{sum(fault.kind == kind for fault in self.faults)} {kind}" for kind in sorted(kinds))
        share = "not known: no second passed without a fault" if self.goodput is None else f"{self.goodput:.1%}"
        return [
            f"Storm with seed {self.seed}: {len(self.faults)} faults ({how or 'none'}) in {self.seconds:.0f} s, "
            f"{self.generations} generations",
            f"  next update after a loss    {_spread(self.recovered)}",
            f"  worker back after its loss  {_spread(self.back)}",
            f"  updates made again          {self.again}",
            f"  goodput                     {share} of the run's own speed between faults",
            f"  participation               {self.participation:.1%} of the workers' time was in updates",
        ]


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "–"
    ordered = sorted(seconds)
    late = ordered[math.ceil(0.95 * len(ordered)) - 1]
    return f"{median(ordered):.2f} s (median), {late:.2f} s (95 %), {ordered[-1]:.2f} s (worst) of {len(ordered)}"


def judge(folder: Path, summary: Summary, faults: Sequence[Fault], seed: int) -> Outcome:
    """What the records of the run in this folder say about these faults."""
    generations, made = _read(folder)
    again = sum(len({each.generation for each in every}) - 1 for every in made.values())
    last = [max(every, key=lambda each: each.generation) for _, every in sorted(made.items())]
    begun, ended = min(line.time for line in generations.values()), max(each.time for each in last)
    members = {number: len(line.members) for number, line in generations.items()}
    busy = sum(each.seconds * members.get(each.generation, 0) for each in last)
    usual = _usual_rate([each.time for each in last if members.get(each.generation) == summary.workers],
                        [line.time for line in generations.values()])  # fmt: skip
    recovered, back = _recovery(generations, [each.time for each in last], faults)
    return Outcome(
        ended - begun,
        faults,
        seed,
        len(generations),
        again,
        len(last) / (usual * (ended - begun)) if usual else None,
        busy / (summary.workers * (ended - begun)),
        recovered,
        back,
    )


def _read(folder: Path) -> tuple[dict[int, Regrouped], dict[int, list[Made]]]:
    """The first line of each generation, in the order of generations, and what is recorded of each update."""
    generations, made = dict[int, Regrouped](), dict[int, list[Made]]()
    for path in rank_files(folder):
        number = 0
        for line in read_sound_lines(path, Regrouped, Step):
            if isinstance(line, Regrouped):
                number = line.generation
                if number not in generations or line.time < generations[number].time:
                    generations[number] = line
            elif isinstance(line, Step):
                made.setdefault(line.step, []).append(Made(line.time, line.seconds, number))
    return dict(sorted(generations.items())), made


def _usual_rate(times: list[float], changes: list[float]) -> float | None:
    """Updates per second, in the median of the seconds in which all workers trained and nothing changed."""
    disturbed = {math.floor(change / WINDOW_SECONDS) for change in changes}
    counts = dict[int, int]()
    for time in times:
        window = math.floor(time / WINDOW_SECONDS)
        counts[window] = counts.get(window, 0) + 1
    whole = {window for window in counts if {window - 1, window + 1} <= counts.keys()} - disturbed
    quiet = [counts[window] for window in whole if not {window - 1, window + 1} & disturbed]
    return median(quiet) / WINDOW_SECONDS if quiet else None


def _recovery(
    generations: dict[int, Regrouped], updates: list[float], faults: Sequence[Fault]
) -> tuple[list[float], list[float]]:
    """How long after each loss the next update was complete, and how long after it the worker took part again."""
    recovered, back, times, rows = list[float](), list[float](), sorted(updates), list(generations.values())
    for fault in faults:
        later = [other.time for other in faults if other.worker == fault.worker and other.time > fault.time]
        until = min(later, default=math.inf)
        after = [line for line in rows if fault.time < line.time]
        lost = next((line for line in after if f"worker {fault.worker}: " in line.why and line.time < until), None)
        if lost is None:  # a worker that was stopped briefly, or had not joined
            continue
        if following := times[bisect_right(times, lost.time) :]:
            recovered.append(following[0] - fault.time)
        joined = (line for line in after if line.generation >= lost.generation and fault.worker in line.members)
        if (line := next(joined, None)) is not None:
            back.append(line.time - fault.time)
    return recovered, back
