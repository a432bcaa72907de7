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
    servers: int = 0
    error: str | None = None
    failed_rank: int | None = None
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
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


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
