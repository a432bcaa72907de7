"""A command that is refused, in the tests' own process: nothing is started, so nothing needs one of its own."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "PACELINE_")
SHELL = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}


def refusal(folder: Path, *arguments: str) -> str:
    """The one message of a command that is refused before anything is started or written."""
    before, out, err = sorted(folder.rglob("*")), io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        for name in os.environ.keys() - SHELL.keys():
            patch.delenv(name)
        try:
            code: Any = main(arguments)
        except SystemExit as exit:
            code = exit.code
    assert (code, out.getvalue()) == (2, ""), err.getvalue()
    (message,) = (line for line in err.getvalue().splitlines() if not line.startswith(" "))
    assert message.startswith("paceline")
    assert sorted(folder.rglob("*")) == before
    return err.getvalue()
