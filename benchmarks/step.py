"""What a step of one process consists of, and how far it is from the speed of matrix products.

    python benchmarks/step.py [--models mnist-cnn resnet18 resnet50v2 gpt-10m] [--rounds 5] [--steps 12]

One thread; nothing else should run on the machine. Each round times steps of the engine of `sequential`, and before and
after them the product of two matrices of 1024 by 1024. `of limit` is the speed at which a step computes what torch's
own counter finds in it (convolutions, matrix products and attention, forward and backward), divided by that of the
product: median, smallest and largest round. The parts are from torch's profiler, of steps that are not timed; `outside
operators` is the rest of a step: Python, autograd, waiting for input.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator

import torch
from data_parallel import MODELS, middle
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from paceline.comm.single import SingleComm
from paceline.data.batch import Batch
from paceline.data.course import START, Course
from paceline.launch.memory import keep_freed_memory
from paceline.spec import RunSpec, resolve
from paceline.strategies.engine import StepTimer
from paceline.strategies.sequential import Sequential
from paceline.strategies.setup import choose_place, make_model, make_optimizer
from paceline.training.setup import make_input

SIDE = 1024
# What operators belong to, by the beginning of their names; the first that fits counts.
GROUPS = {
    "convolutions": ("mkldnn_convolution", "convolution", "_slow_conv"),
    "matrix products": ("addmm", "mm", "bmm", "linear", "matmul"),
    "attention": ("_scaled_dot_product",),
    "pooling": ("max_pool2d", "adaptive_avg_pool", "_adaptive_avg_pool", "mean"),
    "normalisation": ("native_batch_norm", "native_layer_norm", "batch_norm", "layer_norm"),
    "activations": ("relu", "threshold", "gelu", "native_dropout", "bernoulli", "dropout"),
    "loss": ("_log_softmax", "nll_loss", "log_softmax", "cross_entropy", "argmax", "eq"),
    "embedding": ("embedding", "index_select"),
    "optimizer": ("_fused_",),
    "check of gradients": ("_foreach_norm", "linalg_vector_norm", "stack"),
    "adding, copying, zeros": ("add", "mul", "copy_", "fill_", "zero_", "sum", "cat", "clone", "div", "to"),
}


def group(operator: str) -> str:
    name = operator.removeprefix("aten::")
    return next((title for title, begin in GROUPS.items() if name.startswith(begin)), "other operators")


class Trained:
    """A model that is trained as `paceline train --strategy sequential` does it."""

    def __init__(self, name: str) -> None:
        self.batch, data, more = MODELS[name]
        options = {more[0].removeprefix("--"): more[1]} if more else {}
        given = {"model": name, "data": data, "batch_size": self.batch, "threads": 1, **options}
        self.spec: RunSpec = resolve(("benchmark", given)).spec
        place, comm = choose_place(self.spec, 0), SingleComm()
        self.input = make_input(self.spec, comm, place)
        self.model, _ = make_model(self.spec, self.input.info, place)
        self.engine = Sequential(comm, self.model, make_optimizer(self.spec, self.model.parameters()))
        self.engine.learns(self.spec)
        self._batches = self._all()

    def _all(self) -> Iterator[Batch]:
        course = Course(len(self.input.numbers["train"]), self.batch, START)
        while True:
            yield from self.input.epoch(course, 0, range(course.per_epoch))

    def steps(self, count: int) -> float:
        """The seconds of a step."""
        start = time.perf_counter()
        for _ in range(count):
            self.engine.advance(next(self._batches), 1, 1e-4, 0, StepTimer())
        return (time.perf_counter() - start) / count

    def operations(self) -> int:
        with FlopCounterMode(display=False) as counter:
            self.steps(1)
        return int(counter.get_total_flops())

    def parts(self, count: int) -> dict[str, float]:
        """The part of a step that operators of each group take, and what is outside of them."""
        with profile(activities=[ProfilerActivity.CPU]) as found:
            seconds = self.steps(count)
        parts = Counter[str]()
        for event in found.key_averages():
            if event.key.startswith("aten::"):
                parts[group(event.key)] += event.self_cpu_time_total / 1e6 / count / seconds
        parts["outside operators"] = 1 - sum(parts.values())
        return dict(parts.most_common())


def product_flops() -> float:
    """Operations per second of a product of matrices."""
    a, b, out = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE), torch.empty(SIDE, SIDE)
    times = []
    for _ in range(12):
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        times.append(time.perf_counter() - start)
    return float(2 * SIDE**3 / statistics.median(times))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    os.environ["KINETO_LOG_LEVEL"] = "5"  # the profiler's own messages
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trained = {name: Trained(name) for name in args.models}
    seconds: dict[str, list[float]] = {name: [] for name in trained}
    limits: dict[str, list[float]] = {name: [] for name in trained}
    for each in trained.values():
        each.steps(4)  # fills caches and the optimizer's state
    for _ in range(args.rounds):
        for name, each in trained.items():
            before = product_flops()
            seconds[name].append(each.steps(args.steps))
            limits[name].append((before + product_flops()) / 2)
    for name, each in trained.items():
        operations = each.operations()
        reached = [operations / took / limit for took, limit in zip(seconds[name], limits[name], strict=True)]
        took, limit = statistics.median(seconds[name]), statistics.median(limits[name])
        print(f"\n{name}, batch {each.batch}: {1e3 * took:.1f} ms a step, {each.batch / took:,.1f} samples/s; "
              f"{operations / each.batch / 1e6:,.1f} MFLOP a sample; products {limit / 1e9:.0f} GFLOP/s; "
              f"of limit {middle(reached)}")  # fmt: skip
        for title, part in each.parts(args.steps).items():
            if abs(part) >= 0.002:
                print(f"    {title:<26}{part:>7.1%}{1e3 * part * took:>9.2f} ms")


if __name__ == "__main__":
    main()
