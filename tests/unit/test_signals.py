"""What a rank makes of a second signal, and the janitor of any."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.launch import janitor
from paceline.launch.signals import STOPPING

RANK = """
import sys
from paceline.launch.signals import StopSignals
stop = StopSignals(lambda number: print(number, flush=True))
print("ready", flush=True)
for line in sys.stdin:
    print(stop.requested(), flush=True)
"""


@pytest.mark.parametrize(
    ("first", "second", "goes_on"),
    [
        (signal.SIGTERM, signal.SIGTERM, True),
        (signal.SIGTERM, signal.SIGINT, False),
        (signal.SIGINT, signal.SIGINT, False),
        (signal.SIGINT, signal.SIGTERM, True),
    ],
)
def test_only_a_person_ends_it_at_once(first: signal.Signals, second: signal.Signals, goes_on: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        rank.send_signal(first)
        assert rank.stdout.readline() == f"{first.value}\n"
        rank.send_signal(second)
        if goes_on:
            time.sleep(0.3)  # in which it could end
            rank.stdin.write("\n")
            rank.stdin.flush()
            assert rank.stdout.readline() == "True\n"
            rank.kill()
        else:
            assert rank.wait(20) == 130


def test_the_janitor_ignores_every_signal_that_stops_a_run() -> None:
    """Slurm sends them to all processes of a step."""
    expected, ignored, deadline = {int(number) for number in STOPPING}, set[int](), time.monotonic() + 20
    with subprocess.Popen([sys.executable, "-I", "-S", janitor.__file__], stdin=subprocess.PIPE) as cleaner:
        while not expected <= ignored and time.monotonic() < deadline:
            mask = int(Path(f"/proc/{cleaner.pid}/status").read_text().split("SigIgn:")[1].split()[0], 16)
            ignored = {number for number in range(1, 65) if mask >> number - 1 & 1}
        cleaner.communicate(b"done\n")
    assert expected <= ignored
