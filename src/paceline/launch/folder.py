"""The run folder."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

from paceline.errors import EXIT_USAGE, UsageError
from paceline.launch.diagnose import Ending
from paceline.liveness import claim
from paceline.records import RUNNING, Summary, hold_space, write_summary, write_whole
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
        (parent / name / "logs").mkdir()
        return parent / name
    raise UsageError(
        f"the run folder {parent / names[0]} is there already: choose another --name or --output-dir, or remove it"
    )


def gone_mark(folder: Path, rank: int) -> Path:
    """The file in which the launcher says why a worker ended before it could tell its server that it is there."""
    return folder / "logs" / f"rank_{rank}.gone"


def open_run(folder: Path, resolved: Resolved) -> None:
    """Write what is known before the first step; until the run ends, its summary says that it is running.

    This process owns the run: when it has gone, the run has ended.
    """
    try:
        hold_space(folder)
        claim(folder)
        write_whole(folder / "spec.toml", "\n".join(resolved.lines()) + "\n")
        write_summary(folder, begin_summary(resolved.spec))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UsageError(f"cannot write to the run folder {folder}: {error.strerror}; see --output-dir") from error


def remove_failed_start(folder: Path, ending: Ending) -> None:
    """A usage error before the first step leaves nothing worth a look."""
    if ending.exit_code == EXIT_USAGE and ending.summary and not ending.summary.steps:
        shutil.rmtree(folder, ignore_errors=True)
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
        data=spec.data,
        batch_size=spec.batch_size,
        global_batch=spec.update_batch,
        epochs=spec.epochs,
        seed=spec.seed,
        compute=spec.compute,
        shrink=spec.shrink,
        stages=spec.stages or 1,
        tensor=spec.tensor or 1,
        microbatches=spec.microbatches or 1,
        schedule=spec.schedule,
        averaging=spec.averaging,
        recompute=spec.recompute,
    )
