"""Watching over a run's processes until all have ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import EXIT_INTERRUPTED, EXIT_OK
from paceline.launch.settle import Ending, settle
from paceline.launch.signals import stopping
from paceline.launch.spawn import Crew

# After a rank has failed, the others get this long to notice by themselves and write down what they saw.
GRACE_SECONDS = 3.0
GOOD_EXITS = (EXIT_OK, EXIT_INTERRUPTED)
LOOK_SECONDS = 0.03


def supervise(crew: Crew, folder: Path, signals: list[int]) -> Ending:
    """Wait for the end; a failed rank ends the others, Ctrl-C asks them to stop, a second one ends them."""
    asked = 0
    failed_at: float | None = None
    exits: dict[int, int] = {}
    try:
        while crew.running():
            if len(signals) > asked:
                asked += 1
                if asked > 1 or not _ask_to_stop(crew, folder):
                    break
            if failed_at is None and any(code not in GOOD_EXITS for code in crew.exits.values()):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > GRACE_SECONDS:
                break
            time.sleep(LOOK_SECONDS)
    finally:
        exits = crew.end(_rank_pids(folder))
        crew.dismiss()
    if not crew.are_ranks:
        return settle(folder, {} if asked else None, interrupted=asked > 0)
    return settle(folder, exits, interrupted=asked > 0)


def _ask_to_stop(crew: Crew, folder: Path) -> bool:
    """Let the ranks finish a step; false if they are not up yet and have nothing to finish."""
    pids = _rank_pids(folder)
    if not pids:
        return False
    print("\npaceline: stopping after this step (Ctrl-C again to stop at once)", file=sys.stderr, flush=True)
    # To the ranks themselves: mpiexec would end them before their step is done.
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
    return True


def _rank_pids(folder: Path) -> set[int]:
    """The ranks' processes, once they are up."""
    try:
        return {row["pid"] for row in json.loads((folder / "env.json").read_text())["ranks"]}
    except (OSError, ValueError):
        return set()


@contextlib.contextmanager
def counting_signals() -> Iterator[list[int]]:
    """Collect stopping signals in a list while this is on; only the main thread may catch any.

    Ranks that are started meanwhile have them unblocked, even where a shell had told this process to ignore them.
    """
    caught: list[int] = []
    try:
        old = {number: signal.signal(number, lambda n, _: caught.append(n)) for number in stopping()}
    except ValueError:
        yield caught
        return
    try:
        yield caught
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
