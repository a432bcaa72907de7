"""The folder of an experiment's runs: locks it, records which runs are done, and on which machine and version."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.bench.experiment import Experiment, Task
from paceline.errors import UsageError
from paceline.run.folder import BENCH, SPEC, rank_file, read_bench, read_steps, read_summary, write_bench
from paceline.run.records import COMPLETED, Bench, Summary

# What results must have in common to be compared, by its name in messages.
COMMON = {"version": "version of paceline", "source": "source code of paceline", "torch": "version of torch",
          "machine": "machine", "processor": "processor", "cores": "number of cores"}  # fmt: skip
# Packages that only read runs: changing them does not change results.
READERS = ("advise", "analysis", "bench", "cli", "predict", "report")


def here() -> dict[str, Any]:
    """The program (with a digest of its source) and the machine."""
    digest, program = hashlib.sha256(), Path(__file__).resolve().parents[1]
    for path in sorted(program.rglob("*.py")):
        if path.relative_to(program).parts[0] not in READERS:
            digest.update(path.read_bytes())
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {"version": __version__, "source": digest.hexdigest()[:12], "torch": version("torch"),
            "machine": platform.node(), "processor": processor or platform.processor(),
            "cores": os.cpu_count()}  # fmt: skip


class Store:
    """The folder of an experiment, with a folder for each run, named after its task."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = -1  # descriptor; the janitor of a killed bench holds it, too, until it has cleaned up

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Allow only one bench at a time; the kernel releases the lock of a killed one."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / ".lock").open("w")
        except OSError as error:
            raise UsageError(f"cannot write to {self.folder}: {error.strerror}; choose another -o") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another bench is writing to {self.folder}: wait for it, or use another -o") from None
            self.lock = file.fileno()
            yield

    def open(self, experiment: Experiment) -> None:
        """Record experiment, program and machine; refuse a folder with runs of another one."""
        found, now = read_bench(self.folder), here()
        if found is None and (others := [path.name for path in self.folder.iterdir() if path.name != ".lock"]):
            what = f"{BENCH} cannot be read" if BENCH in others else f"it has {others[0]!r}"
            raise UsageError(f"{self.folder} is not an experiment's folder ({what}): use another -o")
        if found and found.name != experiment.name:
            raise UsageError(f"{self.folder} has runs of the experiment {found.name}: use another -o")
        for key, called in COMMON.items() if found else ():
            assert found is not None
            if found.here.get(key) != now[key]:
                raise UsageError(
                    f"{self.folder} has runs of another {called} ({found.here.get(key)} instead of {now[key]}), which "
                    f"cannot be mixed; use another -o, or --fresh, which removes them"
                )
        e, runs = experiment, tuple(task.name for task in experiment.tasks())
        failed = {name: why for name, why in found.failed.items() if name in runs} if found else {}
        bench = Bench(e.name, e.title, e.about, e.source, e.limits, e.quick, e.repeats, e.draw, e.paper, runs, failed,
                      e.left_out, now, e.claims)  # fmt: skip
        write_bench(self.folder, bench)

    def note(self, task: Task, failed: str | None) -> None:
        """Record why a run failed, or that it did not."""
        bench = read_bench(self.folder)
        assert bench is not None
        others = {name: why for name, why in bench.failed.items() if name != task.name}
        write_bench(self.folder, replace(bench, failed=others | ({task.name: failed} if failed else {})))

    def done(self, task: Task) -> Summary | None:
        """The summary of a task's completed run, if all its steps are recorded as well."""
        folder = self.folder / task.name
        summary = read_summary(folder)
        if not summary or summary.status != COMPLETED:
            return None
        try:
            steps = read_steps(rank_file(folder, 0))
        except ValueError:
            return None
        return summary if len(steps) == summary.steps else None

    def clear(self, task: Task) -> Path:
        """The folder of a task's run, without what a stopped or failed run left there."""
        folder = self.folder / task.name
        if folder.exists():
            shutil.rmtree(folder)
        return folder

    def begin_again(self) -> None:
        """Remove an experiment's runs, and nothing else."""
        if all(path.name == ".lock" for path in self.folder.iterdir()):
            return
        if read_bench(self.folder) is None:
            raise UsageError(f"{self.folder} is not an experiment's folder: --fresh removes nothing else")
        for path in self.folder.iterdir():
            if (path / SPEC).exists():
                shutil.rmtree(path)
        (self.folder / BENCH).unlink()
