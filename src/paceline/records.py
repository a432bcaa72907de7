"""What was measured: versioned records, written whole or as JSON lines; no torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from paceline.strict_json import (
    LARGEST,
    Bounds,
    Count,
    Positive,
    Ranks,
    Seconds,
    build,
    dump,
    naming,
    parse,
    plain,
    read_text,
)

SCHEMA = 1

COMPLETED = "completed"
INTERRUPTED = "interrupted"
FAILED = "failed"
RUNNING = "running"
STATUSES = (COMPLETED, INTERRUPTED, FAILED, RUNNING)


@dataclass
class Summary:
    """summary.json: one run. The lists from `gradients` on are by rank, and empty where a run did not come to its end.

    Of parameter servers alone: how stale the gradients were (how many had missed how many updates), workers that were
    lost, returns to snapshots, messages that servers dropped; by rank, gradients applied and seconds spent waiting.
    `cpu_seconds` is the processor time that each rank's process used for training.

    `disturbed` says why its times are not to be compared with others', where other programs used its processors.

    Where `compute` is not `real` but emulated:…, nothing was trained: there are no losses and accuracies, and times are
    those of ranks that waited `compute_seconds` for each batch instead of computing, and sent gradients that are
    `shrink` times smaller than those of the model's `parameters`.

    Where no worker has the whole model, a replica is `stages` workers (pipeline) or `tensor` workers (tensor); replicas
    average by `averaging`.

    `folder` is where it was read from or written to; the file does not have it.
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
    compute: str = "real"
    compute_seconds: Seconds | None = None
    shrink: Positive = 1
    servers: Ranks = 0
    stages: Positive = 1
    tensor: Positive = 1
    microbatches: Positive = 1
    schedule: str | None = None
    averaging: str | None = None
    recompute: bool = False
    error: str | None = None
    failed_rank: int | None = None
    disturbed: str | None = None
    steps: int = 0
    parameters: int | None = None
    threads: int | None = None
    overlap: bool | None = None
    read_seconds: Seconds | None = None
    update_seconds: Seconds | None = None
    epoch_seconds: list[Seconds] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    train_accuracy: list[float] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)
    validation_accuracy: list[float] = field(default_factory=list)
    best_epoch: int | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    total_seconds: Seconds | None = None
    images_per_second: float | None = None
    wire: str | None = None
    security: str | None = None
    staleness: dict[str, int] | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    lost_workers: list[dict[str, Any]] = field(default_factory=list)
    returns: list[dict[str, Any]] = field(default_factory=list)
    dropped_messages: dict[str, int] = field(default_factory=dict)
    gradients: list[int] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)
    bytes_received: list[int] = field(default_factory=list)
    messages_sent: list[int] = field(default_factory=list)
    messages_received: list[int] = field(default_factory=list)
    comm_seconds: list[float] = field(default_factory=list)
    input_seconds: list[float] = field(default_factory=list)
    peak_rss_bytes: list[int] = field(default_factory=list)
    folder: Path | None = field(default=None, init=False, compare=False, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """As summary.json has it."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}


def check_summary(folder: Path) -> Summary:
    """The folder's summary; raises OSError or ValueError if there is none, or one that cannot be."""
    summary = build(Summary, _of_this_schema(parse(read_text(folder / "summary.json"))))
    if summary.status not in STATUSES:
        raise ValueError(f"status is {summary.status[:40]!r}, and one of {', '.join(STATUSES)} is expected")
    summary.folder = folder
    return summary


def read_summary(folder: Path) -> Summary | None:
    """The folder's summary, or None where there is none that can be read."""
    try:
        return check_summary(folder)
    except (OSError, ValueError):
        return None


def write_summary(folder: Path, summary: Summary) -> None:
    if summary.status != RUNNING:
        give_space(folder)
    write_whole(folder / "summary.json", dump(summary.as_dict(), indent=1) + "\n")
    summary.folder = folder


def conclude(folder: Path, summary: Summary) -> None:
    """Write the last summary, which nobody who settles the run at the same moment replaces by a poorer one."""
    with sole_writer(folder):
        write_summary(folder, summary)


LOCK_SECONDS = 1.0


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Let no other process of this machine decide how the run ended; but do not wait long for one that hangs."""
    lock = None
    with contextlib.suppress(OSError):  # there is no folder, or its file system cannot lock
        lock = os.open(folder, os.O_RDONLY)
        deadline = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


# Space that a run holds from its start, so that it can still say how it ended when the disk is full.
HELD, HELD_BYTES = ".held", 1 << 20


def hold_space(folder: Path) -> None:
    """Raises OSError if there is none."""
    with (folder / HELD).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, HELD_BYTES)


def give_space(folder: Path) -> None:
    (folder / HELD).unlink(missing_ok=True)


def _of_this_schema(values: Any) -> Any:
    if isinstance(values, dict) and values.get("schema") != SCHEMA:
        raise ValueError("it is of another version")
    return values


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
    rack: Count | None = None


@dataclass(frozen=True)
class Lab:
    """The lab that a run was in, as far as it is read."""

    nodes: tuple[LabNode, ...]
    mtu: Positive = 1500
    racks: tuple[dict[str, Any], ...] = ()
    faults: tuple[dict[str, Any], ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """env.json, as far as it is read."""

    ranks: tuple[RankRow, ...]
    python: str | None = None
    torch: str | None = None
    platform: str | None = None
    processor: str | None = None
    cores: Positive | None = None
    gpus: tuple[str, ...] | None = None
    lab: Lab | None = None


def check_environment(folder: Path) -> dict[str, Any]:
    """What env.json says; raises OSError or ValueError if it cannot be."""
    path = folder / "env.json"
    with naming(path):
        values: dict[str, Any] = plain(parse(read_text(path)), "it")
        if not build(Environment, values, extra=True).ranks:
            raise ValueError("it names no ranks")
    return values


def read_toml(path: Path) -> dict[str, Any]:
    """What spec.toml says; raises OSError or ValueError if it cannot be."""
    with naming(path):
        try:
            values: dict[str, Any] = plain(tomllib.loads(read_text(path)), "it")
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    return values


def read_ranks(folder: Path) -> tuple[RankRow, ...]:
    """The ranks that env.json names; none where it cannot be read."""
    try:
        return build(Environment, parse(read_text(folder / "env.json")), extra=True).ranks
    except (OSError, ValueError):
        return ()


@dataclass(frozen=True)
class Bench:
    """bench.json in the folder of an experiment: what it is, in words, which runs it has, and what they were made on.

    A row of `paper` has what it is to be set beside (`match`: workers, nodes, …) and the paper's numbers, by the names
    that ours have. `draw` are charts; `failed` says why, by the names of runs; `left_out` are grids that this machine
    cannot run. `here` is what runs must have in common to be compared.
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
    schema: int = SCHEMA


BENCH = "bench.json"


def read_bench(folder: Path) -> Bench | None:
    """The experiment of a folder, or None where there is none that can be read."""
    try:
        bench = build(Bench, _of_this_schema(parse(read_text(folder / BENCH))))
        for row in bench.paper:
            _check_paper(row)
        return bench
    except (OSError, ValueError):
        return None


def _check_paper(row: dict[str, Any]) -> None:
    """Tables of settings, a note, and numbers."""
    kinds: dict[str, tuple[type, ...]] = {"match": (dict,), "of": (dict,), "note": (str,)}
    for name, value in row.items():
        if not isinstance(value, kinds.get(name, (int, float))):
            raise ValueError(f"a paper's {name} cannot be a {type(value).__name__}")


def write_bench(folder: Path, bench: Bench) -> None:
    write_whole(folder / BENCH, dump(asdict(bench), indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, usual_mode())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def usual_mode() -> int:
    """The mode that a new file would have; temporary ones are made private."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


class LineWriter:
    """Appends records to a JSON-lines file; a crash loses at most the lines since the last flush."""

    def __init__(self, path: Path) -> None:
        cut = _is_cut(path)
        self._file = path.open("a", encoding="utf-8")
        if cut:  # what comes next is not to be lost with the half line
            self._file.write("\n")

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(dump({"kind": kind, **values}) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _is_cut(path: Path) -> bool:
    """Whether there is a last line that a crash left unfinished."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            return size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
    except OSError:
        return False


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSON-lines file; a last line cut short by a crash is left out."""
    try:
        text = read_text(path)
    except (OSError, ValueError):
        return
    for line in text.splitlines():
        try:
            record = parse(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            yield record


@dataclass(frozen=True)
class Step:
    """One update as a rank saw it: when it ended, how long it took, how many samples all ranks had, its parts.

    A server's workers make gradients, not updates: their samples are their own. Emulated compute has no loss.
    `own` are the samples that this rank itself had. `queued` is how long, of each part, the rank was ready to run and
    had no core.
    """

    step: Count
    epoch: Count
    time: Seconds
    seconds: Annotated[float, Bounds(1e-9, 1e10)]
    samples: Positive
    spans: dict[str, Seconds]
    loss: float | None = None
    own: Count | None = None
    queued: dict[str, Seconds] = field(default_factory=dict)


def read_steps(path: Path) -> list[Step]:
    """In the order of their numbers; of one that was made again, after a server came back, the last counts.

    Raises ValueError if one cannot be.
    """
    with naming(path):
        found = [build(Step, record, extra=True) for record in read_lines(path) if record["kind"] == "step"]
    by_number = {step.step: step for step in found}
    return [by_number[number] for number in sorted(by_number)]


Cores = Annotated[float, Bounds(0, 1e6)]


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
class NodeSample:
    """A node at one moment, in seconds of the Unix clock. None is what could not be known.

    `cpu` is how many cores were busy on average since the sample before; `run_cpu` and `run_memory_bytes` are of the
    run's ranks on this node alone. `gpus` are all of the machine, whoever uses them.

    Of the whole machine, also in the lab: `machine_cpu` is how many cores its processes used (interrupts left out),
    `steal` how many cores the hypervisor withheld from it, `pressure` the part of the time in which some process waited
    for a core. `preemptions` is how often a second the kernel took a core from a main thread of the run (in the lab, of
    the node).
    """

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


@dataclass(frozen=True)
class Node:
    """node_NAME.jsonl: a node and its samples. In the lab (`own_processes`) CPU and memory are its processes' alone.

    Nodes with the same `machine` share its processors.
    """

    name: str
    cores: Positive | None
    memory_bytes: int | None
    period: Seconds
    clock: str
    own_processes: bool
    samples: list[NodeSample] = field(default_factory=list)
    machine: str | None = None


def read_samples(path: Path) -> list[NodeSample]:
    """The samples of a node, in the order they were taken. Raises ValueError if one cannot be."""
    return [build(NodeSample, _values(record)) for record in read_lines(path) if record["kind"] == "sample"]


def _values(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("kind", "schema")}


def read_nodes(folder: Path) -> dict[str, Node]:
    """The nodes of a run folder, by name; one that was started again has one row of samples.

    Raises ValueError if a sample cannot be.
    """
    nodes = {}
    for path in sorted(folder.glob("node_*.jsonl")):
        heads = (r for r in read_lines(path) if r["kind"] == "node" and r.get("schema") == SCHEMA)
        if head := next(heads, None):
            with naming(path):
                node = replace(build(Node, _values(head)), samples=read_samples(path))
            nodes[node.name] = node
    return nodes
