"""The examples on two processes: with paceline.DataParallel and with PyTorch's DDP, recorded and not.

    python benchmarks/own_loop.py [--rounds 20] [--examples mnist gpt] [--seconds 2]

One start of torchrun trains all of them. A round trains a block of steps of each, in a new random order that all ranks
share; what is shown is the geometric mean over rounds of the time of a block divided by that of another in the same
round, with a 95 % interval. The first steps of each block are not measured. Models, data and batches are those of the
examples; each has its own model and optimizer.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from scipy import stats
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline
from paceline.data.load import load

EXAMPLES = Path(__file__).parent.parent / "examples"
WARM_UP = 40  # steps; DataParallel chooses whether to overlap in the first 23
FIRST = 10  # steps of a block that are not measured: a run folder is being filled
PAIRS = (
    ("paceline", "DDP", "DataParallel beside DDP"),
    ("paceline, recorded", "DDP, recorded", "the same, both recorded"),
    ("paceline, recorded", "paceline", "DataParallel: recorded beside not"),
    ("DDP, recorded", "DDP", "DDP: recorded beside not"),
)


def classes_of(example: str) -> dict[str, Any]:
    """What an example's script defines before it begins to run."""
    source = (EXAMPLES / f"{example}.py").read_text().split("\nparser = ")[0]
    found: dict[str, Any] = {}
    exec(compile(source, example, "exec"), found)
    return found


def forever(loader: Any) -> Iterator[Any]:
    epoch = 0
    while True:
        if isinstance(getattr(loader, "sampler", None), DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def mnist(ours: bool) -> tuple[nn.Module, Callable[[nn.Module, torch.optim.Optimizer], Any]]:
    """The model of examples/mnist.py, and a step of its loop."""
    split = load("mnist-mini").train
    data = TensorDataset(split.inputs / 255, split.targets.long())
    loader: Any = DataLoader(data, 32, sampler=None if ours else DistributedSampler(data))
    batches = forever(paceline.shard(DataLoader(data, 64, shuffle=True)) if ours else loader)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return classes_of("mnist")["Net"](0.25), step


def gpt(ours: bool) -> tuple[nn.Module, Callable[[nn.Module, torch.optim.Optimizer], Any]]:
    """The model of examples/gpt.py, and a step of its loop."""
    data = load("shakespeare:block=64")
    order = torch.Generator().manual_seed(2)

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(len(data.train.inputs), (size,), generator=order)
        return data.train.inputs[chosen].long(), data.train.targets[chosen].long()

    def step(model: Any, optimizer: torch.optim.Optimizer) -> Any:
        for last in (False, True):
            inputs, targets = paceline.shard(batch(16)) if ours else batch(8)
            with nullcontext() if last else model.no_sync():
                _, loss = model(inputs, targets)
                (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return classes_of("gpt")["GPT"](data.info.classes, 64, 4, 128, 4), step


class Contender:
    """One way to train an example."""

    def __init__(self, example: str, ours: bool, recorded: bool) -> None:
        torch.manual_seed(1)
        model, self._step = (mnist if example == "mnist" else gpt)(ours)
        self.model = paceline.DataParallel(model) if ours else DistributedDataParallel(model)
        kind = torch.optim.Adadelta if example == "mnist" else torch.optim.AdamW
        self.optimizer: torch.optim.Optimizer = kind(model.parameters())
        self.recorded = recorded
        for _ in range(WARM_UP):
            self._step(self.model, self.optimizer)

    def block(self, steps: int, folder: Path) -> float:
        """The seconds of a block of steps."""
        with ExitStack() as stack:
            run = stack.enter_context(paceline.record(folder, self.model)) if self.recorded else None
            start = 0.0
            for number in range(FIRST + steps):
                if number == FIRST:
                    dist.barrier()
                    start = time.perf_counter()
                if run:
                    with run.step() as step:
                        step.log(loss=self._step(self.model, self.optimizer))
                else:
                    self._step(self.model, self.optimizer).item()
            dist.barrier()
            return time.perf_counter() - start


def compare(example: str, rounds: int, seconds: float, folder: Path) -> None:
    """On every rank; rank 0 prints."""
    names = ("paceline", "paceline, recorded", "DDP", "DDP, recorded")
    contenders = {name: Contender(example, name.startswith("paceline"), name.endswith("recorded")) for name in names}
    long = torch.tensor(contenders["DDP"].block(20, folder) / 20)
    dist.broadcast(long, 0)
    steps = max(10, int(seconds / long.item()))
    took: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    for number in range(rounds):
        for name in order.sample(names, len(names)):
            took[name].append(contenders[name].block(steps, folder / f"{example}-{number}-{name}") / steps)
    if dist.get_rank() == 0:
        print(f"\n{example}: {rounds} rounds of {steps} steps of each")
        for name in names:
            print(f"  {name:20} {1e3 * statistics.median(took[name]):7.2f} ms a step (median)")
        for one, other, what in PAIRS:
            logs = [math.log(a / b) for a, b in zip(took[one], took[other], strict=True)]
            mean, half = statistics.fmean(logs), stats.t.ppf(0.975, rounds - 1) * stats.sem(logs)
            low, middle, high = (math.exp(x) for x in (mean - half, mean, mean + half))
            print(f"  time of {what:36} {middle:.4f} ({low:.4f} to {high:.4f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--examples", nargs="+", default=["mnist", "gpt"], choices=["mnist", "gpt"])
    parser.add_argument("--seconds", type=float, default=2.0, help="how long a block is, about")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        with tempfile.TemporaryDirectory() as folder:
            variables = dict(os.environ) | {"OMP_NUM_THREADS": "1", "OWN_LOOP_FOLDER": folder}
            command = [torchrun, "--nproc-per-node", "2", *sys.argv]
            sys.exit(subprocess.run(command, env=variables, check=False).returncode)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    logging.getLogger("paceline").setLevel(logging.WARNING)
    dist.init_process_group("gloo")
    for example in args.examples:
        compare(example, args.rounds, args.seconds, Path(os.environ["OWN_LOOP_FOLDER"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
