"""Which workers are ended: those that stay stopped, and those that make no progress while others wait for them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.elastic.channel import Counters
from paceline.launch import elastic
from paceline.launch.elastic import STOPPED_SECONDS, Silence, is_stopped

LOOK = 0.03
TIMEOUT = 60.0


class Workers:
    """Three workers, and a clock that this test moves."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counters, self.now, self.stopped = Counters(path, create=3), 100.0, set[int | None]()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(elastic, "is_stopped", lambda pid: pid in self.stopped)
        desk: Any = SimpleNamespace(counters=self.counters)
        self.silence = Silence(desk)

    def wait(self, seconds: float, alive: tuple[int, ...] = (), healthy: tuple[int, ...] = (0, 1, 2)) -> set[int]:
        """Time passes; these workers make progress, or wait for others. The processes of workers have their numbers."""
        found = set[int]()
        for _ in range(round(seconds / LOOK)):
            self.now += LOOK
            for worker in alive:
                self.counters.add(worker)
            found |= self.silence.find({0: 0, 1: 1, 2: 2}, healthy, TIMEOUT).keys()
        return found


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workers:
    return Workers(tmp_path / "counters", monkeypatch)


def test_a_worker_that_stays_stopped_is_ended_and_one_that_computes_for_long_is_not(workers: Workers) -> None:
    workers.stopped = {2}
    assert not workers.wait(0.9 * STOPPED_SECONDS, (0,))
    assert workers.wait(0.5 * STOPPED_SECONDS, (0,)) == {2}  # and not worker 1, which is as silent
    assert not (workers.wait(0.8 * TIMEOUT, (0,)) - {2})


def test_a_worker_that_is_stopped_in_turns_stays(workers: Workers) -> None:
    for _ in range(5):
        workers.stopped = {2}
        assert not workers.wait(0.8 * STOPPED_SECONDS, (0, 1))
        workers.stopped = set()
        assert not workers.wait(0.1, (0, 1, 2))


@pytest.mark.parametrize("hanging", [0, 1, 2])
def test_a_worker_that_hangs_is_ended_after_the_timeout_if_others_wait_for_it(hanging: int, workers: Workers) -> None:
    others = tuple({0, 1, 2} - {hanging})
    assert not workers.wait(0.9 * TIMEOUT, others)
    assert workers.wait(0.2 * TIMEOUT, others) == {hanging}


def test_if_all_are_silent_the_machine_is_slow_and_nobody_is_ended(workers: Workers) -> None:
    assert not workers.wait(2 * TIMEOUT)


def test_the_only_one_that_has_the_state_is_spared_until_the_timeout(workers: Workers) -> None:
    workers.stopped = {2}
    assert not workers.wait(0.9 * TIMEOUT, (0, 1), healthy=(2,))
    assert workers.wait(0.2 * TIMEOUT, (0, 1), healthy=(2,)) == {2}


def test_if_all_are_stopped_they_are_spared_until_the_timeout(workers: Workers) -> None:
    workers.stopped = {0, 1, 2}
    assert not workers.wait(0.9 * TIMEOUT)


def test_what_passed_while_the_launcher_itself_was_stopped_does_not_count(workers: Workers) -> None:
    workers.stopped = {2}
    workers.wait(0.5 * STOPPED_SECONDS, (0, 1))
    workers.now += 100
    assert not workers.wait(0.9 * STOPPED_SECONDS, (0, 1))


def test_a_stopped_process_is_recognised() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)
    assert not is_stopped(None)
