"""What sampling a node costs a training: one sample's processor time, and steps with the sampler on and off.

    python benchmarks/sampler.py [--seconds 120] [--window 5] [--samples 1000]

The first table is the processor time of a sample, of many in a row. The second is of real trainings of mnist-cnn in
which the sampler is on and off by turns, a window each: a ratio compares the mean step of a window with that of the
next, within one run, and shown are the ratios' median, smallest and largest; beside them those of a run that had it on
all the time, which is how much ratios differ by themselves. `share` is of a core, by the processor time that the
sampler's thread has counted itself: when steps have taken the caches, a sample takes longer than in a row.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from raw_lines import raw_lines

from paceline.launch.counters import Counters
from paceline.launch.gpus import Gpus
from paceline.launch.usage import PERIOD, Samples
from paceline.run.lines import LineWriter

PACELINE = str(Path(sys.executable).parent / "paceline")
RUNS = {
    "sequential, 1 process": ["--strategy", "sequential"],
    "ring, gloo, 2 processes": ["--strategy", "ring", "--workers", "2"],
}
# Found by the ranks' Python when it starts: the sampler sleeps through every second window of the wall clock.
BY_TURNS = """
import os, time
from paceline.launch import usage

WINDOW, steady = float(os.environ["BENCH_WINDOW"]), usage.beats

def left():
    return 2 * WINDOW - time.time() % (2 * WINDOW)

def by_turns(period, wait):
    while True:
        if left() > WINDOW:
            yield from steady(period, lambda seconds: wait(seconds) or left() <= WINDOW)
        if wait(left()):
            return

usage.beats = by_turns
"""
SKIP_SECONDS = 5.0  # the first steps fill caches


def sample_seconds(own_processes: bool, count: int, folder: Path) -> float:
    """Processor seconds of one sample, written and flushed."""
    counters = Counters(lambda: [os.getpid()], own_processes=own_processes)
    samples, lines = Samples(counters, Gpus()), LineWriter(folder / "samples.jsonl")
    start = time.thread_time()
    for _ in range(count):
        lines.write(samples.take())
        lines.flush()
    seconds = time.thread_time() - start
    lines.close()
    counters.close()
    return seconds / count


def train(flags: list[str], seconds: float, window: float | None, folder: Path) -> Path:
    """A training that is interrupted after so many seconds of steps; its run folder."""
    name = f"run-{len(list(folder.iterdir()))}"
    variables = dict(os.environ)
    if window:
        turns = folder / "turns"
        turns.mkdir(exist_ok=True)
        (turns / "sitecustomize.py").write_text(BY_TURNS)
        variables |= {"PYTHONPATH": str(turns), "BENCH_WINDOW": str(window)}
    process = subprocess.Popen(
        [PACELINE, "train", *flags, "--threads", "1", "--epochs", "100000", "--no-test", "--log-every", "0",
         "--output-dir", str(folder), "--name", name],
        env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (folder / name / "env.json").exists() and process.poll() is None:
        time.sleep(0.1)
    time.sleep(SKIP_SECONDS + seconds)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    if process.returncode != 130:
        sys.exit(f"the training failed:\n{said}")
    return folder / name


def ratios(run: Path, window: float) -> list[float]:
    """Of every window with an even number and the next one: mean step divided by mean step."""
    steps = [record for record in raw_lines(run / "rank_0.jsonl") if record["kind"] == "step"]
    begin, windows = steps[0]["time"] + SKIP_SECONDS, defaultdict[int, list[float]](list)
    for step in steps:
        number = int(step["time"] // window)
        if number * window >= begin and (step["time"] - step["seconds"]) // window == number:
            windows[number].append(step["seconds"])
    last = max(windows)  # not a whole one
    pairs = [(windows[n], windows[n + 1]) for n in sorted(windows) if n % 2 == 0 and n + 1 in windows and n + 1 < last]
    return [statistics.mean(a) / statistics.mean(b) for a, b in pairs]


def own_share(run: Path) -> tuple[float, float]:
    """Seconds of a sample, and the sampler's part of the time of a core, as its thread has counted."""
    (path,) = run.glob("node_*.jsonl")
    end = next(record for record in raw_lines(path) if record["kind"] == "end")
    each = end["cpu_seconds"] / end["samples"]
    return each, each / PERIOD


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0, help="of each training")
    parser.add_argument("--window", type=float, default=5.0)
    parser.add_argument("--samples", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        print(f"{args.samples} samples in a row, one every {PERIOD} s, {os.cpu_count()} cores\n")
        print(f"{'':<38}{'a sample':>12}{'of a core':>12}")
        kinds = {"the machine, and 1 rank": False, f"all {_processes()} processes, as in the lab": True}
        for title, own in kinds.items():
            each = sample_seconds(own, args.samples, folder)
            print(f"{title:<38}{each * 1e6:>9.0f} µs{each / PERIOD:>12.4%}")
        if args.seconds <= 0:
            return
        print(f"\nmnist-cnn, batch 128 a process, {args.seconds:g} s each, windows of {args.window:g} s\n")
        print(f"{'':<26}{'step, on ÷ off':>26}{'on ÷ on':>26}{'a sample':>12}{'share':>10}", flush=True)
        for title, flags in RUNS.items():
            by_turns, always = (train(flags, args.seconds, window, folder) for window in (args.window, None))
            cells = [_spread(ratios(run, args.window)) for run in (by_turns, always)]
            each, share = own_share(always)
            print(f"{title:<26}{cells[0]:>26}{cells[1]:>26}{each * 1e6:>9.0f} µs{share:>10.4%}", flush=True)


def _processes() -> int:
    return sum(entry.isdecimal() for entry in os.listdir("/proc"))


def _spread(found: list[float]) -> str:
    if not found:
        return "too short"
    return f"{statistics.median(found):.4f} ({min(found):.3f}–{max(found):.3f})"


if __name__ == "__main__":
    main()
