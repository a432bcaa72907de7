"""Trackers: programs that show the values of a training as it goes on, such as TensorBoard."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import UsageError
from paceline.export.values import RankValues
from paceline.messages import LOGGER
from paceline.run.folder import rank_file
from paceline.run.records import Line

TENSORBOARD = "tensorboard"  # the folder of its events, in the run folder
FLUSH_SECONDS = 2.0


class Tracker(Protocol):
    """What a tracker must be able to do. A value whose step is not after its last one begins what is made again: it and
    all values of later steps replace what was there.
    """

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Values by name, such as train/loss; `time` is in seconds of the Unix clock."""

    def hyperparameters(self, values: Mapping[str, str | bool | int | float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes a file of events into a folder, which TensorBoard shows as one run."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        folder.mkdir(parents=True, exist_ok=True)
        # Not its SummaryWriter, whose queue blocks for ever if the disk is full.
        self._file = EventsWriter(str(folder.absolute() / "events"), f".{os.getpid()}")
        self._last: dict[str, int] = {}  # the last step of each value
        self._flushed = time.monotonic()

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        if not self._last or any(step <= self._last.get(name, -1) for name in values):
            self._forget_from(step, time)
        self._last.update(dict.fromkeys(values, step))
        rows = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(time, step, summary=Summary(value=rows))

    def _forget_from(self, step: int, time: float) -> None:
        """Let TensorBoard drop what it has of this step and later ones, which are made again."""
        from tensorboardX.proto.event_pb2 import SessionLog

        self._last = {name: min(last, step - 1) for name, last in self._last.items()}
        self._write(time, step, session_log=SessionLog(status=SessionLog.START))

    def hyperparameters(self, values: Mapping[str, str | bool | int | float]) -> None:
        from tensorboardX.summary import hparams

        for summary in hparams(dict(values), {}):
            self._write(time.time(), 0, summary=summary)

    def _write(self, when: float, step: int, **what: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write_event(Event(wall_time=when, step=step, **what))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()


def check_tensorboard(what: str) -> None:
    """Raise an error if events cannot be written here; `what` is what asks for them."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise UsageError(f"{what}: tensorboardX is not installed; use `pip install 'paceline[tensorboard]'`, or "
                         "`pip install tensorboardX`")  # fmt: skip


class Tracked:
    """Gives a tracker the values of a rank's lines. If that fails, training continues without it."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker: Tracker | None = tracker
        self._values = RankValues()

    def write(self, line: Line) -> None:
        if self._tracker and (point := self._values.of(line)):
            try:
                self._tracker.log(point.step, point.values, point.time)
            except OSError as error:
                LOGGER.warning("no more values for the tracker: %s", error)
                self._tracker = None

    def close(self) -> None:
        if self._tracker:
            try:
                self._tracker.close()
            except OSError as error:
                LOGGER.warning("the tracker's last values are missing: %s", error)


def track_live(folder: Path, rank: int, options: Mapping[str, Any]) -> Tracked | None:
    """Let TensorBoard follow a rank of a run, from its folder; rank 0 has the figures of all, and is the only one."""
    if rank:
        return None
    tracker = TensorBoard(events_folder(folder / TENSORBOARD, rank_file(folder, rank)))
    tracker.hyperparameters(hyperparameters(options))
    return Tracked(tracker)


def events_folder(parent: Path, records: Path) -> Path:
    """Where the events of a file of records go: each rank and each node is a run of its own in TensorBoard."""
    return parent / records.stem


def event_files(folder: Path) -> list[Path]:
    """The files of events in a folder, and in those of its ranks and nodes."""
    return sorted(folder.rglob("events.out.tfevents.*"))


def hyperparameters(options: Mapping[str, Any]) -> dict[str, str | bool | int | float]:
    """Options as trackers take them."""
    return {name: value if isinstance(value, str | bool | int | float) else str(value)
            for name, value in options.items() if value is not None}  # fmt: skip
