"""A small process that cleans up after the launcher, even after SIGKILL; it reads what to clean from standard input.

    folder PATH    remove this folder
    run PATH       a run folder; the command in this process's arguments, with the path added, makes its summary say
                   that the launcher was killed, unless the run has ended or is being continued
    process PID    end this process and its group
    done           the launcher has ended its processes on its own

The end of the input means that the launcher has ended. It is run as a script, and imports only the standard library.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

GRACE_SECONDS = 3.0
CONCLUDE_SECONDS = 60.0


def clean(lines: list[str]) -> None:
    words = [line.rstrip("\n").split(" ", 1) for line in lines]
    pids = [int(value) for key, *rest in words for value in rest if key == "process"]
    if ["done"] not in words:
        _signal(pids, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and any(map(_alive, pids)):
            time.sleep(0.05)
        _signal(pids, signal.SIGKILL)
        for key, *rest in words:
            if key == "run":
                # Whatever becomes of this, readers find out by themselves, from owner.json.
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    subprocess.run([*sys.argv[1:], rest[0]], timeout=CONCLUDE_SECONDS, check=False)
    for key, *rest in words:
        if key == "folder":
            shutil.rmtree(rest[0], ignore_errors=True)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


def _alive(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)
    found: list[str] = []
    for line in sys.stdin:
        found.append(line)
        if line == "done\n":  # do not wait for the end of the input: a forked process may hold the pipe open
            break
    clean(found)
