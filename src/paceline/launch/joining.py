"""What a restarted worker of an elastic run must know: where the training began. The rest it gets from others."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from paceline.data.course import Position
from paceline.run.atomic import write_whole
from paceline.strict_json import build, dump, parse, read_text

NAME = "joining"


def allow_joining(private: Path, start: Position) -> None:
    """From now on, workers that start join the training that began here, and read no checkpoint."""
    write_whole(private / NAME, dump(asdict(start)))


def forbid_joining(private: Path) -> None:
    """From now on, workers that start begin a training together."""
    (private / NAME).unlink(missing_ok=True)


def start_to_join(private: Path) -> Position | None:
    """Where the training began that a worker which starts now joins; None if all begin together."""
    try:
        return build(Position, parse(read_text(private / NAME)))
    except FileNotFoundError:
        return None
