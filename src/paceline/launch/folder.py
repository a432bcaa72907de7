"""The start of a run: what is written to its folder before the first step, and what is removed if there is none."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from paceline.data.course import Position
from paceline.errors import EXIT_USAGE, UsageError
from paceline.launch.diagnose import Ending
from paceline.run.atomic import write_whole
from paceline.run.folder import (
    LOGS,
    SPEC,
    forget_processes,
    hold_space,
    rank_files,
    read_summary,
    remove,
    write_summary,
)
from paceline.run.lines import LineWriter
from paceline.run.liveness import claim, current_summary
from paceline.run.records import RUNNING, Resumed, Summary
from paceline.spec import Resolved, RunSpec


def make_folder(spec: RunSpec) -> Path:
    """A new folder for a run. A name that was given must be free; a made-up one gets a number if it is not."""
    parent = Path(spec.output_dir)
    mark = "-emulated" if spec.emulated else ""
    model = re.sub(r"[^\w.]+", "-", spec.model).strip("-.")
    made_up = f"{model}-{spec.strategy}-{spec.workers}{mark}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [spec.name] if spec.name else [made_up, *(f"{made_up}-{i}" for i in range(2, 1000))]
    for name in names:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            (parent / name).mkdir()
        except FileExistsError:
            if not parent.is_dir():
                raise UsageError(f"cannot make the run folder {parent / name}: {parent} is not a folder") from None
            continue
        except OSError as error:
            raise UsageError(f"cannot make the run folder {parent / name}: {error.strerror}") from error
        (parent / name / LOGS).mkdir()
        return parent / name
    raise UsageError(
        f"the run folder {parent / names[0]} is there already: choose another --name or --output-dir, or remove it"
    )


def open_run(folder: Path, resolved: Resolved) -> None:
    """Write what is known before the first step of a run in a folder that was made for it."""
    try:
        write_start(folder, resolved.lines(), begin_summary(resolved.spec))
    except OSError as error:
        remove(folder)
        raise UsageError(f"cannot write to the run folder {folder}: {error.strerror}; see --output-dir") from error


def write_start(folder: Path, options: Sequence[str], summary: Summary) -> None:
    """Make this process the owner of the run, which has these options: lines of TOML.

    Until the run ends, its summary says that it is running; when the owner has gone, the run has ended.
    """
    hold_space(folder)
    claim(folder)
    write_whole(folder / SPEC, "\n".join(options) + "\n")
    write_summary(folder, summary)


def continue_run(folder: Path, position: Position, options: Sequence[str], summary: Summary) -> None:
    """Make the folder a running run's again: records of what is after this position no longer count."""
    before = read_summary(folder)
    for path in rank_files(folder):
        with closing(LineWriter(path)) as lines:
            lines.write(Resumed(position.step, position.epoch, position.used, time.time()))
    forget_processes(folder)
    summary.resumed = [*(before.resumed if before else []), position.step]
    write_start(folder, options, summary)


def in_use(folder: Path) -> bool:
    """Whether a process owns the run. One of another machine that has been silent for long has failed."""
    now = current_summary(folder)
    return now.status == RUNNING and not now.error


def watch_hint(folder: Path) -> str:
    """The command that shows the run while it is under way, for its introduction."""
    return f"  to watch it: paceline watch {shlex.quote(str(folder))}"


def remove_failed_start(folder: Path, ending: Ending) -> None:
    """A usage error before the first step leaves nothing worth a look, unless an earlier start of the run has."""
    failed = ending.exit_code == EXIT_USAGE and ending.summary and not ending.summary.resumed
    if failed and ending.summary and not ending.summary.steps:
        remove(folder)
        ending.summary.folder = None


def begin_summary(spec: RunSpec) -> Summary:
    assert spec.strategy is not None
    assert spec.workers is not None
    return Summary(
        status=RUNNING,
        strategy=spec.strategy,
        workers=spec.workers,
        servers=spec.servers or 0,
        transport=spec.transport if spec.ranks > 1 else "single",
        model=spec.model,
        task=spec.objective.name,
        data=spec.data,
        batch_size=spec.batch_size,
        global_batch=spec.update_batch,
        epochs=spec.epochs,
        seed=spec.seed,
        compute=spec.compute,
        shrink=spec.shrink,
        grid=spec.grid,
    )
