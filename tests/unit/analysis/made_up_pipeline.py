"""Runs of pipelines that were never run: what their stages did follows from how long each takes for a pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from made_up import START, write_run
from raw_lines import RawWriter

from paceline.pipeline.plan import MEMORY, Stage, StagePlan
from paceline.pipeline.schedule import Op, instructions
from paceline.run.atomic import write_whole

WRITTEN = 20  # steps whose events are written down
FROM = {Op.RECV_ACTIVATION: (-1, Op.SEND_ACTIVATION), Op.RECV_GRADIENT: (1, Op.SEND_GRADIENT)}
Events = list[tuple[str, int, float, float]]


@dataclass(frozen=True)
class Stages:
    """A pipeline by the seconds that each stage takes for a forward pass; a backward pass takes twice as long."""

    forward: tuple[float, ...]
    replicas: int = 1
    micros: int = 8
    schedule: str = "1f1b"
    send: float = 0.0
    recompute: bool = False
    average: float = 0.0
    optimizer: float = 0.001
    planned: float = 1.0  # of what it takes

    @property
    def workers(self) -> int:
        return self.replicas * len(self.forward)

    @property
    def summary(self) -> dict[str, Any]:
        return {"stages": len(self.forward), "microbatches": self.micros, "schedule": self.schedule,
                "averaging": "ring", "recompute": self.recompute,
                "peak_rss_bytes": [(300 + 10 * rank) * 10**6 for rank in range(self.workers)]}  # fmt: skip

    def events(self, pace: float = 1.0) -> list[Events]:
        """Of one step, by stage; all take so many times as long."""
        count = len(self.forward)
        todo = [instructions(self.schedule, count, self.micros, stage) for stage in range(count)]
        at, now = [0] * count, [0.0] * count
        sent, found = dict[tuple[int, Op, int], float](), [Events() for _ in range(count)]

        def spend(stage: int, what: str, micro: int, seconds: float) -> None:
            if seconds > 0:
                found[stage].append((what, micro, now[stage], seconds))
            now[stage] += seconds

        while any(at[stage] < len(todo[stage]) for stage in range(count)):
            for stage, each in enumerate(pace * seconds for seconds in self.forward):
                while at[stage] < len(todo[stage]):
                    op, micro = todo[stage][at[stage]].op, todo[stage][at[stage]].micro
                    if op in FROM:
                        key = (stage + FROM[op][0], FROM[op][1], micro)
                        if key not in sent:
                            break
                        spend(stage, "wait", micro, max(0.0, sent[key] - now[stage]))
                    elif op is Op.FORWARD:
                        spend(stage, "forward", micro, each)
                    elif op is Op.BACKWARD:
                        spend(stage, "recompute", micro, each if self.recompute else 0.0)
                        spend(stage, "backward", micro, 2 * each)
                    elif op is not Op.STEP:
                        spend(stage, "send", micro, pace * self.send)
                        sent[stage, op, micro] = now[stage]
                    at[stage] += 1
        end = max(now)
        for stage in range(count):
            spend(stage, "average", -1, self.average)
            spend(stage, "optimizer", -1, self.optimizer)
            spend(stage, "wait", -1, max(0.0, end + self.average + self.optimizer - now[stage]))
        return found

    def plan(self) -> StagePlan:
        made = []
        for number, seconds in enumerate(self.forward):
            memory = dict.fromkeys(MEMORY, (number + 1) * 10**7)
            compute = (3 + self.recompute) * seconds + self.optimizer / self.micros
            transfer = self.planned * self.send * (2 if 0 < number < len(self.forward) - 1 else 1)
            last = number == len(self.forward) - 1
            made.append(Stage(number, number + 1, (f"layer{number}",), 1000 * (number + 1), self.planned * compute,
                              transfer, 0 if last else 400_000 // (number + 1), memory))  # fmt: skip
        return StagePlan(tuple(made), self.schedule, self.micros, 4, None, "measured")


def write_stages(folder: Path, of: Stages, paces: Sequence[float], samples: int, per_epoch: int, start: float = START,
                 losses: Sequence[float] | None = None) -> list[float]:  # fmt: skip
    """What its ranks wrote down, and its plan; the seconds of its steps."""
    write_whole(folder / "plan.json", json.dumps(of.plan().as_dict()))
    steps = [of.events(pace) for pace in paces]
    seconds = [max(event[2] + event[3] for events in step for event in events) for step in steps]
    for rank in range(of.workers):
        (folder / f"rank_{rank}.jsonl").unlink(missing_ok=True)
        lines, now = RawWriter(folder / f"rank_{rank}.jsonl"), start
        for number, step in enumerate(steps):
            events = step[rank % len(of.forward)]
            if number < WRITTEN:
                lines.write("timeline", step=number, time=now, events=events)
            now += seconds[number]
            spans: dict[str, float] = {}
            for what, _, _, spent in events:
                spans[what] = spans.get(what, 0.0) + spent
            learned = {"loss": losses[number]} if losses else {}
            lines.write("step", step=number, epoch=number // per_epoch, time=now, seconds=seconds[number],
                        samples=samples, spans=spans, **learned)  # fmt: skip
        lines.close()
    return seconds


def write_pipeline(folder: Path, of: Stages, paces: Sequence[float], batch: int = 32, **options: Any) -> Path:
    """A completed run of a pipeline."""
    taken = [max(event[2] + event[3] for events in of.events(pace) for event in events) for pace in paces]
    given = {"global_batch": batch * of.replicas, **of.summary, **options.pop("summary", {})}
    write_run(folder, taken, workers=of.workers, batch=batch, strategy="pipeline", **given, **options)
    write_stages(folder, of, paces, batch * of.replicas, len(paces))
    return folder
