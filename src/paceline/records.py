"""What was measured: versioned records, written whole or as JSON lines; no torch."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1

COMPLETED = "completed"
INTERRUPTED = "interrupted"
FAILED = "failed"
RUNNING = "running"


@dataclass
class Summary:
    """summary.json: one run. The lists from `gradients` on are by rank, and empty where a run did not come to its end.

    Of parameter servers alone: how stale the gradients were (how many had missed how many updates), workers that were
    lost, returns to snapshots, messages that servers dropped; by rank, gradients applied, seconds spent waiting and
    the processor's seconds that training took.

    `disturbed` says why its times are not to be compared with others', where other programs used its processors.

    Where `compute` is not `real` but emulated:…, nothing was trained: there are no losses and accuracies, and times are
    those of ranks that waited `compute_seconds` for each batch instead of computing, and sent gradients that are
    `shrink` times smaller than those of the model's `parameters`.

    Where no worker has the whole model, a replica is `stages` workers (pipeline) or `tensor` workers (tensor); replicas
    average by `averaging`.
    """

    status: str
    strategy: str
    workers: int
    transport: str
    model: str
    data: str
    batch_size: int
    global_batch: int
    epochs: int
    seed: int
    schema: int = SCHEMA
    compute: str = "real"
    compute_seconds: float | None = None
    shrink: int = 1
    servers: int = 0
    stages: int = 1
    tensor: int = 1
    microbatches: int = 1
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
    read_seconds: float | None = None
    update_seconds: float | None = None
    epoch_seconds: list[float] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    train_accuracy: list[float] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)
    validation_accuracy: list[float] = field(default_factory=list)
    best_epoch: int | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    total_seconds: float | None = None
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


def read_summary(folder: Path) -> Summary | None:
    """The folder's summary, or None where there is none that can be read."""
    try:
        values = json.loads((folder / "summary.json").read_text("utf-8"))
        return Summary(**values) if values["schema"] == SCHEMA else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_summary(folder: Path, summary: Summary) -> None:
    write_whole(folder / "summary.json", json.dumps(asdict(summary), indent=1) + "\n")


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
        values = json.loads((folder / BENCH).read_text("utf-8"))
        lists = {name: tuple(values[name]) for name in ("limits", "draw", "paper", "runs", "left_out")}
        return Bench(**values | lists) if values["schema"] == SCHEMA else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_bench(folder: Path, bench: Bench) -> None:
    write_whole(folder / BENCH, json.dumps(asdict(bench), indent=1) + "\n")


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
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")

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
        text = path.read_text("utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "kind" in record:
            yield record


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

    time: float
    cpu: float | None
    memory_bytes: int | None
    run_cpu: float | None = None
    run_memory_bytes: int | None = None
    interfaces: dict[str, Traffic] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    machine_cpu: float | None = None
    steal: float | None = None
    pressure: float | None = None
    preemptions: float | None = None


@dataclass(frozen=True)
class Node:
    """node_NAME.jsonl: a node and its samples. In the lab (`own_processes`) CPU and memory are its processes' alone.

    Nodes with the same `machine` share its processors.
    """

    name: str
    cores: int | None
    memory_bytes: int | None
    period: float
    clock: str
    own_processes: bool
    samples: list[NodeSample]
    machine: str | None = None


def read_samples(path: Path) -> list[NodeSample]:
    """The samples of a node, in the order they were taken."""
    return [_sample(record) for record in read_lines(path) if record["kind"] == "sample"]


def _sample(record: dict[str, Any]) -> NodeSample:
    values = {name: value for name, value in record.items() if name not in ("kind", "interfaces", "gpus")}
    traffic = {name: Traffic(**counts) for name, counts in record["interfaces"].items()}
    return NodeSample(**values, interfaces=traffic, gpus=tuple(Gpu(**gpu) for gpu in record.get("gpus", [])))


def read_nodes(folder: Path) -> dict[str, Node]:
    """The nodes of a run folder, by name; one that was started again has one row of samples."""
    nodes = {}
    for path in sorted(folder.glob("node_*.jsonl")):
        head = next((r for r in read_lines(path) if r["kind"] == "node" and r["schema"] == SCHEMA), None)
        if head:
            values = {name: value for name, value in head.items() if name not in ("kind", "schema")}
            nodes[head["name"]] = Node(**values, samples=read_samples(path))
    return nodes
