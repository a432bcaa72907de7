"""Writes a run as a trace in Chrome's Trace Event Format, for Perfetto: one process per rank, counters per node."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.export.values import NodeValues
from paceline.run.atomic import replacing
from paceline.run.clocks import aligned, read_clock, shifted
from paceline.run.folder import node_files, node_head, node_offsets, rank_file, ranks_in, read_ranks
from paceline.run.lines import last_step, stream_lines
from paceline.run.records import LINES, Clock, Line, NodeSample, Planned, RankRow, Start, Step, Summary, Timeline
from paceline.run.timelines import events_of
from paceline.strict_json import dump

Event = dict[str, Any]

MOST_STEPS = 5000  # of a long run, unless others are chosen: about 1 kB for each step of each rank
NODES = 1_000_000  # process numbers of nodes begin here; those of ranks are the ranks
STEPS, MICROBATCHES = 1, 2  # thread numbers
# Counters of a node: their series, each with the value that it shows and what that is divided by.
COUNTERS: dict[str, dict[str, tuple[str, float]]] = {
    "CPU cores": {"busy": ("cores_busy", 1), "of this run": ("cores_of_run", 1)},
    "memory (GB)": {"in use": ("memory_bytes", 1e9)},
    "network (Mbit/s)": {"in": ("bits_in_per_second", 1e6), "out": ("bits_out_per_second", 1e6)},
}
NOTES = {
    "times": "in microseconds since the first line of the run, on the clock of rank 0",
    "clocks": "By rank: what was added to its times (offset_seconds), and how far off that may be "
    "(uncertainty_seconds), measured when the ranks connected. Clocks drift apart later. not measured: times of this "
    "rank are on its own machine's clock.",
    "parts": "The parts of a step are drawn one after the other, in the order in which they first began. A part that "
    "took turns with others is drawn once, with all its time.",
}


@dataclass
class Written:
    """What a trace has: its steps, how many the run has, and the number of events."""

    steps: range
    of: int
    events: int = 0
    window: list[int] = field(default_factory=list)  # of the times of its steps, in nanoseconds

    @property
    def whole(self) -> bool:
        return self.steps.start == 0 and self.steps.stop >= self.of


def choose_steps(folder: Path, start: int | None, stop: int | None) -> tuple[range, int]:
    """The steps of a trace, and how many the run has. Without a choice, the last ones of a long run."""
    found = (last_step(rank_file(folder, rank)) for rank in ranks_in(folder))
    count = 1 + max((last for last in found if last is not None), default=-1)
    if start is None and stop is None:
        return range(max(0, count - MOST_STEPS), count), count
    return range(start or 0, count if stop is None else min(stop, count)), count


def write_trace(
    folder: Path, path: Path, summary: Summary, own: Sequence[type[Line]], steps: range, of: int
) -> Written:
    """Write a trace, line by line; gzipped if the name ends in .gz. `own` are lines that only its strategy has.

    Raises OSError, or ValueError if a line of the records cannot be.
    """
    done = Written(steps, of)
    rows = {row.rank: row for row in read_ranks(folder)}
    open_text = gzip.open if path.suffix == ".gz" else open
    with replacing(path) as temporary, open_text(temporary, "wt") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for event in _events(folder, (*LINES, *own), rows, done):
            file.write(f"{',' if done.events else ''}{dump(event)}\n")
            done.events += 1
        about = {"run": folder.absolute().name, "model": summary.model, "strategy": summary.strategy,
                 "status": summary.status, "steps": f"{steps.start} to {steps.stop - 1} of {of}",
                 "offsets": _clocks(folder, rows), **NOTES}  # fmt: skip
        file.write(f'], "otherData": {dump(about)}}}\n')
    return done


def _clocks(folder: Path, rows: dict[int, RankRow]) -> dict[str, Any]:
    """The clock of each rank but rank 0, by its number."""
    return {str(rank): _clock(folder, rank, rows) for rank in ranks_in(folder) if rank}


def _clock(folder: Path, rank: int, rows: dict[int, RankRow]) -> dict[str, float] | str:
    if clock := read_clock(rank_file(folder, rank)):
        return {"offset_seconds": clock.offset, "uncertainty_seconds": clock.uncertainty}
    same = rank in rows and 0 in rows and rows[rank].host == rows[0].host
    return {"offset_seconds": 0.0, "uncertainty_seconds": 0.0} if same else "not measured"


def _events(folder: Path, kinds: Sequence[type[Line]], rows: dict[int, RankRow], done: Written) -> Iterator[Event]:
    begin, offsets = _begin(folder), node_offsets(folder)
    for rank in ranks_in(folder):
        row = rows.get(rank)
        yield from _process(rank, f"rank {rank}, {row.role} on {row.host}" if row else f"rank {rank}", rank)
        yield from _threads(rank, {STEPS: "steps"})
        track = _Rank(rank, begin, done)
        for line in aligned(stream_lines(rank_file(folder, rank), *kinds, steps=done.steps)):
            yield from track.draw(line)
        yield from track.end()
    alone = len({row.host for row in rows.values()}) < 2
    for number, path in enumerate(node_files(folder), NODES):
        if head := node_head(path):
            yield from _process(number, f"node {head.name}", number)
            values = NodeValues(alone=alone)
            for sample in stream_lines(path, NodeSample):
                moved = shifted(sample, offsets.get(head.name, 0.0))
                yield from _counters(number, values, moved, begin, done)


def _begin(folder: Path) -> float:
    """When the run's first line was written, on the clock of rank 0."""
    times, offsets = [], node_offsets(folder)
    for rank in ranks_in(folder):
        lines = aligned(stream_lines(rank_file(folder, rank), Start, Clock, Step))
        first = next((line for line in lines if isinstance(line, Start | Step)), None)
        times += [first.time - (first.seconds if isinstance(first, Step) else 0.0)] if first else []
    for path in node_files(folder):
        sample = next(stream_lines(path, NodeSample), None)
        head = node_head(path)
        times += [sample.time + offsets.get(head.name, 0.0)] if sample and head else []
    return min(times, default=0.0)


def _process(pid: int, name: str, order: int) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "tid": 0, "ts": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "tid": 0, "ts": 0, "name": "process_sort_index", "args": {"sort_index": order}}


def _threads(pid: int, names: dict[int, str]) -> Iterator[Event]:
    for tid, name in names.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": "thread_name", "args": {"name": name}}


class _Rank:
    """Draws the lines of a rank in their order. Times are whole nanoseconds, so that nested events stay nested."""

    def __init__(self, rank: int, begin: float, done: Written) -> None:
        self._rank, self._begin, self._done = rank, begin, done
        self._ended = self._micro_ended = self._last = 0  # the last step, the last of a timeline, the last line
        self._held: list[Event] = []  # events that are drawn if steps follow
        self._inside = not done.steps.start  # whether the first step has been drawn, or all first steps are
        self._has_micro = False

    def draw(self, line: Line) -> Iterator[Event]:
        match line:
            case Step():
                yield from self._held if self._inside else ()
                self._held, self._inside = [], True
                yield from self._step(line)
            case Timeline():
                yield from self._timeline(line)
            case Clock() | Planned():
                return
            case _:
                self._instant(line)

    def end(self) -> Iterator[Event]:
        """What came after the last step, unless later ones were left out."""
        yield from self._held if self._inside and self._done.steps.stop >= self._done.of else ()

    def _step(self, line: Step) -> Iterator[Event]:
        # Unix time may be set back, and it is read a little after the step's own clock.
        end = max(_ns(line.time - self._begin), self._ended)
        start = max(end - _ns(line.seconds), self._ended)
        self._done.window = [min([start, *self._done.window]), max([end, *self._done.window])]
        about = {"step": line.step, "epoch": line.epoch, "samples": line.samples, "own samples": line.own,
                 "tokens": line.tokens, "loss": line.loss, "learning rate": line.lr, **line.metrics,
                 **line.figures}  # fmt: skip
        yield self._slice(
            f"step {line.step}", start, end, {key: value for key, value in about.items() if value is not None}
        )
        for name, seconds in line.spans.items():
            stop = min(start + _ns(seconds), end)
            queued = line.queued.get(name)
            yield self._slice(name, start, stop, {} if queued is None else {"without a core (ms)": 1e3 * queued})
            start = stop
        self._ended = self._last = end

    def _timeline(self, line: Timeline) -> Iterator[Event]:
        if not self._has_micro:
            self._has_micro = True
            yield from _threads(self._rank, {MICROBATCHES: "micro-batches"})
        for event in events_of(line):
            start = max(_ns(line.time - self._begin + event.start), self._micro_ended)
            self._micro_ended = max(start, _ns(line.time - self._begin + event.end))
            name = event.what if event.micro < 0 else f"{event.what} {event.micro}"
            about = {"step": line.step, **({} if event.micro < 0 else {"micro-batch": event.micro})}
            yield self._slice(name, start, self._micro_ended, about, MICROBATCHES)

    def _instant(self, line: Line) -> None:
        """Lines without a time were written after the last one that has one."""
        values = dict(vars(line))
        self._last = _ns(values.pop("time") - self._begin) if "time" in values else self._last
        self._held.append({"ph": "i", "s": "p", "pid": self._rank, "tid": STEPS, "ts": _us(self._last),
                           "name": line.kind, "args": values})  # fmt: skip

    def _slice(self, name: str, start: int, end: int, about: dict[str, Any], thread: int = STEPS) -> Event:
        return {"ph": "X", "pid": self._rank, "tid": thread, "ts": _us(start), "dur": _us(end - start), "name": name,
                "args": about}  # fmt: skip


def _counters(pid: int, values: NodeValues, sample: NodeSample, begin: float, done: Written) -> Iterator[Event]:
    """The counters of a node, while the steps of the trace went on."""
    point, now = values.of(sample), _ns(sample.time - begin)
    if point is None or not (done.whole or (done.window and done.window[0] <= now <= done.window[1])):
        return
    for name, series in COUNTERS.items():
        shown = {label: point.values[value] / by for label, (value, by) in series.items() if value in point.values}
        if shown:
            yield {"ph": "C", "pid": pid, "tid": 0, "ts": _us(now), "name": name, "args": shown}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000
