"""Packing a folder of images: it can be seen, and stopped without a trace."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from live_run import BIN, on_a_terminal, until
from PIL import Image

GET = [str(BIN / "paceline"), "data", "get"]


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of 1,000 names of one picture that takes a while to decode, as the name of a data set."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "one.png")
    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(500):
            (tmp_path / "pictures" / name / f"{number}.png").symlink_to(tmp_path / "one.png")
    return f"images:{tmp_path}/pictures"


def test_on_a_terminal_it_has_a_bar_and_elsewhere_a_line(pictures: str, tmp_path: Path) -> None:
    code, text = on_a_terminal([*GET, pictures])
    assert code == 0
    assert b"packing pictures:   0%|" in text
    assert b"packing the" not in text
    assert b"800 training and 200 test images" in text
    (packed,) = (tmp_path / "cache" / "own").iterdir()
    packed.unlink()
    done = subprocess.run([*GET, pictures], capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr.splitlines()[1] == f"paceline: packing the 1,000 images of {pictures[7:]} into {packed}"
    assert done.stdout.count("\n") == 1
    assert not subprocess.run([*GET, pictures, "--quiet"], capture_output=True, timeout=100, check=True).stderr


@pytest.mark.parametrize("command", [GET, [str(BIN / "paceline"), "train", "--model", "mlp", "--data"]])
def test_ctrl_c_says_so_in_one_line_and_leaves_no_file(command: list[str], pictures: str, tmp_path: Path) -> None:
    with subprocess.Popen([*command, pictures], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        until("it packs", lambda: list((tmp_path / "cache").glob("own/.*.part")))
        os.kill(process.pid, signal.SIGINT)
        assert process.stderr is not None
        *_, last = process.stderr.read().splitlines()
        assert process.wait(60) == 130
    assert last == "paceline: interrupted"
    assert list((tmp_path / "cache" / "own").iterdir()) == []
    assert not (tmp_path / "runs").exists()
