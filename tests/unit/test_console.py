"""What rank 0 shows."""

import os
import pty
import sys
from pathlib import Path

import pytest

from paceline.training.console import Console


def test_a_reader_that_leaves_does_not_end_the_training(tmp_path: Path) -> None:
    read, write = os.pipe()
    stream = os.fdopen(write, "w", buffering=1)
    console = Console(stream, tmp_path / "log")
    console.line("one")
    os.close(read)
    console.line("two")
    console.line("three")
    console.close()
    stream.close()
    assert (tmp_path / "log").read_text() == "one\ntwo\nthree\n"


def test_a_line_says_how_it_goes_and_how_long_it_will_take(tmp_path: Path) -> None:
    console = Console(None, tmp_path / "log")
    for step, seconds in enumerate([0.5, 0.3, 0.1, 0.3], 1):
        console.step(step, seconds, 40, 604 - step, 2, {"loss": "2.1", "acc": "30%"})
    console.step(2, 0.25, 40, 1, 2, {})
    console.close()
    said = "update time for each batch:"
    assert (tmp_path / "log").read_text().splitlines() == [
        f"At step 2, {said} 0.3000 s, loss: 2.1, acc: 30%, 100 samples/s, 0:04:01 left",
        f"At step 4, {said} 0.3000 s, loss: 2.1, acc: 30%, 200 samples/s, 0:02:00 left",
        f"At step 2, {said} 0.2500 s, 160 samples/s, 0:00:00 left",
    ]


def test_a_terminal_that_has_no_size_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        console = Console(terminal)
        console.start_bar(10, "epoch 0")
        assert os.read(leader, 1000).startswith(b"\repoch 0:   0%|  ")
        console.close()
    os.close(leader)


def test_ranks_other_than_0_say_nothing() -> None:
    console = Console(None)
    console.line("unheard")
    console.start_bar(10, "unseen")
    console.advance(loss="1")
    assert console._bar is None
    console.close()
