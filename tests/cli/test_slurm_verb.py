"""`paceline slurm`: a script that bash and Slurm understand, or a refusal before anything is queued."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from paceline.cli.main import main
from paceline.cli.slurm import seconds_of

FOUR = ["slurm", "--nodes", "2", "--ntasks-per-node", "2"]
RING = ["train", "--strategy", "ring"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its name has what a shell would take for something else."""
    odd = tmp_path / "it's $HOME #1"
    odd.mkdir()
    monkeypatch.chdir(odd)
    return odd


def check_script(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The script, which bash can read."""
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    return text


def check_refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that ends with exit code 2 and prints no script."""
    try:
        code = main(arguments)
    except SystemExit as exit:
        code = int(str(exit.code))
    said = capsys.readouterr()
    assert (code, said.out) == (2, ""), said.err
    return said.err


class Started(NamedTuple):
    """What srun was given, where and with which variables."""

    place: str
    address: str
    threads: str
    words: list[str]


def run_by_bash(script: str) -> Started:
    """Run a script where srun only says what it sees."""
    fakes = r"""
scontrol() { printf 'n1\nn2\n'; }
srun() { printf '%s\0' "$PWD" "$MASTER_ADDR" "${OMP_NUM_THREADS:-}" "$@"; }
export SLURM_JOB_NODELIST=n[1-2] SLURM_CPUS_PER_TASK=3
unset MASTER_ADDR OMP_NUM_THREADS
"""
    done = subprocess.run(["bash", "-c", fakes + script], stdout=subprocess.PIPE, text=True, cwd="/", check=True)
    place, address, threads, *words = done.stdout.split("\0")[:-1]
    return Started(place, address, threads, words)


def test_figure_4_of_the_first_seed_is_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--time 48:00:00 --nodes 2 --ntasks-per-node 4 --output 2n8p.out --partition ctessum"
    lines = check_script(capsys, "slurm", *options.split(), "--", *RING).splitlines()
    assert lines[0] == "#!/bin/bash"
    assert [line for line in lines if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=paceline",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --time=48:00:00",
        "#SBATCH --partition=ctessum",
        "#SBATCH --output=2n8p.out",
        "#SBATCH --signal=TERM@60",
    ]
    # Slurm stops reading its options at the first command.
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert lines[first] == "set -euo pipefail"
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    assert "ring, 8 workers x batch 128 = global batch 1024" in lines[1]
    assert "paceline slurm --job-name=paceline --nodes=2" in lines[2]


def test_every_word_comes_through_bash_as_it_was_given(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    words = [*RING, "--name", 'it\'s `date` $HOME \\ "#1"', "--output-dir", "läufe * ~\nexit 3"]
    found = run_by_bash(check_script(capsys, *FOUR, "--cpus-per-task", "3", "--", *words))
    assert found.words == [
        *("--kill-on-bad-exit=0", "--wait=60", "--cpus-per-task=3", sys.executable, "-m", "paceline"),
        *words,
    ]
    assert (found.place, found.address, found.threads) == (str(folder), "n1", "3")


def test_what_was_not_given_is_left_to_slurm_and_to_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    text = check_script(capsys, *FOUR, "--", *RING)
    assert not re.search("cpus|OMP_NUM_THREADS|gpus|partition|account|--time", text)
    assert run_by_bash(text).threads == ""
    assert run_by_bash(f"export MASTER_ADDR=elsewhere\n{text}").address == "elsewhere"


def test_a_line_end_in_a_word_is_no_line_of_a_comment(capsys: pytest.CaptureFixture[str]) -> None:
    text = check_script(capsys, *FOUR, "--", *RING, "--output-dir", "a\n#SBATCH --nodes=99\nb")
    head = text.split("set -euo")[0]
    assert "\n#SBATCH --nodes=99" not in head
    assert head.count("#SBATCH --nodes=") == 2  # the comment has the other one, in its line


def test_servers_count_as_tasks_and_go_on_without_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    text = check_script(capsys, *FOUR, "--", "train", "--strategy", "ps-sync", "--servers", "2")
    assert "2 servers, 2 workers" in text
    assert run_by_bash(text).words[:2] == ["--kill-on-bad-exit=0", "--wait=0"]


def test_one_task_starts_its_workers_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ring, 3 workers" in check_script(capsys, "slurm", "--", *RING, "--workers", "3")


def test_gpus_are_the_nodes_and_need_not_be_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.comm.table.has_gpu", lambda: False)
    text = check_script(capsys, *FOUR, "--gpus-per-node", "a100:2", "--", *RING, "--device", "cuda")
    assert "#SBATCH --gpus-per-node=a100:2" in text
    assert "nccl" in text
    assert "this machine has no NVIDIA GPU" in check_refusal(capsys, *RING, "--workers", "2", "--device", "cuda")


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("slurm", ["write a training after --", "there is none"]),
        ("slurm --", ["there is none"]),
        ("slurm -- data get mnist", ["'data' cannot be queued"]),
        ("slurm train", ["unrecognized arguments: train"]),
        ("slurm --nodes 0 -- train", ["--nodes", "'0'", "at least 1"]),
        ("slurm --nodes two -- train", ["--nodes", "'two'"]),
        ("slurm --node 2 -- train", ["did you mean '--nodes'?"]),
        ("slurm --time tomorrow -- train", ["--time is 'tomorrow'", "days-hours"]),
        ("slurm --account '' -- train", ["--account is ''"]),
        ("slurm --nodes 2 -- train --stratgy ring", ["did you mean '--strategy'?"]),
        ("slurm --nodes 2 -- train --strategy rign", ["unknown strategy 'rign'", "did you mean 'ring'?"]),
        ("slurm --nodes 2 -- train --workers 3", ["--workers 3", "srun would start 2 ranks"]),
        ("slurm --nodes 2 -- train --strategy sequential", ["sequential with 2 workers"]),
        ("slurm --nodes 2 -- train --strategy ps-sync --servers 2", ["--servers 2", "srun would start 2 ranks"]),
        ("slurm --nodes 2 -- train --strategy ring --transport threads", ["--transport threads under srun"]),
        ("slurm --nodes 2 -- train --strategy ps-sync --cluster c.toml", ["--cluster", "leave them out"]),
        ("slurm --nodes 2 -- train --config none.toml", ["none.toml", "No such file"]),
        ("slurm --nodes 2 -- train --batch-size 6000", ["6000 x 2 workers = 12000"]),
    ],
)
def test_what_cannot_run_is_refused_before_it_is_queued(
    capsys: pytest.CaptureFixture[str], folder: Path, line: str, parts: list[str]
) -> None:
    message = check_refusal(capsys, *shlex.split(line))
    assert [part for part in parts if part not in message] == []
    assert not list(folder.iterdir())


def test_a_word_that_is_not_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not UTF-8" in check_refusal(capsys, *FOUR, "--", *RING, "--output-dir", "runs\udcff")
    assert "--job-name" in check_refusal(capsys, *FOUR, "--job-name", "a\nb", "--", *RING)


def test_a_file_is_executable_and_replaced_only_by_force(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    command = [*FOUR, "--script", "job.sh", "--", *RING]
    assert main(command) == 0
    said = capsys.readouterr()
    assert (said.out, said.err.splitlines()[-1]) == ("", "submit it with: sbatch job.sh")
    script = folder / "job.sh"
    assert script.stat().st_mode & 0o111
    script.write_text("mine")
    assert "--force" in check_refusal(capsys, *command)
    assert script.read_text() == "mine"
    assert main([*FOUR, "--force", "--script", "job.sh", "--", *RING]) == 0
    assert script.read_text().startswith("#!/bin/bash\n")
    assert list(folder.iterdir()) == [script]


def test_a_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert "cannot write none/job.sh: No such file" in check_refusal(
        capsys, *FOUR, "--script", "none/job.sh", "--", *RING
    )
    (folder / "taken").mkdir()
    assert "cannot write taken" in check_refusal(capsys, *FOUR, "--force", "--script", "taken", "--", *RING)
    assert [path.name for path in folder.iterdir()] == ["taken"]


def test_the_hint_is_not_part_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FOUR, "--", *RING]) == 0
    assert "| sbatch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("5", 300), ("5:30", 330), ("1:00:00", 3600), ("1-12", 129_600), ("1-00:30", 88_200), ("0-00:00:07", 7)],
)
def test_time_limits_are_read_as_slurm_reads_them(limit: str, seconds: int) -> None:
    assert seconds_of(limit) == seconds


def test_a_short_time_limit_is_not_cut_by_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--signal" in check_script(capsys, *FOUR, "--time", "10", "--", *RING)
    assert "--signal" not in check_script(capsys, *FOUR, "--time", "9:59", "--", *RING)
