"""The folder of an experiment's runs: who may write to it, what is done already, and on what it was done."""

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

# What results must have in common to be compared, by what people call it.
COMMON = {"version": "version of paceline", "source": "source code of paceline", "torch": "version of torch",
          "machine": "machine", "processor": "processor", "cores": "number of cores"}  # fmt: skip
# Rooms that look at runs and do not make them: another report is no other result.
READERS = ("analysis", "bench", "cli", "report")


def here() -> dict[str, Any]:
    """The program, by its source, and the machine."""
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
    """An experiment's folder. Each run has a folder in it, by the name of its task."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = -1  # its descriptor: whoever ends what a killed bench has left holds it until that is done

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Only one bench at a time; the kernel unlocks for one that was killed."""
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
        """Note what is run on what; refuse a folder whose runs are of something else."""
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
                    f"{self.folder} has runs of another {called} ({found.here.get(key)}, and this is {now[key]}): they "
                    f"are not to be mixed; use another -o, or --fresh, which removes them"
                )
        e, runs = experiment, tuple(task.name for task in experiment.tasks())
        failed = {name: why for name, why in found.failed.items() if name in runs} if found else {}
        bench = Bench(e.name, e.title, e.about, e.source, e.limits, e.quick, e.repeats, e.draw, e.paper, runs, failed,
                      e.left_out, now)  # fmt: skip
        write_bench(self.folder, bench)

    def note(self, task: Task, failed: str | None) -> None:
        """Write down how a run ended: why it failed, or that it did not."""
        bench = read_bench(self.folder)
        assert bench is not None
        others = {name: why for name, why in bench.failed.items() if name != task.name}
        write_bench(self.folder, replace(bench, failed=others | ({task.name: failed} if failed else {})))

    def done(self, task: Task) -> Summary | None:
        """The summary of a task's completed run, if all its steps are written down as well."""
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
        """Where a task's run goes; what a stopped or failed one left there is removed."""
        folder = self.folder / task.name
        if folder.exists():
            shutil.rmtree(folder)
        return folder

    def begin_again(self) -> None:
        """Remove an experiment's runs, and nothing that is not one."""
        if all(path.name == ".lock" for path in self.folder.iterdir()):
            return
        if read_bench(self.folder) is None:
            raise UsageError(f"{self.folder} is not an experiment's folder: --fresh removes nothing else")
        for path in self.folder.iterdir():
            if (path / SPEC).exists():
                shutil.rmtree(path)
        (self.folder / BENCH).unlink()
