"""Makes the runs of an experiment, one after another, and estimates the remaining time."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from paceline.bench.experiment import GIVEN, Experiment, Task
from paceline.bench.store import Store
from paceline.data.prepare import prepare
from paceline.disturbance import ENOUGH, disturbance
from paceline.errors import EXIT_INTERRUPTED
from paceline.launch import janitor
from paceline.launch.counters import Counters
from paceline.messages import LOGGER
from paceline.run.atomic import write_whole
from paceline.run.folder import read_summary
from paceline.run.records import Node, NodeSample, Summary
from paceline.spec import Resolved

# How long a run may take to stop.
STOP_SECONDS = 30.0
# Estimated seconds for starting and ending the processes of a run.
AROUND_SECONDS = 4.0
BY_FLAG = ("name", "output_dir", "seed", "log_every")  # on the command line of every run

Say = Callable[[str, str], None]


@dataclass
class Outcome:
    """How many runs already existed, were made, failed (and why) or were disturbed by other programs, and whether
    bench was stopped.
    """

    there: int = 0
    made: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    stopped: bool = False
    disturbed: list[str] = field(default_factory=list)  # including runs that already existed


def bench(experiment: Experiment, store: Store, say: Say, *, fresh: bool = False) -> Outcome:
    """Make all runs of an experiment that the store does not have yet."""
    tasks = experiment.tasks()
    with store.locked():
        if fresh:
            store.begin_again()
        store.open(experiment)
        _fetch(experiment)
        seconds: dict[str, list[float]] = {}
        todo, disturbed = [], []
        for task in tasks:
            if summary := store.done(task):
                disturbed += [task.name] if summary.disturbed else []
                seconds.setdefault(task.point.digest(), []).append((summary.total_seconds or 0) + AROUND_SECONDS)
            else:
                todo.append(task)
        outcome = Outcome(there=len(tasks) - len(todo), disturbed=disturbed)
        if outcome.there:
            say(f"{outcome.there} of {len(tasks)} runs are already done", "\n")
        if todo and (why := busy_now()):
            say(f"This machine is busy: {why} in the last second. Times measured now cannot be compared.", "\n")
        for number, task in enumerate(todo):
            left = _left(todo[number:], seconds)
            say(f"[{outcome.there + number + 1}/{len(tasks)}] {task}{f'; {left}' if left else ''} ... ", "")
            begun = time.monotonic()
            summary, why = _make(task, store)
            if why == "stopped":
                say("stopped", "\n")
                outcome.stopped = True
                return outcome
            took = time.monotonic() - begun
            seconds.setdefault(task.point.digest(), []).append(took)
            store.note(task, why)
            if why:
                outcome.failed[task.name] = why
                say(f"FAILED: {why}", "\n")
            else:
                outcome.made += 1
                rate = summary.samples_per_second if summary else None
                speed = f", {rate:,.0f} samples/s" if rate else ""
                why = summary.disturbed if summary else None
                outcome.disturbed += [task.name] if why else []
                say(f"{took:.1f} s{speed}{f'; DISTURBED: {why}' if why else ''}", "\n")
    return outcome


def busy_now() -> str | None:
    """What other programs use of this machine's cores now, if it would disturb a run; takes a second."""
    try:
        with closing(Counters(lambda: (os.getpid(),))) as counters:
            first, began = counters.read(), time.time()
            time.sleep(ENOUGH)
            last, ended = counters.read(), time.time()
    except OSError:  # no /proc: unknown
        return None

    def rate(name: str) -> float | None:
        before, after = getattr(first, name), getattr(last, name)
        return None if before is None or after is None else (after - before) / (ended - began)

    samples = [
        NodeSample(began, None, None),
        NodeSample(ended, None, None, run_cpu=rate("run_seconds"), machine_cpu=rate("machine_seconds"),
                   steal=rate("stolen_seconds"), pressure=rate("waited_seconds")),
    ]  # fmt: skip
    node = Node("here", os.cpu_count(), None, ENOUGH, "unix", own_processes=False, samples=samples)
    return disturbance([node], began, ended)


def _fetch(experiment: Experiment) -> None:
    """Download all data that will be read: nodes of a lab could not, and it must not count in a run's time."""
    specs = [point.resolved.spec for point in experiment.points]
    for data, folder in {(spec.data, spec.data_dir) for spec in specs if spec.reads}:
        prepare(data, Path(folder) if folder else None)


def _left(todo: list[Task], seconds: dict[str, list[float]]) -> str:
    """An estimate of the remaining time, from earlier runs of the same point, otherwise of other points."""
    known = [value for values in seconds.values() for value in values]
    if not known:
        return ""
    usual = statistics.fmean(known)
    total = sum(statistics.fmean(seconds.get(task.point.digest(), [usual])) for task in todo)
    return f"about {total / 60:.0f} min left" if total > 90 else f"about {total:.0f} s left"


def _make(task: Task, store: Store) -> tuple[Summary | None, str | None]:
    """Run a task in its own processes; return its summary, or why there is none: `stopped`, or how it failed."""
    folder = store.clear(task)
    with _private(store.folder) as private, (private / "log").open("w+") as log:
        with _janitor(store.lock, private) as tell:
            words = _command(task, store.folder, private)
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            LOGGER.debug("process %d: %s", process.pid, shlex.join(words))
            tell(f"process {process.pid}")
            code = _wait(process)
        if code == EXIT_INTERRUPTED:
            return None, "stopped"
        if code == 0 and (summary := store.done(task)):
            return summary, None
        log.seek(0)
        said = [line.strip() for line in log if line.startswith("paceline: ")]
        ended = read_summary(folder)
        return None, (ended.error if ended else None) or (said[-1] if said else f"it exited with code {code}")


def _command(task: Task, folder: Path, private: Path) -> list[str]:
    """The command line of a run, as a user would type it."""
    config = private / "run.toml"
    write_whole(config, tomli_w.dumps(_asked(task.point.resolved)))
    paceline = [sys.executable, "-m", "paceline"]
    words = [*paceline, "train", "--config", str(config), "--seed", str(task.seed), "--log-every", "0",
             "--output-dir", str(folder.absolute()), "--name", task.name]  # fmt: skip
    if task.point.lab is None:
        return words
    lab = dict(task.point.lab)
    lab["share"] = [*lab.get("share", []), str(folder.absolute())]
    write_whole(private / "lab.toml", tomli_w.dumps(lab))
    return [*paceline, "lab", "run", str(private / "lab.toml"), "--", *words]


def _asked(resolved: Resolved) -> dict[str, Any]:
    """Only the values that were given; defaults are chosen again."""
    keys = [key for key, source in resolved.sources.items() if source == GIVEN and key not in BY_FLAG]
    return {key: value for key in keys if (value := getattr(resolved.spec, key)) is not None}


@contextlib.contextmanager
def _private(folder: Path) -> Iterator[Path]:
    """A folder for the files of one run that the nodes of a lab see, too."""
    private = Path(tempfile.mkdtemp(prefix=".run-", dir=folder.absolute()))
    try:
        yield private
    finally:
        shutil.rmtree(private, ignore_errors=True)


@contextlib.contextmanager
def _janitor(lock: int, private: Path) -> Iterator[Callable[[str], None]]:
    """A janitor that, if this process is killed, ends the run, removes its files, and holds the lock until then."""
    command = [sys.executable, "-I", "-S", janitor.__file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, text=True, start_new_session=True, pass_fds=[lock]
    ) as watcher:
        assert watcher.stdin is not None

        def tell(line: str) -> None:
            with contextlib.suppress(BrokenPipeError):
                print(line, file=watcher.stdin, flush=True)

        tell(f"folder {private}")
        yield tell
        tell("done")


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for its exit code; pass Ctrl-C on to it."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return EXIT_INTERRUPTED
