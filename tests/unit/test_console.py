"""What rank 0 shows."""

import os
from pathlib import Path

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


def test_ranks_other_than_0_say_nothing() -> None:
    console = Console(None)
    console.line("unheard")
    console.start_bar(10, "unseen")
    console.advance(loss="1")
    assert console._bar is None
    console.close()
