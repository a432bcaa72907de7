"""Run long campaigns of randomised trials; each trial has a seed and runs in a process of its own.

A campaign is a module with a function `trial(seed, folder)`, which raises an exception if a claim does not hold and
returns what it did, and `TRIALS`, the default number of trials. Each finished trial is a line of soak/CAMPAIGN.jsonl; a
campaign that is run again continues after its last finished trial.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

CAMPAIGNS = (
    "storms",
    "kills",
    "server_kills",
    "resumes",
    "saves",
    "labs",
    "random_options",
    "slow_ranks",
    "shared_memory",
    "elastic_kills",
)
# A trial that takes longer has failed: everything in it that waits gives up much earlier.
TRIAL_SECONDS = 600.0
# What cleans up after a launcher that was killed waits for its ranks, and completes the summary.
CLEANING_SECONDS = 15.0
TESTS = Path(__file__).parent.parent
sys.path[1:1] = [str(TESTS / folder) for folder in ("", "process", "parity")]

from raw_lines import RawWriter, raw_lines  # noqa: E402  it is in one of these folders


def main() -> int:
    parser = argparse.ArgumentParser(description="Run long campaigns of randomised trials.")
    parser.add_argument("campaigns", nargs="*", default=CAMPAIGNS, help=f"of {', '.join(CAMPAIGNS)}; all unless given")
    parser.add_argument("--hours", type=float, default=2.0, help="of each campaign; then it begins no more trials")
    parser.add_argument("--trials", type=int, help="of each campaign, with those of earlier runs")
    parser.add_argument("--seed", type=int, help="run only this trial, and do not record it")
    parser.add_argument("--folder", type=Path, default=Path("soak"), help="where the results are")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # also in the background of a shell, where SIGINT is ignored
        signal.signal(number, signal.default_int_handler)
    for name in options.campaigns:
        if importlib.util.find_spec(name) is None:
            parser.error(f"there is no campaign {name!r}; give one of {', '.join(CAMPAIGNS)}")
    if options.seed is not None:
        if len(options.campaigns) != 1:
            parser.error("--seed needs the name of one campaign")
        run_here(options.campaigns[0], options.seed, options.folder.absolute())
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        for name in options.campaigns:
            run(name, options.trials or importlib.import_module(name).TRIALS, 3600 * options.hours, options.folder)
    except KeyboardInterrupt:
        return 130
    finally:
        text = table(options.folder)
        (options.folder / "table.md").write_text(text)
        print(f"\n{text}", end="", flush=True)
    return int(any(not line["passed"] for name in options.campaigns for line in finished(options.folder, name)))


def run(name: str, trials: int, seconds: float, results: Path) -> None:
    """Trials of one campaign, until there are enough or the time is over."""
    end = time.monotonic() + seconds
    describe = ["git", "describe", "--always", "--dirty"]
    revision = subprocess.run(describe, cwd=TESTS, capture_output=True, text=True, check=False).stdout.strip()
    with closing(RawWriter(results / f"{name}.jsonl")) as lines:
        for seed in range(max((line["seed"] + 1 for line in finished(results, name)), default=0), trials):
            if time.monotonic() > end:
                print(f"{name}: the time is over after {seed} of {trials} trials; run it again to go on", flush=True)
                break
            begun = time.monotonic()
            done, errors = run_apart(repeat(name, seed, results))
            took = round(time.monotonic() - begun, 1)
            lines.write("trial", seed=seed, passed=done is not None, seconds=took, done=done or {}, revision=revision)
            lines.flush()
            print(f"{name} {seed + 1}/{trials}, {took} s: {'FAILED' if done is None else words(done)}", flush=True)
            if done is None:
                print(f"{errors}\nWhat it left is in {results / name / str(seed)}. To repeat it:\n"
                      f"    {shlex.join(repeat(name, seed, results))}", flush=True)  # fmt: skip


def repeat(name: str, seed: int, results: Path) -> list[str]:
    """The command of one trial."""
    program = [os.path.relpath(sys.executable), os.path.relpath(__file__), name, "--seed", str(seed)]
    return program + ([] if results == Path("soak") else ["--folder", str(results)])


def run_apart(command: list[str]) -> tuple[dict[str, int] | None, str]:
    """One trial in a process of its own: what it did, or None if it failed, and what it said on standard error."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            output, errors = process.communicate(timeout=TRIAL_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as why:
            process.send_signal(signal.SIGINT)  # it ends what it has started, and says where it waited
            output, errors = process.communicate()
            if isinstance(why, KeyboardInterrupt):
                raise
    return (json.loads(output.splitlines()[-1]) if process.returncode == 0 else None), errors


def _left(temporary: str) -> list[str]:
    left = os.listdir(temporary) + (os.listdir("/dev/shm") if os.getuid() == 0 else [])
    return [name for name in left if not name.startswith("torchinductor_")]  # by torch in this process itself


def run_here(name: str, seed: int, results: Path) -> None:
    """One trial in this process; the last line that it prints is what it did. Files of a failed one are kept."""
    from isolation import isolate_files, isolate_network

    module, folder = importlib.import_module(name), results / name / str(seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    temporary = isolate_files("paceline-soak-")
    try:
        isolate_network()
        done: Counter[str] = module.trial(seed, folder)
        deadline = time.monotonic() + CLEANING_SECONDS
        while (left := _left(temporary)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"left in {temporary} or /dev/shm: {left}"
    finally:
        shutil.rmtree(temporary)
    shutil.rmtree(folder)
    print(json.dumps(done))


def finished(results: Path, name: str) -> list[dict[str, Any]]:
    return list(raw_lines(results / f"{name}.jsonl"))


def words(done: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in sorted(done.items()))


def table(results: Path) -> str:
    """All campaigns that have finished trials, in Markdown."""
    rows, revisions = [], set()
    for path in sorted(results.glob("*.jsonl")):
        if not (trials := finished(results, path.stem)):
            continue
        failed = [str(line["seed"]) for line in trials if not line["passed"]]
        done = sum((Counter(line["done"]) for line in trials), Counter())
        revisions |= {line["revision"] for line in trials}
        seeds = f"{len(failed)} (--seed {', '.join(failed)})" if failed else "0"
        seconds = sum(line["seconds"] for line in trials)
        rows.append(f"| {path.stem} | {len(trials):,} | {len(trials) - len(failed):,} | {seeds} | {words(done)} "
                    f"| {seconds:,.0f} |")  # fmt: skip
    heading = ["| campaign | trials | passed | failed | what was done | seconds |", "|---|---|---|---|---|---|"]
    return "\n".join([f"`make soak`, revision {', '.join(sorted(revisions)) or '-'}:", "", *heading, *rows, ""])


if __name__ == "__main__":
    sys.exit(main())
