"""Packages of others add transports by entry points; one that cannot be loaded is a user's error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def install(folder: Path, code: str) -> None:
    """A package as pip leaves it: a module, and metadata with an entry point."""
    (folder / "carts.py").write_text(code)
    metadata = folder / "carts-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: carts\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[paceline.transports]\ncarts = carts:CARTS\n")


def paceline(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = dict(os.environ) | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "paceline", *words]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)


def test_a_transport_of_another_package_is_in_the_help(tmp_path: Path) -> None:
    install(
        tmp_path, "from paceline.comm.table import Transport\nCARTS = Transport('carts', 'by horse', 'carts:world')\n"
    )
    done = paceline(tmp_path, "train", "--help")
    assert done.returncode == 0, done.stderr
    assert "carts         by horse" in done.stdout


@pytest.mark.parametrize(("code", "why"), [("1 / 0", "ZeroDivisionError"), ("CARTS = 3", "is not a Transport")])
def test_one_that_cannot_be_loaded_is_named(tmp_path: Path, code: str, why: str) -> None:
    install(tmp_path, code)
    done = paceline(tmp_path, "train", "--help")
    assert done.returncode == 2
    assert "the plug-in carts (carts:CARTS) of paceline.transports" in done.stderr
    assert why in done.stderr
    assert "Traceback" not in done.stderr
