"""Files that commands write where the user wants them."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import UsageError
from paceline.run.atomic import write_whole


def check_output(path: Path, usual: str) -> None:
    """Raise UsageError if -o is not a file's name."""
    if path.is_dir():
        raise UsageError(f"-o {path} is a folder: name a file, such as {path / usual}")


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}") from None


def write_text(path: Path, text: str) -> None:
    try:
        write_whole(path, text.encode("utf-8", "backslashreplace").decode())  # folder names need not be UTF-8
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
