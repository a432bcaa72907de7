"""Packages of others add to ours by entry points; one that cannot be loaded is a user's error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
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


GOSSIP = Path(__file__).parent.parent / "plugins" / "gossip"


@pytest.fixture(scope="module")
def gossip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with a strategy, a model and a data set, built and installed by pip into a folder of its own."""
    source, target = tmp_path_factory.mktemp("source") / "gossip", tmp_path_factory.mktemp("installed")
    shutil.copytree(GOSSIP, source)  # a build leaves files beside what it builds
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-build-isolation", "--no-deps",
               "--target", str(target), str(source)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def runs(gossip: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training with the strategy, and one of one process, both with the package's model and data."""
    folder = tmp_path_factory.mktemp("runs")
    words = ("train", "--model", "two-layers", "--data", "stripes", "--global-batch", "12", "--epochs", "2", "--lr",
             "0.01", "--output-dir", str(folder))  # fmt: skip
    for more in (("--strategy", "gossip", "--workers", "3", "--gossip-every", "2"), ()):
        done = paceline(gossip, *words, *more)
        assert done.returncode == 0, done.stderr
    return folder


def test_a_strategy_of_another_package_is_helped_with_and_trained(gossip: Path, runs: Path) -> None:
    helped = paceline(gossip, "train", "--help").stdout
    assert "gossip        data parallel; each worker averages its weights with one neighbour" in helped
    assert "options of gossip:\n  --gossip-every N" in helped
    folders = sorted(runs.glob("two-layers-*"))
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert [(s["strategy"], s["workers"], s["steps"]) for s in summaries] == [("gossip", 3, 16), ("sequential", 1, 16)]
    assert tomllib.loads((folders[0] / "spec.toml").read_text())["gossip_every"] == 2


@pytest.mark.parametrize("installed", [True, False])
def test_its_runs_are_reported_whether_it_is_installed_or_not(
    gossip: Path, runs: Path, tmp_path: Path, installed: bool
) -> None:
    done = paceline(gossip if installed else tmp_path, "report", str(runs), "-o", str(tmp_path / "report.html"))
    assert done.returncode == 0, done.stderr
    assert "gossip" in (tmp_path / "report.html").read_text()


def test_its_options_are_refused_by_name_where_the_strategy_has_none(gossip: Path) -> None:
    done = paceline(gossip, "train", "--strategy", "ring", "--gossip-every", "2")
    assert done.returncode == 2
    assert "strategy ring has no --gossip-every: leave it out, or use --strategy gossip" in done.stderr


def test_a_plug_in_with_the_name_of_another_is_refused(tmp_path: Path) -> None:
    install(
        tmp_path, "from paceline.comm.table import Transport\nCARTS = Transport('gloo', 'by horse', 'carts:world')\n"
    )
    done = paceline(tmp_path, "train", "--help")
    assert done.returncode == 2
    assert "has the name gloo, which is already taken" in done.stderr
