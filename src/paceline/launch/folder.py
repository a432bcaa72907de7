"""A new run folder: what is written before the first step, and what is removed if there is none."""

from __future__ import annotations

import re
import time
from pathlib import Path

from paceline.errors import EXIT_USAGE, UsageError
from paceline.launch.diagnose import Ending
from paceline.run.atomic import write_whole
from paceline.run.folder import LOGS, SPEC, hold_space, remove, write_summary
from paceline.run.liveness import claim
from paceline.run.records import RUNNING, Summary
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
    """Write what is known before the first step; until the run ends, its summary says that it is running.

    This process owns the run: when it has gone, the run has ended.
    """
    try:
        write_start(folder, resolved)
        write_summary(folder, begin_summary(resolved.spec))
    except OSError as error:
        remove(folder)
        raise UsageError(f"cannot write to the run folder {folder}: {error.strerror}; see --output-dir") from error


def write_start(folder: Path, resolved: Resolved) -> None:
    """Make this process the owner of the run, which has these options."""
    hold_space(folder)
    claim(folder)
    write_whole(folder / SPEC, "\n".join(resolved.lines()) + "\n")


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
