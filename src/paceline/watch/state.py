"""What the files of a run folder say about a run that is under way, as the page shows it.

Files are read from where reading stopped, and what is kept does not grow with the run.
"""

from __future__ import annotations

import shlex
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.analysis.breakdown import NAMES, of_steps
from paceline.analysis.resources import SHORTEST
from paceline.analysis.slow import LAST_BYTES, LAST_STEPS, Judgement, judge
from paceline.analysis.wording import accuracy, count, loss, number, percent, ranged, seconds, sentence, size
from paceline.errors import UsageError
from paceline.run.clocks import read_clock, shifted
from paceline.run.folder import LOGS, SUMMARY, check_summary, find_folders, node_files, rank_file, read_ranks, read_spec
from paceline.run.growing import GrowingLines, ReplacedError
from paceline.run.liveness import current_summary
from paceline.run.records import (
    COMPLETED,
    FAILED,
    RUNNING,
    End,
    Epoch,
    Error,
    FinalTest,
    Line,
    NodeSample,
    NodeStart,
    Planned,
    RankRow,
    Resumed,
    Start,
    Step,
    Summary,
    Validation,
)
from paceline.watch.curve import Curve

RECENT_STEPS, RECENT_SECONDS = 50, 30.0
MOST_STEPS = 50_000  # that are kept, of all ranks together
MOST_BYTES = 1 << 22  # of the ends of all ranks' files, that are read at first
MOST_VALIDATIONS = 400
SAMPLES = 240  # of a node: two minutes
JUDGE_SECONDS = 5.0
STALLED = 10.0  # seconds without a step that are mentioned


def find_run(path: Path) -> Path:
    """The run folder itself, or of a folder of runs the newest that is under way, else the newest.

    Raises UsageError where there is none that can be read.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder: give a run folder, such as runs/NAME, or a folder of them")
    found: list[tuple[bool, float, Path]] = []
    faults: dict[Path, str] = {}
    for folder in find_folders([path]):
        try:
            status, _ = _status(check_summary(folder), current_summary(folder))
            found.append((status == RUNNING, (folder / SUMMARY).stat().st_mtime, folder))
        except FileNotFoundError:
            faults[folder] = "it is not a run folder, or its run did not begin"
        except (OSError, ValueError) as error:
            faults[folder] = f"no summary that can be read: {error}"
    if found:
        return max(found)[2]
    folder, why = next(iter(faults.items()))
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    raise UsageError(f"there is no run to watch in {path}: {'' if folder == path else f'{folder}{more}: '}{why}")


class State:
    """A run, as far as it has been read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.summary = check_summary(folder)
        self._status, self._said, self._unread = RUNNING, "", ""
        self._clear()

    def _clear(self) -> None:
        """Nothing is read yet."""
        ranks = max(1, self.summary.ranks)
        kinds = (Start, Resumed, Planned, Step, Epoch, Validation, FinalTest, Error, End)
        last = max(1 << 14, min(LAST_BYTES, MOST_BYTES // ranks))
        self._files = {0: GrowingLines(rank_file(self.folder, 0), *kinds)} | {
            rank: GrowingLines(rank_file(self.folder, rank), Step, last=last) for rank in range(1, ranks)
        }
        kept = max(RECENT_STEPS, min(LAST_STEPS, MOST_STEPS // ranks))
        self._steps = {rank: deque[Step](maxlen=kept) for rank in range(ranks)}
        self._offsets: dict[int, float] = {}  # of each rank's clock
        self._nodes: dict[Path, _Node] = {}
        self._curve = Curve()
        self._planned: Planned | None = None
        self._epoch, self._per_epoch = 0, 0.0  # that rank 0 is in; steps of an epoch, once one has ended
        self._validations: dict[int, Validation] = {}
        self._accuracy: float | None = None
        self._began = self._last = self._before = 0.0  # the run's present processes; how long those before them ran
        self._verdict: Judgement | None = None
        self._judged = 0.0  # when

    def check(self) -> None:
        """Raises UsageError if nothing of rank 0's file can be read, though there is one."""
        if (faults := self._files[0].faults) and not self._began and not self._steps[0]:
            raise UsageError(f"{self.folder} is damaged: {'; '.join(faults.values())}")

    # Reading

    def refresh(self) -> None:
        """Read what is new."""
        try:
            written, self.summary = check_summary(self.folder), current_summary(self.folder)
            self._status, self._said = _status(written, self.summary)
            self._unread = ""
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self._unread = f"{SUMMARY} cannot be read: {reason}"
        if len(self._files) != max(1, self.summary.ranks):  # the run was continued with other ranks
            self._clear()
        try:
            self._read()
        except ReplacedError:  # another run has its name, or a file was cut; or the folder is gone
            if not self._unread:
                self._clear()
                self._read()

    def _read(self) -> None:
        for rank, file in self._files.items():
            for line in file.read():
                if isinstance(line, Step):
                    if self._steps[rank] and line.step <= self._steps[rank][-1].step:
                        self._steps[rank].clear()
                    if not self._steps[rank]:  # the clock's line is above that of the first step
                        clock = read_clock(file.path) if rank else None
                        self._offsets[rank] = clock.offset if clock else 0.0
                    self._steps[rank].append(shifted(line, self._offsets[rank]))
                if rank == 0:
                    self._add(line)
        for path in node_files(self.folder):
            self._nodes.setdefault(path, _Node(path)).read()

    def _add(self, line: Line) -> None:
        """A line of rank 0, which knows of all updates."""
        match line:
            case Step():
                if line.epoch > self._epoch:
                    self._epoch, self._per_epoch = line.epoch, line.step / line.epoch
                self._curve.add(line)
                self._last = max(self._last, line.time)
            case Start():
                self._before += max(0.0, self._last - self._began)
                self._began = self._last = line.time
            case Resumed():
                self._curve.go_back(line.step)
                self._validations = {at: each for at, each in self._validations.items() if not each.superseded(line)}
            case Planned():
                self._planned = line
            case Epoch():
                self._accuracy = line.accuracy
            case FinalTest() | Error() | End():
                self._last = max(self._last, getattr(line, "time", 0.0))
            case Validation():
                points = self._curve.points
                self._validations[points[-1].step + 1 if line.step is None and points else line.step or 0] = line
                if len(self._validations) > 2 * MOST_VALIDATIONS:
                    self._validations = dict(list(self._validations.items())[::2])

    # What the page shows

    def as_dict(self) -> dict[str, Any]:
        """Numbers are in words, with their units, except those of charts."""
        now, summary = time.time(), self.summary
        ended = self._status not in (RUNNING, "silent")
        rows = read_ranks(self.folder)
        status = "starting" if self._status == RUNNING and not self._steps[0] else self._status
        data = f" on {summary.data}" if summary.data else ""
        return {
            "title": f"{summary.model}{data}",
            "about": _about(summary),
            "folder": str(self.folder),
            "status": status,
            "said": self._said,
            "ended": ended,
            "next": self._next() if ended else None,
            "notes": self._notes(),
            "progress": self._progress(now, ended=ended),
            "figures": self._figures(),
            "curve": [[point.step + 1, _short(point.mean_loss), _short(point.rate)] for point in self._curve.points],
            "validations": [[at, _short(each.loss)] for at, each in sorted(self._validations.items())],
            "parts": NAMES,
            "verdict": self._judge(rows),
            "ranks": self._ranks(rows, ended=ended),
            "nodes": [node.as_dict(rows) for node in self._nodes.values() if node.known],
        }

    def _next(self) -> dict[str, str]:
        """What to do after the end."""
        if self._status == COMPLETED:
            return {"text": "Write its report with", "command": f"paceline report {shlex.quote(str(self.folder))}"}
        return {"text": "What its ranks printed is in", "command": str(self.folder / LOGS)}

    def _notes(self) -> list[str]:
        files = [*self._files.values(), *(node.file for node in self._nodes.values())]
        found = [self._unread, *(text for file in files for text in file.faults.values())]
        if self.summary.disturbed:
            found.append(f"Its times should not be compared with others: {self.summary.disturbed}")
        return [text for text in found if text]

    def _length(self) -> tuple[int | None, int | None]:
        """How many steps and epochs the run makes: as it has recorded, or as the options of an own loop say."""
        if self._planned:
            return self._planned.steps, self._planned.epochs
        try:
            options = read_spec(self.folder)
        except (OSError, ValueError):
            return None, None
        steps, epochs = (options[name] if type(options.get(name)) is int else None for name in ("steps", "epochs"))
        return steps or (round(epochs * self._per_epoch) if epochs and self._per_epoch else None), epochs

    def _progress(self, now: float, *, ended: bool) -> dict[str, Any]:
        steps, (total, epochs), summary = self._steps[0], self._length(), self.summary
        done = steps[-1].step + 1 if steps else 0
        elapsed = self._before + (self._last if ended else max(now, self._last)) - self._began if self._began else None
        if self._status == COMPLETED and summary.total_seconds is not None:
            elapsed = summary.total_seconds
        each = self._curve.seconds_per_step()
        left = (total - done) * each if total and each and not ended else None
        quiet = now - self._last if steps and not ended else 0.0
        stalled = quiet > max(STALLED, 10 * (each or 0.0))
        return {
            "done": done,
            "total": total,
            "share": min(1.0, done / total) if total else None,
            "steps": f"step {done:,}" + (f" of {total:,}" if total else ""),
            "epoch": f"epoch {steps[-1].epoch + 1:,}" + (f" of {epochs:,}" if epochs else "") if steps else "",
            "elapsed": _clock(elapsed),
            "left": _clock(left),
            "stalled": f"no step for {seconds(quiet)}" if stalled else "",
        }

    def _recent(self) -> list[Step]:
        """Rank 0's steps of the last seconds."""
        steps = self._steps[0]
        return [step for step in steps if step.time > steps[-1].time - RECENT_SECONDS]

    def _figures(self) -> list[list[str]]:
        """The figures of now: what it is, its value, and what there is to add."""
        recent, summary = self._recent(), self.summary
        whole = sum(step.seconds for step in recent)
        losses = [step.loss for step in recent[-RECENT_STEPS:] if step.loss is not None]
        tokens = sum(step.tokens or 0 for step in recent)
        validation = self._validations[max(self._validations)] if self._validations else None
        best = min((each.loss for each in self._validations.values()), default=0.0)
        better = f"best {loss(best)}" if validation and best < validation.loss else ""
        found: dict[str, str | None] = {
            "loss": loss(sum(losses) / len(losses)) if losses else None,
            "training accuracy": _known(self._accuracy, accuracy),
            "validation loss": loss(validation.loss) if validation else None,
            "validation accuracy": _known(validation.accuracy, accuracy) if validation else None,
            "samples/s": number(sum(step.samples for step in recent) / whole) if whole else None,
            "tokens/s": number(tokens / whole) if whole and tokens else None,
            "time of a step": seconds(whole / len(recent)) if recent else None,
            "test loss": _known(summary.test_loss, loss),
            "test accuracy": _known(summary.test_accuracy, accuracy),
        }
        return [[name, value, better * (name == "validation loss")] for name, value in found.items() if value]

    def _ranks(self, rows: Sequence[RankRow], *, ended: bool) -> list[dict[str, Any]]:
        """Every worker's parts of the last steps that all have recorded; how long one has been silent."""
        workers = {rank: made for rank, made in self._steps.items() if rank >= self.summary.servers and made}
        numbers = [{step.step for step in made} for made in workers.values()]
        common = set(sorted(set.intersection(*numbers) if numbers else ())[-RECENT_STEPS:])
        chosen = {
            rank: [step for step in made if step.step in common] if common else list(made)[-RECENT_STEPS:]
            for rank, made in workers.items()
        }
        hosts = {row.rank: row.host for row in rows}
        several = len(set(hosts.values())) > 1
        newest = max((made[-1].time for made in workers.values()), default=0.0)
        found = []
        for rank, parts in of_steps(chosen, self.summary, 0).items():
            late = newest - workers[rank][-1].time
            found.append({
                "rank": rank,
                "slow": bool(self._verdict and self._verdict.rank == rank),
                "host": hosts.get(rank, "") if several else "",
                "total": seconds(parts.total),
                "seconds": parts.total,
                "parts": {name: [getattr(parts, name), f"{NAMES[name]} {seconds(getattr(parts, name))}, "
                                 f"{percent(getattr(parts, name) / max(parts.total, 1e-12))} of a step"]
                          for name in NAMES if getattr(parts, name) > 0.001 * parts.total},
                "late": f"no step for {seconds(late)}" if late > STALLED and not ended else "",
            })  # fmt: skip
        return found

    def _judge(self, rows: Sequence[RankRow]) -> list[str] | None:
        """The verdict, what to try, and the evidence."""
        if self._verdict is None or time.monotonic() - self._judged > JUDGE_SECONDS:
            self._verdict = judge(self._steps, {row.rank: row.host for row in rows}, self.summary)
            self._judged = time.monotonic()
        if found := self._verdict:
            return [f"{sentence(text)}." for text in (found.sentence, f"Try {found.advice}", found.evidence)]
        return None


def _about(summary: Summary) -> str:
    servers = [count(summary.servers, "server")] if summary.servers else []
    emulated = ["emulated compute"] if summary.emulated else []
    words = [summary.strategy, count(summary.workers, "worker"), *servers, f"global batch {summary.global_batch:,}"]
    transport = [summary.transport] if summary.ranks > 1 else []
    return ", ".join([*words, *transport, *emulated])


def _status(written: Summary, summary: Summary) -> tuple[str, str]:
    """Running, completed, interrupted, failed, killed or silent, and why."""
    if summary.status == RUNNING and summary.error:
        return "silent", summary.error
    if summary.status == FAILED and written.status == RUNNING:
        return "killed", summary.error or ""
    return summary.status, summary.error or ("" if summary.stopped_early is None else summary.stopped_early)


def _known(value: float | None, words: Callable[[float], str]) -> str | None:
    return None if value is None else words(value)


def _clock(value: float | None) -> str:
    return "" if value is None else str(timedelta(seconds=round(value)))


def _short(value: float | None) -> float | None:
    """Five significant digits are enough for a chart."""
    return None if value is None else float(f"{value:.5g}")


class _Node:
    """A node's last samples."""

    def __init__(self, path: Path) -> None:
        self.file = GrowingLines(path, NodeStart, NodeSample, last=LAST_BYTES)
        self.known: NodeStart | None = None
        self._samples = deque[NodeSample](maxlen=SAMPLES)

    def read(self) -> None:
        for line in self.file.read():
            if isinstance(line, NodeStart):
                self.known = line
            elif isinstance(line, NodeSample):
                self._samples.append(line)

    def as_dict(self, rows: Sequence[RankRow]) -> dict[str, Any]:
        assert self.known is not None
        alone = len({row.host for row in rows}) < 2
        network = "loopback" if alone else "network"
        here = [row.rank for row in rows if row.host == self.known.name]
        history = [_rates(*pair, alone=alone) for pair in pairwise(self._samples)
                   if pair[1].time - pair[0].time >= SHORTEST]  # fmt: skip
        cpu, memory, into, out = history[-1] if history else (None,) * 4
        gpus = [gpu.busy for gpu in self._samples[-1].gpus if gpu.busy is not None] if self._samples else []
        return {
            "name": self.known.name,
            "ranks": f"rank{'s' if len(here) > 1 else ''} {ranged(here)}" if here else "",
            "gpus": f"GPUs {', '.join(map(percent, gpus))} busy" if gpus else "",
            "rows": [  # what, its value now, its largest possible value, its values before
                [what, said, most, [_short(each[column]) for each in history]]
                for column, (what, said, most) in enumerate((
                    ("cores busy", _of(cpu, self.known.cores, "{:.3g}".format), self.known.cores),
                    ("memory", _of(memory, self.known.memory_bytes, size), self.known.memory_bytes),
                    (f"{network} in", _known(into, _bits), None),
                    (f"{network} out", _known(out, _bits), None),
                ))
                if said
            ],
        }  # fmt: skip


def _rates(before: NodeSample, after: NodeSample, *, alone: bool) -> tuple[float | None, ...]:
    """Cores busy, memory, and bits per second in and out; None if not known, as after an interface was made anew."""
    gap, moved = after.time - before.time, list[float | None]()
    for name in ("rx_bytes", "tx_bytes"):
        first, last = (sum(getattr(each, name) for each in sample.counted(alone=alone)) for sample in (before, after))
        moved.append(8 * (last - first) / gap if last >= first and after.interfaces else None)
    return after.cpu, after.memory_bytes, *moved


def _of(used: float | None, total: float | None, words: Callable[[float], str]) -> str:
    if used is None:
        return ""
    return f"{words(used)} of {words(total)}" if total else words(used)


def _bits(value: float) -> str:
    return f"{number(value / 1e9)} Gbit/s" if value >= 1e9 else f"{number(value / 1e6)} Mbit/s"
