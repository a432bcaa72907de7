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
export SLURM_JOB_NODELIST=n[1-2] SLURM_CPUS_PER_TASK=3 SLURM_JOB_ID=7
unset MASTER_ADDR OMP_NUM_THREADS
"""
    done = subprocess.run(["bash", "-c", fakes + script], stdout=subprocess.PIPE, text=True, cwd="/", check=True)
    place, address, threads, *words = done.stdout.split("\0")[:-1]
    return Started(place, address, threads, words)


class Ended(NamedTuple):
    """A script's exit code, what it called after the training, and its messages."""

    code: int
    calls: list[str]
    error: str


def end_by_bash(script: str, ranks: str, job: str = "PreemptTime=None") -> Ended:
    """Run a script where srun executes `ranks`, and Slurm shows `job`."""
    fakes = f"""
srun() {{
    {ranks}
}}
scontrol() {{
    case "$*" in
        "show hostnames "*) echo n1 ;;
        "show job 7") echo "{job}" ;;
        *) echo "scontrol $*" ;;
    esac
}}
sleep() {{ echo "sleep $*"; }}
export SLURM_JOB_NODELIST=n1 SLURM_JOB_ID=7
"""
    done = subprocess.run(["bash", "-c", fakes + script], capture_output=True, text=True, timeout=60, check=False)
    return Ended(done.returncode, done.stdout.splitlines(), done.stderr)


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
        ("slurm --requeue -- train", ["--requeue", "give it one with --time"]),
        ("slurm --requeue --time 3 -- train", ["--time 3 leaves no time to train", "120 seconds"]),
        ("slurm --requeue --time 9 --requeue-signal 480 -- train", ["--time 9 leaves no time to train", "480 seconds"]),
        ("slurm --requeue --time 1-0 --requeue-signal 65536 -- train", ["--requeue-signal 65536", "at most 65535"]),
        ("slurm --requeue --time 60 --requeue-signal 0 -- train", ["--requeue-signal", "at least 1"]),
        ("slurm --requeue-signal 60 --time 60 -- train", ["--requeue-signal 60", "add --requeue"]),
        ("slurm --requeue --time 60 -- train --compute emulated:1", ["--compute emulated:1", "cannot be continued"]),
        ("slurm --requeue --time 60 -- train --resume never", ["--resume never", "leave --resume out"]),
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


def test_a_job_that_is_requeued_is_signalled_before_its_time_limit(capsys: pytest.CaptureFixture[str]) -> None:
    text = check_script(capsys, *FOUR, "--time", "5", "--requeue", "--", *RING)
    assert [line for line in text.split("set -euo")[0].splitlines() if line.startswith("#SBATCH")][-3:] == [
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:USR1@120",
    ]
    assert "TERM" not in text
    assert "--requeue --requeue-signal=120 -- train" in text.splitlines()[2]
    other = check_script(capsys, *FOUR, "--time", "5", "--requeue", "--requeue-signal", "30", "--", *RING)
    assert "#SBATCH --signal=B:USR1@30" in other.splitlines()
    assert "\n#SBATCH --requeue" not in check_script(capsys, *FOUR, "--", *RING)


def test_every_start_of_a_job_has_the_same_run(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    command = [*FOUR, "--time", "60", "--requeue", "--", *RING]
    assert run_by_bash(check_script(capsys, *command)).words[-4:] == ["--strategy", "ring", "--name", "job-7"]
    mine = ["--name", "it's $HOME"]
    assert run_by_bash(check_script(capsys, *command, *mine)).words[-4:] == ["--strategy", "ring", *mine]
    (folder / "run.toml").write_text('name = "from a file"')
    assert run_by_bash(check_script(capsys, *command, "--config", "run.toml")).words[-2:] == ["--config", "run.toml"]


RUN = "läufe $HOME/it's mine"
SIGNALLED = """
    trap '{then}' USR1
    kill -USR1 $$
    for _ in {{1..1000}}; do command sleep 0.01; done
"""
SAVED = 'mkdir "$saved/step_12"; exit 130'


@pytest.mark.parametrize(
    ("ranks", "job", "code", "calls"),
    [
        (SIGNALLED.format(then=SAVED), "PreemptTime=None", 130, ["scontrol requeue 7"]),
        (SIGNALLED.format(then="exit 130"), "PreemptTime=None", 130, []),
        (SIGNALLED.format(then='mkdir "$saved/step_12"; exit 0'), "PreemptTime=None", 0, []),
        (SIGNALLED.format(then='mkdir "$saved/step_12"; exit 1'), "PreemptTime=None", 1, []),
        (SAVED, "PreemptTime=None", 130, []),
        (SAVED, "PreemptTime=2026-01-01T00:00:00", 130, ["sleep infinity"]),
        (SIGNALLED.format(then=SAVED), "PreemptTime=2026-01-01T00:00:00", 130, ["sleep infinity"]),
        ("exit 143", "PreemptTime=2026-01-01T00:00:00", 143, ["sleep infinity"]),
        ("exit 0", "PreemptTime=2026-01-01T00:00:00", 0, []),
    ],
    ids=["saved", "no-progress", "completed", "failed", "cancelled", "preempted", "preempted-with-the-signal",
         "preempted-at-its-start", "completed-when-preempted"],
)  # fmt: skip
def test_a_job_requeues_itself_only_if_its_time_ended_and_it_made_progress(
    capsys: pytest.CaptureFixture[str], folder: Path, ranks: str, job: str, code: int, calls: list[str]
) -> None:
    parent, name = RUN.split("/")
    saved = folder / RUN / "checkpoints"
    (saved / "step_9").mkdir(parents=True)
    words = [*RING, "--output-dir", parent, "--name", name]
    script = check_script(capsys, *FOUR, "--time", "60", "--requeue", "--", *words)
    ended = end_by_bash(script, f"saved={shlex.quote(str(saved))}; {ranks}", job)
    assert (ended.code, ended.calls) == (code, calls), ended.error
    assert ("not requeued: the job has saved no checkpoint" in ended.error) == (
        ranks == SIGNALLED.format(then="exit 130")
    )


def test_a_signal_that_comes_again_while_the_ranks_save_changes_nothing(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "runs" / "job-7" / "checkpoints").mkdir(parents=True)
    script = check_script(capsys, *FOUR, "--time", "60", "--requeue", "--", *RING)
    then = "kill -USR1 $$; mkdir -p runs/job-7/checkpoints/step_3; exit 130"
    ended = end_by_bash(script, SIGNALLED.format(then=then))
    assert (ended.code, ended.calls) == (130, ["scontrol requeue 7"]), ended.error
