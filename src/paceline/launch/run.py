"""Start the ranks of a spec on this machine and wait for them: `paceline.train` and `paceline train`."""

from __future__ import annotations

import subprocess
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

from paceline import own_code
from paceline.data.course import START
from paceline.data.prepare import prepare
from paceline.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, PacelineError, UsageError, visible
from paceline.launch.diagnose import Ending
from paceline.launch.env import find_lab, find_seat
from paceline.launch.folder import remove_failed_start, watch_hint
from paceline.launch.notebook import StepBar, bar_stream, has_descriptor
from paceline.launch.placement import find_places
from paceline.launch.resume import go_back, open_folder
from paceline.launch.spawn import MPIEXEC_LISTENS, start
from paceline.launch.supervise import counting_signals, supervise
from paceline.layout import crowded, slow_bf16
from paceline.messages import LOGGER, quiet
from paceline.run.records import Summary
from paceline.spec import FIELDS, Resolved, RunSpec, resolve


def launch(resolved: Resolved, show: TextIO | None = None, bar: TextIO | None = None) -> tuple[Path, Ending]:
    """Run the ranks as processes on this machine; return the run folder and how it ended.

    Rank 0 prints to `show`; with `bar`, it prints nothing, and a bar is shown there.
    """
    spec = resolved.spec
    if own_code.is_own(spec.model):
        own_code.check_exists(spec.model, "model")
    if spec.reads:  # once, before the ranks start: otherwise they would wait for the one that loads it
        path = prepare(spec.data, Path(spec.data_dir) if spec.data_dir else None)
        LOGGER.debug("data set %s: %s", spec.data, path or "no file to prepare")
    places = find_places(spec)
    if places and spec.elastic:
        raise UsageError(f"--elastic {spec.elastic} in a lab: it is for ranks on one machine; leave it out")
    with counting_signals() as signals:
        folder, resolved, found = open_folder(resolved)
        LOGGER.debug("run folder %s", folder)
        if show and not quiet():
            print("\n".join([*resolved.introduction(), visible(watch_hint(folder))]), file=show, flush=True)
            for note in found.notes if found else ():
                print(note, file=show, flush=True)
            if places:
                print(f"Starting {spec.ranks} ranks in the lab: {places.about()}", file=show, flush=True)
        if (turns := crowded(spec.workers or 1, spec.threads)) and not spec.emulated:
            _warn(turns, show)
        if spec.precision == "bf16" and spec.device != "cuda" and (slow := slow_bf16()):
            _warn(slow, show)
        if not places and spec.carrier.by_mpiexec and spec.ranks > 1:
            _warn(MPIEXEC_LISTENS, show)
        with StepBar(folder, bar) if bar else nullcontext():
            crew = start(spec, folder, _descriptor(None if bar else show), places)
            start_at = found.position if found else START
            ending = supervise(crew, folder, signals, spec, start_at, lambda: go_back(folder, resolved))
    remove_failed_start(folder, ending)
    return folder, ending


def _warn(text: str, show: TextIO | None) -> None:
    """Print a warning; without a console, raise a Python warning at the line that called `train`."""
    if show:
        LOGGER.warning(text)
    else:
        warnings.warn(text, stacklevel=4)


def _descriptor(show: TextIO | None) -> int:
    """The file descriptor for rank 0's output; a stream without one gets only the introduction."""
    return show.fileno() if show and has_descriptor(show) else subprocess.DEVNULL


def train(spec: RunSpec, *, show: TextIO | None = None) -> Summary:
    """Train as the spec says, in processes on this machine, and return the summary, which notebooks show as a table.

    Progress is printed to `show`; in a notebook, and if `show` has no file descriptor, it is a bar.
    """
    seat = find_seat()
    if seat and seat.size > 1:
        raise UsageError(
            f"paceline.train() starts its own ranks, but {seat.launcher} has already started {seat.size}: "
            f"run `paceline train` under {seat.launcher}, or call paceline.train() from a plain script"
        )
    chosen = {name: value for name, value in vars(spec).items() if value != FIELDS[name].default}
    folder, ending = launch(resolve(("Python", chosen), one_machine=find_lab() is None), show, bar_stream(show))
    if ending.exit_code == EXIT_USAGE:
        raise UsageError(ending.message)
    if ending.exit_code not in (EXIT_OK, EXIT_INTERRUPTED) or ending.summary is None:
        raise PacelineError(f"{ending.message}\n  run folder: {folder}")
    return ending.summary
