"""paceline slurm: writes the batch script of a training, which is checked before anything is queued."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

from paceline import __version__
from paceline.cli import train
from paceline.cli.main import Parser
from paceline.errors import EXIT_INTERRUPTED, EXIT_OK, UsageError
from paceline.launch.resume import AUTO
from paceline.run.atomic import write_whole
from paceline.run.folder import CHECKPOINTS
from paceline.spec import Resolved, RunSpec, World, printable, resolve

# Slurm's formats of a time: minutes, [hours:]minutes:seconds, days-hours[:minutes[:seconds]].
TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")
# Seconds. With a shorter time limit, a minute is too much: Slurm then signals at the limit, and waits, usually 30 s.
SHORT = 600
# Seconds before the time limit at which a training that is to continue is asked to save: the default, the longest that
# Slurm takes, and how much sooner Slurm may send the signal.
SAVE_SECONDS, MOST_SECONDS, SOONER = 120, 65535, 60
# Options that are passed to Slurm unchanged, with Slurm's names.
HANDED_ON = ("job_name", "nodes", "ntasks_per_node", "cpus_per_task", "gpus_per_node", "time", "partition", "account",
             "output")  # fmt: skip
# If a rank is killed, the others find out and name it within seconds, so Slurm must not kill them at once. It kills the
# remaining ranks a minute after the first has ended. Servers continue without a worker, for any time.
TOGETHER, SERVED = "--kill-on-bad-exit=0 --wait=60", "--kill-on-bad-exit=0 --wait=0"

SCRIPT = """\
#!/bin/bash
# {about}
# Written by paceline {version}: {made_by}
{sbatch}
{signal}
set -euo pipefail

# Relative paths start here. All nodes need access to this folder, the Python below, the data and the output folder (a
# shared file system).
cd {folder}

# The ranks rendezvous on the first node, unless MASTER_ADDR is set.
export MASTER_ADDR="${{MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}}"
{threads}{before}
srun {options} \\
    {python} -m paceline \\
    {command}{after}
"""
SIGNAL = """\
# A minute before the time limit the ranks are asked to stop. They finish their step, save the weights and end the run
# as interrupted. `scancel` has the same effect.
#SBATCH --signal=TERM@60
"""
REQUEUE_SIGNAL = """\
# {seconds} s before the time limit, or up to a minute sooner, Slurm sends SIGUSR1 to this shell, which passes it on to
# the ranks. They finish their step, save a checkpoint and exit. Then the job is requeued and continues the run.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{seconds}
"""
REQUEUE_BEFORE = """
checkpoints() {{ echo {folder}/step_*; }}
before=$(checkpoints)
signalled=
trap 'signalled=yes; trap "" USR1; kill -USR1 "$!" || true' USR1
"""
REQUEUE_AFTER = """ &

# bash handles no signal while a command runs in the foreground; `wait` returns when one arrives.
code=0
wait "$!" || code=$?
if [ "$signalled" ]; then
    code=0
    wait "$!" || code=$?
fi

if [ "$code" != 0 ] && [[ $(scontrol show job "$SLURM_JOB_ID") =~ PreemptTime=[0-9] ]]; then
    # Slurm requeues a preempted job at the end of its grace time, but not if it has ended by then.
    sleep infinity
elif [ "$code" = {interrupted} ] && [ "$signalled" ]; then
    if [ "$(checkpoints)" = "$before" ]; then
        echo "not requeued: the job has saved no checkpoint since it started; give it more --time" >&2
    else
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$code\""""
# The run of a training without --name: a job keeps its number when it is requeued.
JOB_RUN = '"job-$SLURM_JOB_ID"'
THREADS = 'export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"\n'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline slurm [options] -- train ..."
    parser.add_argument("--nodes", type=_count, default=1, metavar="N", help="machines (default: 1)")
    parser.add_argument("--ntasks-per-node", type=_count, default=1, metavar="N",
                        help="ranks on each, servers included (default: 1)")  # fmt: skip
    parser.add_argument("--cpus-per-task", type=_count, metavar="N", help="cores of a rank, and its threads")
    parser.add_argument("--gpus-per-node", metavar="[TYPE:]N", help="GPUs of a machine")
    parser.add_argument("--time", metavar="LIMIT", help="minutes, hours:minutes:seconds or days-hours")
    parser.add_argument("--requeue", action="store_true",
                        help="save a checkpoint before the time limit, requeue the job and continue")  # fmt: skip
    parser.add_argument("--requeue-signal", type=_count, metavar="SECONDS",
                        help=f"with --requeue: save that long before the limit (default: {SAVE_SECONDS})")  # fmt: skip
    parser.add_argument("--partition", metavar="NAME", help="where to queue")
    parser.add_argument("--account", metavar="NAME", help="who pays")
    parser.add_argument("--job-name", metavar="NAME", default="paceline", help="(default: paceline)")
    parser.add_argument("--output", metavar="FILE", default="slurm-%j.out",
                        help="what the job says; %%j is its number (default: slurm-%%j.out)")  # fmt: skip
    parser.add_argument("--script", metavar="FILE", type=Path, help="write here, not to standard output")
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")


def run(args: argparse.Namespace) -> int:
    words: list[str] = args.command or []
    if not words or words[0] != "train":
        raise UsageError(
            f"write a training after --: paceline slurm --nodes 2 -- train ...; "
            f"{f'{words[0]!r} cannot be queued' if words else 'there is none'}"
        )
    _check_texts(args)
    resolved = check_training(words[1:], args.nodes * args.ntasks_per_node)
    check_requeue(args, resolved.spec)
    text = write_script(args, words, resolved)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{text[error.start : error.end]!r} is not UTF-8 and cannot be written: rename it") from error
    if args.script is None:
        print(text, end="")
        hint = "submit it with: paceline slurm ... | sbatch; or keep it with: --script job.sh, then: sbatch job.sh"
    else:
        _save(args.script, text, replace=args.force)
        hint = f"submit it with: sbatch {shlex.quote(str(args.script))}"
    print(f"{resolved.introduction()[0]}\n{hint}", file=sys.stderr)
    return EXIT_OK


def check_training(flags: list[str], tasks: int) -> Resolved:
    """Check these flags as `paceline train` would inside the job."""
    parser = Parser(prog="paceline slurm -- train", allow_abbrev=False)
    train.add_arguments(parser)
    args = parser.parse_args(flags)
    if args.cluster or args.role is not None or args.index is not None:
        raise UsageError("--cluster, --role and --index under srun: its ranks find each other; leave them out")
    # A single task starts its workers itself, as from a plain shell.
    world = World(tasks, "srun") if tasks > 1 else None
    resolved = resolve(*train.layers_of(args), world=world, here=False, one_machine=world is None)
    train.check_processes(resolved.spec, world)
    return resolved


def check_requeue(args: argparse.Namespace, spec: RunSpec) -> None:
    """Refuse to requeue a job that could not save in time, or a training that would not continue."""
    seconds = args.requeue_signal or SAVE_SECONDS
    if not args.requeue:
        if args.requeue_signal is not None:
            raise UsageError(f"--requeue-signal {seconds} says when to save before a job is requeued: add --requeue")
        return
    if args.time is None:
        raise UsageError("--requeue: the job is requeued before its time limit; give it one with --time")
    if seconds > MOST_SECONDS:
        raise UsageError(f"--requeue-signal {seconds}: Slurm takes at most {MOST_SECONDS} seconds")
    if seconds_of(args.time) <= seconds + SOONER:
        raise UsageError(
            f"--time {args.time} leaves no time to train: Slurm signals {seconds} seconds before the limit "
            f"(--requeue-signal), or up to {SOONER} seconds sooner; give the job more --time"
        )
    if spec.emulated:
        raise UsageError(f"--requeue with --compute {spec.compute}: runs with emulated compute cannot be continued")
    if spec.resume != AUTO:
        raise UsageError(
            f"--requeue with --resume {spec.resume}: a requeued job continues its own run; leave --resume out"
        )


def write_script(args: argparse.Namespace, words: list[str], resolved: Resolved) -> str:
    """The script for sbatch. Options that were not given are left to Slurm."""
    given = {name.replace("_", "-"): getattr(args, name) for name in HANDED_ON if getattr(args, name) is not None}
    options = SERVED if resolved.spec.servers else TOGETHER
    if args.cpus_per_task:
        options += ' --cpus-per-task="$SLURM_CPUS_PER_TASK"'  # srun does not inherit it from the job
    asked = [f"--{name}={value}" for name, value in given.items()]
    command, before, after = shlex.join(words), "", ""
    signal = "" if args.time and seconds_of(args.time) < SHORT else SIGNAL
    if args.requeue:
        seconds, spec = args.requeue_signal or SAVE_SECONDS, resolved.spec
        asked += ["--requeue", f"--requeue-signal={seconds}"]
        name = shlex.quote(spec.name) if spec.name else JOB_RUN
        command += "" if spec.name else f" --name {name}"
        signal = REQUEUE_SIGNAL.format(seconds=seconds)
        before = REQUEUE_BEFORE.format(folder=f"{shlex.quote(spec.output_dir)}/{name}/{CHECKPOINTS}")
        after = REQUEUE_AFTER.format(interrupted=EXIT_INTERRUPTED)
    return SCRIPT.format(
        about=printable(resolved.introduction()[0]),
        version=__version__,
        made_by=printable(shlex.join(["paceline", "slurm", *asked, "--", *words])),
        sbatch="\n".join(f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in given.items()),
        folder=shlex.quote(str(Path.cwd())),
        signal=signal,
        threads=THREADS if args.cpus_per_task else "",
        options=options,
        python=shlex.quote(sys.executable),
        before=before,
        command=command,
        after=after,
    )


def seconds_of(limit: str) -> int:
    """The seconds of a time limit in one of Slurm's formats.

    >>> [seconds_of(limit) for limit in ("5", "5:30", "1:00:00", "1-12", "1-00:30")]
    [300, 330, 3600, 129600, 88200]
    """
    days, _, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not days and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_texts(args: argparse.Namespace) -> None:
    """Refuse values that Slurm would refuse, or would not read as one word."""
    for name in ("gpus_per_node", "time", "partition", "account", "job_name", "output"):
        value = getattr(args, name)
        if value is not None and not (value and value.isprintable()):
            raise UsageError(f"--{name.replace('_', '-')} is {value!r}: it takes one printable word")
    if args.time is not None and not TIME.fullmatch(args.time):
        raise UsageError(
            f"--time is {args.time!r}; it takes minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
            f"days-hours:minutes or days-hours:minutes:seconds"
        )


def _save(path: Path, text: str, *, replace: bool) -> None:
    if path.exists() and not replace:
        raise UsageError(f"{path} already exists: choose another --script, or replace it with --force")
    try:
        write_whole(path, text)
        path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
