"""The types of everything in a run folder, and their version.

The version has two numbers. `schema` changes when older programs could misread a file; a file of another `schema` is
refused. `minor` grows when fields or kinds of lines are added; readers ignore lines of kinds that they do not know,
and keep fields that a later version has added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

from paceline.layout import Grid
from paceline.strict_json import LARGEST, Bounds, Count, Positive, Ranks, Seconds, build

SCHEMA = 1
MINOR = 7

COMPLETED = "completed"
INTERRUPTED = "interrupted"
FAILED = "failed"
RUNNING = "running"
STATUSES = (COMPLETED, INTERRUPTED, FAILED, RUNNING)

# Tasks whose results are read in a special way: by their accuracy, and with their perplexity, exp(loss).
CLASSIFICATION = "classification"
LANGUAGE_MODEL = "language-model"


# summary.json


@dataclass(repr=False)
class Summary:
    """summary.json: the results of a run.

    The lists from `cpu_seconds` on have a value for each rank, and are empty where a run did not come to its end. In a
    run that was continued they count from there.
    `cpu_seconds` is the processor time that each rank's process used for training.

    `grid` says how the workers divide the model: replicas, and the stages and shards of each. `figures` is what only
    this strategy measures, under the strategy's name; the strategy's description has their type.

    `task` is what the model was trained for. Every task has a loss; accuracies are there if the task has one, and
    `train_metrics`, `validation_metrics` (tables) and `test_metrics` are its other figures by name.
    Lists of training have a value for each epoch, lists of validation a value for each validation, which was after
    `validation_steps` updates (empty in folders of before: at the end of each epoch). `best_step` is that of the best
    one, whose weights were tested and saved, and `best_epoch` its epoch. `stopped_early` says why training ended
    before its last step.
    `confusion` says how often the test samples of each class (a row) were taken for each class (a column).

    `model_properties` are `dropout` and `batch-norm`, where the model has such layers; None in folders of before.

    `resumed` are the numbers of updates after which the run was continued from a checkpoint; `skipped` is how many
    steps made no update, because a loss or a gradient was not finite.

    `disturbed` says why its times should not be compared with others, where other programs used its processors.
    `verdict` says what its steps waited for, and what to try next; `slow_rank` is the rank that the others waited for,
    if there was one. Both are of the last few hundred steps, and None in runs that are too short or have one worker.

    Where `compute` is not `real` but emulated:…, nothing was trained: there are no losses and accuracies, and times are
    those of ranks that waited `compute_seconds` for each batch instead of computing, and sent gradients that are
    `shrink` times smaller than those of the model's `parameters`.

    `folder` is where it was read from or written to; `newer` are fields that a later version has added. Both are not
    fields of the file.
    """

    status: str
    strategy: str
    workers: Annotated[int, Bounds(1, 100_000)]
    transport: str
    model: str
    data: str
    batch_size: Positive
    global_batch: Positive
    epochs: Count
    seed: int
    schema: int = SCHEMA
    minor: Count = MINOR
    task: str = CLASSIFICATION
    compute: str = "real"
    compute_seconds: Seconds | None = None
    shrink: Positive = 1
    servers: Ranks = 0
    grid: Grid = field(default_factory=lambda: Grid(0))  # every worker has the whole model, if none is given
    error: str | None = None
    failed_rank: int | None = None
    disturbed: str | None = None
    verdict: str | None = None
    slow_rank: Ranks | None = None
    steps: int = 0
    resumed: list[Count] = field(default_factory=list)
    skipped: Count = 0
    parameters: int | None = None
    model_properties: list[str] | None = None
    threads: int | None = None
    overlap: bool | None = None
    read_seconds: Seconds | None = None
    update_seconds: Seconds | None = None
    epoch_seconds: list[Seconds] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    train_accuracy: list[float] = field(default_factory=list)
    train_metrics: list[dict[str, float]] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)
    validation_accuracy: list[float] = field(default_factory=list)
    validation_metrics: list[dict[str, float]] = field(default_factory=list)
    validation_steps: list[Count] = field(default_factory=list)
    best_epoch: int | None = None
    best_step: Count | None = None
    stopped_early: str | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    test_metrics: dict[str, float] = field(default_factory=dict)
    confusion: list[list[int]] | None = None
    total_seconds: Seconds | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    wire: str | None = None
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    cpu_seconds: list[float] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)
    bytes_received: list[int] = field(default_factory=list)
    messages_sent: list[int] = field(default_factory=list)
    messages_received: list[int] = field(default_factory=list)
    comm_seconds: list[float] = field(default_factory=list)
    input_seconds: list[float] = field(default_factory=list)
    peak_rss_bytes: list[int] = field(default_factory=list)
    folder: Path | None = field(default=None, init=False, compare=False, repr=False)
    newer: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.grid = self.grid if self.grid.replicas else Grid(self.workers)

    @property
    def ranks(self) -> int:
        return self.servers + self.workers

    @property
    def emulated(self) -> bool:
        return self.compute != "real"

    @property
    def counted_steps(self) -> int:
        """The steps that the lists with a value for each rank are about."""
        return self.steps - (self.resumed[-1] if self.resumed else 0)

    @property
    def own_figures(self) -> dict[str, Any]:
        """What only its strategy measures."""
        return self.figures.get(self.strategy, {})

    @property
    def best_validation(self) -> int | None:
        """The index of the best validation in the lists of validation."""
        steps = self.validation_steps
        return steps.index(self.best_step) if self.best_step in steps else self.best_epoch

    def add_epochs(self, lines: Iterable[Epoch]) -> None:
        """What the epochs' lines say; of an epoch that was made again, the last one counts."""
        by_number = {line.epoch: line for line in lines}
        epochs = [by_number[number] for number in sorted(by_number)]
        self.epoch_seconds = [line.seconds for line in epochs]
        self.train_loss = [line.loss for line in epochs if line.loss is not None]
        self.train_accuracy = [line.accuracy for line in epochs if line.accuracy is not None]
        self.train_metrics = [line.metrics for line in epochs if line.metrics]

    def add_validations(self, lines: Sequence[Validation]) -> None:
        """What the validations' lines say, in their order."""
        steps = [line.step for line in lines if line.step is not None]
        self.validation_steps = steps if len(steps) == len(lines) else []
        self.validation_loss = [line.loss for line in lines]
        self.validation_accuracy = [line.accuracy for line in lines if line.accuracy is not None]
        self.validation_metrics = [line.metrics for line in lines if line.metrics]

    def add_test(self, line: Validation) -> None:
        self.test_loss, self.test_accuracy, self.test_metrics = line.loss, line.accuracy, line.metrics

    def __repr__(self) -> str:
        where = f", {self.folder}" if self.folder else ""
        return f"<Summary: {self.status}, {self.model} on {self.data}, {self.strategy}, {self.steps} steps{where}>"

    def __str__(self) -> str:
        from paceline.run.rendered import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        """As notebooks show it."""
        from paceline.run.rendered import as_html

        return as_html(self)

    def as_dict(self) -> dict[str, Any]:
        """As summary.json has it."""
        values = asdict(self)
        del values["folder"], values["newer"]
        return values | self.newer


# Lists of the summary that have a value for each rank.
BY_RANK = ("cpu_seconds", "bytes_sent", "bytes_received", "messages_sent", "messages_received", "comm_seconds",
           "input_seconds", "peak_rss_bytes")  # fmt: skip

# What minor version 0 had as fields of every summary: figures of one family of strategies, and options of the spec.
_MOVED = ("security", "staleness", "staleness_mean", "staleness_max", "lost_workers", "returns", "dropped_messages",
          "gradients", "wait_seconds")  # fmt: skip
_IN_SPEC = ("microbatches", "schedule", "averaging", "recompute")
# What fields were called before minor version 4, also in a paper's numbers in bench.json.
_RENAMED = {"images_per_second": "samples_per_second"}


def build_summary(values: Any) -> Summary:
    """A summary of this version from parsed JSON of this one, an earlier or a later minor one. Raises ValueError."""
    values = of_this_schema(values)
    newer: dict[str, Any] = {}
    if isinstance(values, dict):
        values = dict(values)
        if isinstance(values.get("minor"), int) and values["minor"] > MINOR:
            known = {each.name for each in fields(Summary) if each.init}
            newer = {name: values.pop(name) for name in list(values) if name not in known}
        else:
            values = _from_minor_0(values) if "minor" not in values else values
            values = with_present_names(values) if values.get("minor", 0) != MINOR else values
    summary = build(Summary, values)
    if summary.status not in STATUSES:
        raise ValueError(f"status is {summary.status[:40]!r}, and one of {', '.join(STATUSES)} is expected")
    summary.newer = newer
    return summary


def _from_minor_0(values: dict[str, Any]) -> dict[str, Any]:
    stages, shards, workers = values.pop("stages", 1), values.pop("tensor", 1), values.get("workers")
    if all(isinstance(each, int) and each > 0 for each in (stages, shards, workers)):
        if workers % (stages * shards):
            raise ValueError(f"{workers} workers cannot be replicas of {stages} stages and {shards} shards")
        values["grid"] = {"replicas": workers // (stages * shards), "stages": stages, "shards": shards}
    for name in _IN_SPEC:
        values.pop(name, None)
    own = {name: values.pop(name) for name in _MOVED if name in values}
    values["figures"] = {values.get("strategy", ""): own} if any(own.values()) else {}
    return values


def with_present_names(values: dict[str, Any]) -> dict[str, Any]:
    """The same with the names that fields have now."""
    return {_RENAMED.get(name, name): value for name, value in values.items()}


def of_this_schema(values: Any) -> Any:
    if isinstance(values, dict) and values.get("schema") != SCHEMA:
        raise ValueError("it is of another version")
    return values


# env.json


@dataclass(frozen=True)
class RankRow:
    """Where a rank was."""

    rank: Ranks
    host: str
    role: str = "worker"
    pid: Count = 0


Rate = Annotated[float, Bounds(1e-3, LARGEST)]


@dataclass(frozen=True)
class LabNode:
    """A node of a lab: the speeds of its link."""

    up: Rate
    down: Rate
    cpu: Rate | None = None
    speed: Rate | None = None
    noise: Annotated[float, Bounds(0, LARGEST)] | None = None
    rack: Count | None = None


@dataclass(frozen=True)
class Lab:
    """The lab that a run was in; it has more fields than these, which `paceline lab` describes."""

    nodes: tuple[LabNode, ...]
    mtu: Positive = 1500
    racks: tuple[dict[str, Any], ...] = ()
    faults: tuple[dict[str, Any], ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """env.json: the ranks, and the programs and the machine that they ran on."""

    ranks: tuple[RankRow, ...]
    schema: int = SCHEMA
    minor: Count = MINOR
    python: str | None = None
    torch: str | None = None
    platform: str | None = None
    processor: str | None = None
    cores: Positive | None = None
    gpus: tuple[str, ...] | None = None
    command: tuple[str, ...] = ()
    lab: Lab | None = None


# bench.json


@dataclass(frozen=True)
class Bench:
    """bench.json in the folder of an experiment: what it is, in words, which runs it has, and what they were made on.

    A row of `paper` has what it is to be set beside (`match`: workers, nodes, …) and the paper's numbers, by the names
    that ours have. `claims` are tables, as the experiment's file has them. `draw` are charts; `failed` says why, by the
    names of runs; `left_out` are grids that this machine cannot run. `here` is what runs must have in common to be
    compared.
    """

    name: str
    title: str
    about: str
    source: str
    limits: tuple[str, ...]
    quick: bool
    repeats: int
    draw: tuple[str, ...]
    paper: tuple[dict[str, Any], ...]
    runs: tuple[str, ...]
    failed: dict[str, str]
    left_out: tuple[str, ...]
    here: dict[str, Any]
    claims: tuple[dict[str, Any], ...] = ()
    schema: int = SCHEMA


# Lines of rank_N.jsonl


@dataclass(frozen=True)
class Line:
    """A line of a file of JSON lines; `kind` says which of these it is."""

    kind: ClassVar[str]

    def superseded(self, by: Resumed) -> bool:
        """Whether a training that was resumed has done this again, or may not get there."""
        return False


@dataclass(frozen=True)
class Resumed(Line):
    """The run was continued after this many updates, in this epoch, of which so many samples were used.

    Lines above that are about later updates do not count.
    """

    kind: ClassVar[str] = "resumed"
    step: Count
    epoch: Count
    used: Count
    time: Seconds


@dataclass(frozen=True)
class Checkpoint(Line):
    """A checkpoint after this many updates is complete: its bytes, and how long it was written in the background."""

    kind: ClassVar[str] = "checkpoint"
    step: Count
    time: Seconds
    bytes: Count
    seconds: Seconds


@dataclass(frozen=True)
class Start(Line):
    """The rank's process begins to write; a rank that was started again has several."""

    kind: ClassVar[str] = "start"
    rank: Ranks
    time: Seconds
    schema: int = SCHEMA
    minor: Count = MINOR


@dataclass(frozen=True)
class Planned(Line):
    """How many updates and epochs the run makes, counted from its start, if nothing ends it earlier."""

    kind: ClassVar[str] = "planned"
    steps: Count
    epochs: Count


@dataclass(frozen=True)
class Regrouped(Line):
    """Elastic runs: after this many updates, this rank goes on with these workers, in a new generation.

    `seconds` is how long it did not train, from the end of its last step, or from when it was ready to join. `lost` are
    the workers that have ended since the generation before, `joined` those that take part from here on.
    """

    kind: ClassVar[str] = "regrouped"
    generation: Count
    members: tuple[Ranks, ...]
    step: Count
    time: Seconds
    seconds: Seconds
    why: str
    lost: tuple[Ranks, ...] = ()
    joined: tuple[Ranks, ...] = ()


@dataclass(frozen=True)
class Clock(Line):
    """How the clock of this rank's machine differs from that of rank 0, measured when the ranks connected.

    A time of this rank plus `offset` is a time of rank 0, give or take `uncertainty` (half of the shortest round trip;
    0 if both are on one machine). `seconds` is how long measuring took. It is valid for the lines from the `start` line
    before it up to the next.
    """

    kind: ClassVar[str] = "clock"
    offset: float
    uncertainty: Seconds
    seconds: Seconds = 0.0


@dataclass(frozen=True)
class Step(Line):
    """One update as a rank saw it: when it ended, how long it took, how many samples all ranks had, its parts.

    A server's workers make gradients, not updates: their samples are their own. Emulated compute has no loss.
    `own` are the samples that this rank itself had. `queued` is how long, of each part, the rank was ready to run and
    had no core. `figures` is what only this strategy measures. `tokens` are those of all ranks, if samples have tokens.
    `metrics` are what a user's own loop has logged beside the loss, by name; there, both are of this rank.
    `norm` is the norm of the gradient of the mean loss over all samples, before clipping, and `own_norm` that over the
    samples of this rank alone. Only some steps of data-parallel runs have them.
    """

    kind: ClassVar[str] = "step"
    step: Count
    epoch: Count
    time: Seconds
    seconds: Annotated[float, Bounds(1e-9, 1e10)]
    samples: Positive
    spans: dict[str, Seconds]
    loss: float | None = None
    lr: float | None = None
    own: Count | None = None
    queued: dict[str, Seconds] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    tokens: Count | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    norm: float | None = None
    own_norm: float | None = None

    def superseded(self, by: Resumed) -> bool:
        return self.step >= by.step


@dataclass(frozen=True)
class Timeline(Line):
    """One step of a stage, event by event. `time` is when it began, in seconds of the Unix clock.

    An event is [what, micro-batch (-1: none), seconds since `time`, how long].
    """

    kind: ClassVar[str] = "timeline"
    step: Count
    time: Seconds
    events: tuple[tuple[Any, ...], ...]

    def superseded(self, by: Resumed) -> bool:
        return self.step >= by.step


@dataclass(frozen=True)
class Epoch(Line):
    """An epoch that has ended; emulated compute has no loss and no accuracy. `metrics` are other figures, by name."""

    kind: ClassVar[str] = "epoch"
    epoch: Count
    seconds: Seconds
    samples: Count
    loss: float | None = None
    accuracy: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def superseded(self, by: Resumed) -> bool:
        return self.epoch >= by.epoch


@dataclass(frozen=True)
class Validation(Line):
    """The model after `step` updates, in this epoch, on the validation set.

    Lines of earlier versions have no `step`: they are of the end of the epoch.
    """

    kind: ClassVar[str] = "validation"
    epoch: Count
    loss: float
    accuracy: float | None = None
    samples: Count | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    step: Count | None = None

    def superseded(self, by: Resumed) -> bool:
        return self.epoch >= by.epoch if self.step is None else self.step >= by.step

    @property
    def figures(self) -> dict[str, float]:
        """The loss and all others, by name."""
        return {"loss": self.loss, **({} if self.accuracy is None else {"accuracy": self.accuracy}), **self.metrics}


@dataclass(frozen=True)
class FinalTest(Validation):
    """The final model, on the test set."""

    kind: ClassVar[str] = "test"


@dataclass(frozen=True)
class Signal(Line):
    """The rank's process was sent a signal that asks it to stop."""

    kind: ClassVar[str] = "signal"
    signal: Count
    time: Seconds

    def superseded(self, by: Resumed) -> bool:
        return True


@dataclass(frozen=True)
class Error(Line):
    """Why the rank ended: `own` if it was its own fault, else what another rank made it see.

    `after` are the ranks whose errors it could see by then; `peer` the rank it lost or waited for in vain, `timeout`
    if it waited until the deadline, `stopped` if that rank's process was stopped. `everyone`: all ranks found the error
    together; `blames` the rank whose fault that was.
    """

    kind: ClassVar[str] = "error"
    error: str
    time: Seconds
    own: bool = False
    after: tuple[Ranks, ...] = ()
    exit_code: Count = 1
    everyone: bool = False
    peer: Ranks | None = None
    stopped: bool = False
    timeout: bool = False
    blames: Ranks | None = None

    def superseded(self, by: Resumed) -> bool:
        return True


@dataclass(frozen=True)
class End(Line):
    """The rank's last line, if it came to its end; `status` is the run's."""

    kind: ClassVar[str] = "end"
    time: Seconds
    status: str | None = None

    def superseded(self, by: Resumed) -> bool:
        return True


LINES: tuple[type[Line], ...] = (Start, Clock, Resumed, Regrouped, Planned, Step, Timeline, Epoch, Validation,
                                 FinalTest, Checkpoint, Signal, Error, End)  # fmt: skip


# Lines of node_NAME.jsonl

Cores = Annotated[float, Bounds(0, 1e6)]
LOOPBACK = "lo"


@dataclass(frozen=True)
class Traffic:
    """What an interface has counted since it was made; drops are packets."""

    rx_bytes: int
    tx_bytes: int
    rx_packets: int
    tx_packets: int
    rx_drops: int
    tx_drops: int


@dataclass(frozen=True)
class Gpu:
    """Which part of the last moments it was busy, and its memory in use."""

    busy: float | None
    memory_bytes: int | None


@dataclass(frozen=True)
class NodeStart(Line):
    """A node that is sampled from here on. In the lab (`own_processes`) CPU and memory are its processes' alone.

    Nodes with the same `machine` share its processors.
    """

    kind: ClassVar[str] = "node"
    name: str
    cores: Positive | None
    memory_bytes: int | None
    period: Seconds
    clock: str
    own_processes: bool
    machine: str | None = None
    schema: int = SCHEMA
    minor: Count = MINOR


@dataclass(frozen=True)
class NodeSample(Line):
    """A node at one moment, in seconds of the Unix clock. None is what could not be known.

    `cpu` is how many cores were busy on average since the sample before; `run_cpu` and `run_memory_bytes` are of the
    run's ranks on this node alone. `gpus` are all of the machine, whoever uses them.

    Of the whole machine, also in the lab: `machine_cpu` is how many cores its processes used (interrupts left out),
    `steal` how many cores the hypervisor withheld from it, `pressure` the part of the time in which some process waited
    for a core. `preemptions` is how often a second the kernel took a core from a main thread of the run (in the lab, of
    the node).
    """

    kind: ClassVar[str] = "sample"
    time: Seconds
    cpu: Cores | None
    memory_bytes: int | None
    run_cpu: Cores | None = None
    run_memory_bytes: int | None = None
    interfaces: dict[str, Traffic] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    machine_cpu: Cores | None = None
    steal: Cores | None = None
    pressure: Cores | None = None
    preemptions: Annotated[float, Bounds(0, 1e9)] | None = None

    def counted(self, *, alone: bool) -> list[Traffic]:
        """The interfaces whose traffic counts: all but loopback, or loopback where the run is on one node."""
        return [traffic for name, traffic in self.interfaces.items() if (name == LOOPBACK) == alone]


@dataclass(frozen=True)
class NodeEnd(Line):
    """Sampling ended in order: how many samples there are, and the processor time that taking them cost."""

    kind: ClassVar[str] = "end"
    time: Seconds
    samples: Count
    cpu_seconds: Seconds


NODE_LINES: tuple[type[Line], ...] = (NodeStart, NodeSample, NodeEnd)


@dataclass(frozen=True)
class Node:
    """A node and its samples, as read from node_NAME.jsonl."""

    name: str
    cores: int | None
    memory_bytes: int | None
    period: float
    clock: str
    own_processes: bool
    samples: list[NodeSample] = field(default_factory=list)
    machine: str | None = None
