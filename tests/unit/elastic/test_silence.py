"""Who is taken for stopped: a worker whose numbers stand still for long while others wait for it, and nobody else."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.elastic.channel import Lives
from paceline.launch.elastic import FEW_STEPS, SILENT_SECONDS, SILENT_STEPS, Silence

LOOK = 0.03
TIMEOUT = 60.0


class Workers:
    """Three workers, and a clock that this test moves."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lives, self.now = Lives(path, create=3), 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        desk: Any = SimpleNamespace(lives=self.lives)
        self.silence = Silence(desk)
        self.found: dict[int, float] = {}

    def wait(self, seconds: float, waiting: tuple[int, ...] = ()) -> None:
        """Time passes; these workers wait for others, and nobody begins a step."""
        for _ in range(round(seconds / LOOK)):
            self.now += LOOK
            for worker in waiting:
                life = self.lives[worker]
                self.lives[worker] = life._replace(signs=life.signs + 1)
            self.found |= self.silence.find((0, 1, 2), TIMEOUT)

    def step(self, seconds: float, late: int = 2) -> None:
        """All begin a step, which takes so long; the others wait for the late one in the second half of it."""
        for worker in range(3):
            life = self.lives[worker]
            self.lives[worker] = life._replace(steps=life.steps + 1)
        self.wait(seconds / 2)
        self.wait(seconds / 2, tuple({0, 1, 2} - {late}))


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workers:
    return Workers(tmp_path / "lives", monkeypatch)


def test_short_steps_make_a_short_limit(workers: Workers) -> None:
    for _ in range(FEW_STEPS):
        workers.step(0.12)
    workers.wait(0.9 * SILENT_SECONDS, (0, 1))
    assert not workers.found
    workers.wait(0.2 * SILENT_SECONDS, (0, 1))
    assert workers.found.keys() == {2}


def test_long_steps_make_a_long_limit_however_often_others_look(workers: Workers) -> None:
    for _ in range(FEW_STEPS):
        workers.step(3.0)
    workers.wait(0.7 * SILENT_STEPS * 3.0, (0, 1))
    assert not workers.found
    workers.wait(0.4 * SILENT_STEPS * 3.0, (0, 1))
    assert workers.found.keys() == {2}


def test_nobody_is_silent_if_nobody_waits(workers: Workers) -> None:
    for _ in range(FEW_STEPS):
        workers.step(0.12)
    workers.wait(TIMEOUT / 2)
    assert not workers.found


def test_before_there_are_steps_only_the_timeout_counts(workers: Workers) -> None:
    workers.wait(0.9 * TIMEOUT, (0, 1))
    assert not workers.found
    workers.wait(0.2 * TIMEOUT, (0, 1))
    assert workers.found.keys() == {2}


def test_a_worker_that_is_busy_with_a_disk_has_the_timeout(workers: Workers) -> None:
    for _ in range(FEW_STEPS):
        workers.step(0.12)
    workers.lives[2] = workers.lives[2]._replace(slow=1)
    workers.wait(0.9 * TIMEOUT, (0, 1))
    assert not workers.found


def test_what_passed_while_the_launcher_itself_was_stopped_does_not_count(workers: Workers) -> None:
    for _ in range(FEW_STEPS):
        workers.step(0.12)
    workers.now += 100
    workers.wait(0.9 * SILENT_SECONDS, (0, 1))
    assert not workers.found
