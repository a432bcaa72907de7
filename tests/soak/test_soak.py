"""Some trials of each campaign of `make soak`, and the program that runs them.

Trials of `labs` and `resumes`, and more of `kills`, are in tests/process: test_lab.py, test_resume.py,
test_failures.py, test_zygote.py.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import elastic_kills
import kills
import pytest
import random_options
import saves
import server_kills
import slow_ranks
import soak
import storms
from raw_lines import raw_lines


def test_a_sample_of_storms() -> None:
    for seed in range(50):
        storms.storm(random.Random(seed))


SAMPLE = [(kills, 1), (kills, 16), (server_kills, 2), (saves, 1), (random_options, 7), (random_options, 13),
          (slow_ranks, 4), (slow_ranks, 29), (elastic_kills, 1), (elastic_kills, 3)]  # fmt: skip


@pytest.mark.parametrize(("campaign", "seed"), SAMPLE, ids=lambda value: getattr(value, "__name__", value))
def test_a_sample_of_trials(campaign: ModuleType, seed: int, tmp_path: Path) -> None:
    assert campaign.trial(seed, tmp_path).total() > 0


def test_a_sample_of_worlds_that_share_memory(tmp_path: Path) -> None:
    """In a process of its own, which forks them: in these five, ranks are killed, stopped, and left alone."""
    command = [sys.executable, soak.__file__, "shared_memory", "--seed", "0", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"ranks killed", "ranks stopped", "worlds without a fault"} <= set(found)


TOY = """
import tempfile
from collections import Counter
TRIALS = 4
def trial(seed, folder):
    (folder / "kept").write_text("for whoever looks into a failure")
    if seed == 1:
        tempfile.mkdtemp(prefix="forgotten-")
    assert seed != 2, "a claim that does not hold"
    return Counter({"coins": seed})
"""


def test_a_campaign_goes_on_where_it_ended_and_a_failed_trial_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    lines = tmp_path / "soak" / "toy.jsonl"

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        variables = dict(os.environ) | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)

    program = [sys.executable, str(Path(soak.__file__)), "toy"]
    assert run([*program, "--trials", "1"]).returncode == 0
    lines.write_text(lines.read_text() + '{"kind": "trial", "se')  # a crash in the middle of a line
    assert run([*program, "--hours", "0"]).returncode == 0
    assert [line["seed"] for line in raw_lines(lines)] == [0]
    done = run(program)
    assert done.returncode == 1
    assert [(line["seed"], line["passed"]) for line in raw_lines(lines)] == [
        (0, True), (1, False), (2, False), (3, True)]  # fmt: skip
    assert "/dev/shm: ['forgotten-" in done.stdout
    assert "| toy | 4 | 2 | 2 (--seed 1, 2) | 3 coins |" in done.stdout
    assert (tmp_path / "soak" / "table.md").read_text() in done.stdout
    (command,) = [line for line in done.stdout.splitlines() if line.endswith("toy --seed 2")]
    again = run(shlex.split(command))
    assert again.returncode == 1
    assert "a claim that does not hold" in again.stderr
    assert sorted(path.name for path in (tmp_path / "soak" / "toy").glob("*/*")) == ["kept", "kept"]
    done = run(program)
    assert (done.returncode, "toy 1/4" in done.stdout) == (1, False)  # all are finished, and two have failed
    assert "there is no campaign 'toi'" in run([*program[:-1], "toi"]).stderr
