"""The order of work of each stage of a pipeline in a step, as data that the executor runs; no torch.

In the drawings a column is a unit of time, F2 the forward and B2 the backward pass of micro-batch 2, a dot idle time:
three stages and four micro-batches, as if a backward pass took as long as a forward pass. In all schedules, backward
passes are in the order of forward passes, so that gradients are summed as in sequential accumulation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from paceline.errors import unknown

# Receives that are posted ahead, so that they arrive while this rank computes. More would waste memory.
AHEAD = 2


class Op(StrEnum):
    RECV_ACTIVATION = "recv-activation"
    FORWARD = "forward"
    SEND_ACTIVATION = "send-activation"
    RECV_GRADIENT = "recv-gradient"
    BACKWARD = "backward"
    SEND_GRADIENT = "send-gradient"
    STEP = "step"


@dataclass(frozen=True)
class Instruction:
    """One operation on one micro-batch. STEP (average over replicas, then update) has micro-batch -1."""

    op: Op
    micro: int


Order = Callable[[int, int, int], list[Instruction]]


@dataclass(frozen=True)
class ScheduleInfo:
    """`order(stages, micros, stage)` is what a stage computes; `held` is how many micro-batches it holds at most."""

    name: str
    about: str
    order: Order
    held: Callable[[int, int, int], int]
    overlaps: bool = True  # stages work at the same time


def _forward(micro: int) -> Instruction:
    return Instruction(Op.FORWARD, micro)


def _backward(micro: int) -> Instruction:
    return Instruction(Op.BACKWARD, micro)


def one_at_a_time(_stages: int, micros: int, _stage: int) -> list[Instruction]:
    """A micro-batch goes through all stages and back before the next one starts: one stage works, the others wait.

    time      0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21 22 23
    stage 0  F0  .  .  .  . B0 F1  .  .  .  . B1 F2  .  .  .  . B2 F3  .  .  .  . B3
    stage 1   . F0  .  . B0  .  . F1  .  . B1  .  . F2  .  . B2  .  . F3  .  . B3  .
    stage 2   .  . F0 B0  .  .  .  . F1 B1  .  .  .  . F2 B2  .  .  .  . F3 B3  .  .
    """
    return [compute(micro) for micro in range(micros) for compute in (_forward, _backward)]


def gpipe(_stages: int, micros: int, _stage: int) -> list[Instruction]:
    """All forward, then all backward (GPipe, Huang et al., 2019); every stage holds all micro-batches in between.

    time      0  1  2  3  4  5  6  7  8  9 10 11
    stage 0  F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3
    stage 1   . F0 F1 F2 F3  .  . B0 B1 B2 B3  .
    stage 2   .  . F0 F1 F2 F3 B0 B1 B2 B3  .  .
    """
    return [_forward(micro) for micro in range(micros)] + [_backward(micro) for micro in range(micros)]


def one_forward_one_backward(stages: int, micros: int, stage: int) -> list[Instruction]:
    """Forward until the first gradient can arrive, then one backward and one forward in turn (PipeDream, 2019).

    It takes as long as GPipe, but a stage holds no more micro-batches than there are stages from it to the last.

    time      0  1  2  3  4  5  6  7  8  9 10 11
    stage 0  F0 F1 F2  .  . B0 F3 B1  . B2  . B3
    stage 1   . F0 F1  . B0 F2 B1 F3 B2  . B3  .
    stage 2   .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .
    """
    ahead = min(stages - 1 - stage, micros)
    todo = [_forward(micro) for micro in range(ahead)]
    for micro in range(micros):
        todo += [_forward(micro + ahead)] if micro + ahead < micros else []
        todo += [_backward(micro)]
    return todo


SCHEDULES = {
    info.name: info
    for info in (
        ScheduleInfo(
            "one-at-a-time",
            "one micro-batch through all stages and back, then the next: the baseline for the others",
            one_at_a_time,
            lambda _stages, _micros, _stage: 1,
            overlaps=False,
        ),
        ScheduleInfo(
            "gpipe",
            "all micro-batches forward, then all backward: simple, and holds them all",
            gpipe,
            lambda _stages, micros, _stage: micros,
        ),
        ScheduleInfo(
            "1f1b",
            "one forward, one backward in turn: as fast, and holds no more than there are stages",
            one_forward_one_backward,
            lambda stages, micros, stage: min(stages - stage, micros),
        ),
    )
}


def instructions(schedule: str, stages: int, micros: int, stage: int) -> list[Instruction]:
    """All instructions of a stage in one step: what it computes, each with its messages just before and after it.

    A receive blocks until its message has arrived; a send does not block. Between two neighbours, messages of one kind
    arrive in the order of the receives.
    """
    info = _checked(schedule, stages, micros, stage)
    first, last = stage == 0, stage == stages - 1
    around = {
        Op.FORWARD: (Op.RECV_ACTIVATION if not first else None, Op.SEND_ACTIVATION if not last else None),
        Op.BACKWARD: (Op.RECV_GRADIENT if not last else None, Op.SEND_GRADIENT if not first else None),
    }
    todo = []
    for compute in info.order(stages, micros, stage):
        before, after = around[compute.op]
        todo += [Instruction(op, compute.micro) for op in (before, compute.op, after) if op]
    return [*todo, Instruction(Op.STEP, -1)]


def in_flight(schedule: str, stages: int, micros: int, stage: int) -> int:
    """The most micro-batches whose activations the stage holds at once: after forward and before backward."""
    return _checked(schedule, stages, micros, stage).held(stages, micros, stage)


def recomputes(schedule: str, stages: int, micros: int, stage: int) -> bool:
    """Whether recomputing its activations saves a stage memory: not if it holds one micro-batch at a time."""
    return in_flight(schedule, stages, micros, stage) > 1


def bubble(schedule: str, stages: int, micros: int) -> float:
    """The idle part of all stages' time if all stages take equally long and messages take no time."""
    info = _checked(schedule, stages, micros, 0)
    return (stages - 1) / (micros + stages - 1) if info.overlaps else (stages - 1) / stages


def _checked(schedule: str, stages: int, micros: int, stage: int) -> ScheduleInfo:
    if schedule not in SCHEDULES:
        raise unknown("schedule", schedule, SCHEDULES)
    assert micros >= 1
    assert 0 <= stage < stages
    return SCHEDULES[schedule]
