"""The advice as values: the verdict, all settings with what they would take, and what they were chosen by."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.predict.ranges import Range

# It is worth it from this probability on that it is faster by the margin.
SURE, MARGIN = 0.9, 0.1
OWN_MACHINE = "processes on this machine"  # how sentences call them
MEASURED, PREDICTED, EXTRAPOLATED = BASES = ("measured", "predicted", "extrapolated")


@dataclass(frozen=True)
class Choice:
    """A way to run the whole training, and what it would take; ranges are 90 % intervals.

    `relative` is its time as a multiple of that of the best single process, and `faster` the probability that it is
    faster by the margin that was asked for. `communication_seconds` are those of a step that computes nothing.
    """

    where: str
    strategy: str
    workers: int
    machines: int  # those of servers included
    batch: int  # of an update
    lr: float | None  # None: that of the command
    basis: str  # one of BASES
    beyond: tuple[str, ...]  # in which ways it goes beyond what was measured
    step_seconds: Range
    steps: Range | None  # updates of the whole training; None: its length is not known
    seconds: Range | None  # of the whole training
    relative: Range
    faster: float
    money: Range | None
    memory: Range  # bytes of the rank that needs most
    fits: bool
    limit: str  # what limits a step: `predict.limits`
    limit_seconds: float  # of a step that would be saved without that
    compute_seconds: float  # of a step
    communication_seconds: float
    bytes_sent: int  # by the rank that sends most, in a step
    command: str


@dataclass(frozen=True)
class LinkPoint:
    """The fastest averaging of gradients with a machine for each worker, and links of this rate, in bit/s."""

    rate: float
    workers: int
    strategy: str
    relative: Range
    faster: float


@dataclass(frozen=True)
class BatchPoint:
    """Updates with this global batch, as a multiple of those with the batch of the command."""

    batch: int
    steps: Range


@dataclass(frozen=True)
class Learning:
    """What is known of how many updates each batch needs; `unknown` says why nothing is."""

    unknown: str = ""
    critical: Range | None = None  # the critical batch
    noise_scale: Range | None = None
    batches: tuple[BatchPoint, ...] = ()


@dataclass(frozen=True)
class Pricing:
    """Where the prices are from."""

    currency: str
    source: str
    dated: str
    example: bool


@dataclass(frozen=True)
class Advice:
    """`sentence` is the verdict; `reasons` are what follows it, line by line. Of `choices`, the fastest is first; their
    money includes that of the runs that the advice rests on.

    `alone` is the best single process; None if the model fits on no machine. `best` is the best distributed setting
    where it was asked for, `here` the best one on the machine of the runs, beside one process there. `front` are the
    settings of which no other is both faster and cheaper. `for_deadline` and `for_budget` are the best ones for these.
    `untried` divides the model in a way that no run had, and would be worth it; but no verdict rests on its prediction.
    """

    model: str
    data: str
    command: str
    emulated: str  # how compute was emulated; empty: it was real
    where: str
    margin: float
    distribute: bool
    sentence: str
    reasons: tuple[str, ...]
    alone: Choice | None
    best: Choice | None
    here: Choice | None
    choices: tuple[Choice, ...]
    front: tuple[Choice, ...] = ()
    for_deadline: Choice | None = None
    for_budget: Choice | None = None
    deadline: float | None = None
    budget: float | None = None
    links: tuple[LinkPoint, ...] = ()
    learning: Learning = Learning()
    pricing: Pricing | None = None
    probe_seconds: float = 0.0
    runs: int = 0
    left_out: tuple[str, ...] = ()
    untried: Choice | None = None
