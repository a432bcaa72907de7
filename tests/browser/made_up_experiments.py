"""Five whole experiments that were never run, in the real format: together they have every chart that there is."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from made_up import DIVIDED
from made_up_pipeline import Stages, write_stages
from raw_lines import RawWriter

from paceline.run.atomic import write_whole
from paceline.run.folder import write_bench, write_summary
from paceline.run.records import COMPLETED, FAILED, Bench, Summary, build_summary

START = 1_700_000_000.0
IMAGES = 6_000
PERIOD = 0.5
# What a run folder's names could do to a page.
EVIL = "</script><script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">&amp;'"

SHORT_EVIL = "<b>\"'&</script>"


@dataclass
class MadeUp:
    """A run, by what it was asked to do; everything else follows from a simple model of its speed."""

    model: str = "shallow-cnn"
    data: str = "mnist"
    strategy: str = "sequential"
    workers: int = 1
    servers: int = 0
    nodes: int = 1
    batch: int = 128
    epochs: int = 4
    megabytes: float = 1.7  # of gradients
    speed: float = 2500.0  # samples/s of one worker
    bits: float = 1e9  # of a link; only where there are several nodes
    compute: str = "real"
    shrink: int = 1  # how many times smaller gradients are than the model's
    pace: float = 1.0  # how many times as fast the lab's devices are
    overlap: str = "auto"
    cores: int = 16
    others: float = 0.0  # cores that other programs use
    steps: int | None = None  # instead of epochs
    task: str = "classification"
    seed: int = 0
    spec: dict[str, Any] = field(default_factory=dict)
    stages: Stages | None = None  # of a pipeline

    @property
    def in_all(self) -> int:
        """Samples of an update."""
        return self.batch * (self.stages.replicas if self.stages else self.workers)

    @property
    def seconds(self) -> tuple[float, float]:
        """Of computing and of communicating in one step."""
        bits = self.bits if self.nodes > 1 else 2e10
        through, computing = 8e6 * self.sent / bits, self.batch / self.speed / self.pace
        if self.servers:
            return computing, 2 * through * self.workers / self.servers
        hidden = 0.4 * computing if self.overlap == "on" else 0.0
        return computing, max(0.0, 2 * through * (self.workers - 1) / self.workers - hidden)

    @property
    def sent(self) -> float:
        """Megabytes of an update."""
        return self.megabytes / self.shrink

    @property
    def per_epoch(self) -> int:
        return self.steps or -(-IMAGES // self.in_all)

    @property
    def learned(self) -> float:
        """Accuracy at the end: large batches make few updates."""
        return float(0.99 - 0.06 * np.log2(max(1.0, self.in_all / 128)) / 3 - 0.002 * self.seed)


def write(folder: Path, one: MadeUp) -> None:
    """The run's folder, complete."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng([one.seed, one.workers, one.batch, one.servers, len(one.model)])
    emulated = one.compute != "real"
    total = one.per_epoch * (1 if emulated else one.epochs)
    steps = sum(one.seconds) * 1.1 * rng.lognormal(0, 0.03, total) * np.where(np.arange(total) < 3, 1.8, 1.0)
    if one.stages:
        paces, loss = list(steps / steps[-1]), [_loss(one, number, total) for number in range(total)]
        steps = np.array(write_stages(folder, one.stages, paces, one.in_all, one.per_epoch, START + 1, loss))
    ends = START + 1 + np.cumsum(steps)
    values = {"model": one.model, "data": one.data, "strategy": one.strategy, "workers": one.workers,
              "servers": one.servers, "batch_size": one.batch, "epochs": one.epochs, "seed": one.seed, "dropout": 0.0,
              "lr": 0.01, "optimizer": "sgd", "compute": one.compute, "device": "auto",
              "shrink": one.shrink, "overlap": one.overlap, **({"steps": one.steps} if one.steps else {}),
              **{name: value for name, value in (one.stages.summary if one.stages else {}).items() if name in DIVIDED},
              **one.spec}  # fmt: skip
    write_whole(folder / "spec.toml", "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    ranks = [{"rank": rank, "role": "server" if rank < one.servers else "worker", "host": f"n{rank % one.nodes + 1}",
              "pid": rank + 1} for rank in range(one.servers + one.workers)]  # fmt: skip
    lab = {"nodes": [{"name": f"n{i + 1}", "up": one.bits, "down": one.bits, "cpu": None, "speed": one.pace, "rack": 0}
                     for i in range(one.nodes)]}  # fmt: skip
    environment = {"schema": 1, "ranks": ranks, "cores": one.cores, "gpus": [], "lab": lab, "processor": "made up",
                   "platform": "Linux", "torch": "2.13.0", "python": "3.11"}  # fmt: skip
    write_whole(folder / "env.json", json.dumps(environment))
    for rank in range(0 if one.stages else one.servers + one.workers):
        _write_rank(folder / f"rank_{rank}.jsonl", one, rank, steps, ends)
    for node in range(one.nodes):
        _write_node(folder / f"node_n{node + 1}.jsonl", one, node, float(ends[-1]))
    write_summary(folder, _summary(one, steps))


def _write_rank(path: Path, one: MadeUp, rank: int, steps: Any, ends: Any) -> None:
    lines = RawWriter(path)
    computing, _ = one.seconds
    for number, (seconds, end) in enumerate(zip(steps, ends, strict=True)):
        spent = min(0.9 * seconds, computing * (1 + 0.05 * rank))
        waited = 0.94 * seconds - spent
        spans = {"input": 0.02 * seconds, "forward": spent / 3, "backward": spent * 2 / 3}
        record: dict[str, Any] = {"samples": one.batch * one.workers}
        if one.servers and rank < one.servers:
            spans = {}
        elif one.servers:
            record["samples"] = one.batch
            spans |= {"wait": waited * 0.7, "push": waited * 0.3}
        else:
            spans |= {"wait": waited, "optimizer": 0.04 * seconds}
        if one.compute == "real":
            record["loss"] = _loss(one, number, len(steps))
        lines.write("step", step=number, epoch=number // one.per_epoch, time=float(end), seconds=float(seconds),
                    spans=spans, **record)  # fmt: skip
    lines.close()


def _loss(one: MadeUp, number: int, steps: int) -> float:
    return float(2.3 * np.exp(-3 * number / steps) + 1 - one.learned)


def _write_node(path: Path, one: MadeUp, node: int, end: float) -> None:
    """What each sample counts grows with time, and a server's more than a worker's."""
    lines, name = RawWriter(path), "lo" if one.nodes == 1 else "eth0"
    lines.write("node", schema=1, name=path.stem.removeprefix("node_"), cores=16, memory_bytes=64 * 10**9,
                period=PERIOD, clock="unix", own_processes=True)  # fmt: skip
    share = one.workers / one.servers if node < one.servers else 1.0
    rate = 1e6 * one.sent * share / sum(one.seconds)
    for number in range(int((end - START) / PERIOD) + 2):
        moved = int(rate * number * PERIOD)
        sizes = (("bytes", 1), ("packets", 1500))
        counts = {f"{way}_{what}": moved // size for way in ("rx", "tx") for what, size in sizes}
        used = 0.8 + 0.1 * (number % 3)
        lines.write("sample", time=START + number * PERIOD, cpu=used if number else None, machine_cpu=used + one.others,
                    memory_bytes=2 * 10**9, interfaces={name: counts | {"rx_drops": 0, "tx_drops": 0}})  # fmt: skip
    lines.close()


def _summary(one: MadeUp, steps: Any) -> Summary:
    emulated, ranks = one.compute != "real", one.servers + one.workers
    epochs = 1 if emulated else one.epochs
    times = [float(part.sum()) for part in np.split(steps, epochs)]
    moved = [int(1e6 * one.sent * len(steps))] * ranks
    learned: dict[str, Any] = {}
    if not emulated:
        rising = [one.learned * (1 - 0.5 ** (epoch + 2)) for epoch in range(epochs)]
        learned = {"train_accuracy": rising, "train_loss": [2 * (1 - each) for each in rising],
                   "validation_accuracy": [each - 0.01 for each in rising], "test_accuracy": one.learned,
                   "validation_loss": [2.2 * (1 - each) for each in rising], "test_loss": 1 - one.learned}  # fmt: skip
    if not emulated and one.task != "classification":
        learned = {"train_loss": [1.4 + 5 * (1 - each) for each in rising], "test_loss": 2.4 - one.learned,
                   "validation_loss": [1.5 + 5 * (1 - each) for each in rising]}  # fmt: skip
        perplexities = {name: [{"perplexity": float(np.exp(loss))} for loss in learned[f"{name}_loss"]]
                        for name in ("train", "validation")}  # fmt: skip
        learned |= {f"{name}_metrics": values for name, values in perplexities.items()}
        learned["tokens_per_second"] = 128 * one.in_all / sum(one.seconds)
        learned["test_metrics"] = {"perplexity": float(np.exp(learned["test_loss"]))}
    return build_summary(json.loads(json.dumps(dict(
        schema=1, status=COMPLETED, strategy=one.strategy, workers=one.workers, servers=one.servers, model=one.model,
        transport="zmq" if one.servers else "gloo", data=one.data, batch_size=one.batch, seed=one.seed,
        global_batch=one.in_all, epochs=epochs, task=one.task, compute=one.compute, steps=len(steps), threads=1,
        shrink=one.shrink, overlap=one.overlap == "on" if one.strategy == "ring" else None,
        compute_seconds=one.seconds[0] if emulated else None, parameters=int(one.megabytes * 250_000),
        read_seconds=0.21, update_seconds=float(np.median(steps)), epoch_seconds=times, bytes_sent=moved,
        bytes_received=moved, total_seconds=sum(times) + 2.5, wire="exact",
        **({"peak_rss_bytes": [(900 if rank < one.servers else 400 + rank) * 10**6 for rank in range(ranks)]}
           | (one.stages.summary if one.stages else {})), **learned,
    ))))  # fmt: skip


def _write_all(folder: Path, runs: list[MadeUp], **bench: Any) -> Path:
    names = []
    for number, one in enumerate(runs):
        names.append(f"{number:03}-{one.strategy}-{one.workers}")
        write(folder / names[-1], one)
    given: dict[str, Any] = {
        "name": folder.name, "about": "It is made up, to be looked at.\n\nNothing in it was measured.", "draw": (),
        "source": "a paper", "limits": ("No GPU here.",), "quick": True, "repeats": 2, "paper": (),
        "runs": tuple(names), "failed": {}, "left_out": (),
        "here": {"version": "0.1.0", "processor": "made up", "cores": 16},
    }  # fmt: skip
    write_bench(folder, Bench(**given | bench))
    return folder


def training(folder: Path) -> Path:
    """Real compute: workers on nodes, pipelines, batch sizes, what was learned, a paper's rows, a failed and a damaged
    run.
    """
    runs = [MadeUp(seed=seed) for seed in range(2)]
    for seed, (workers, nodes) in product(range(2), ((2, 1), (4, 1), (4, 2), (8, 2))):
        runs.append(MadeUp(strategy="allreduce", workers=workers, nodes=nodes, seed=seed))
    runs += [MadeUp(strategy="reduce-bcast", workers=n) for n in (2, 4)]
    runs += [MadeUp(strategy="allreduce", workers=n, batch=128 // n) for n in (2, 4)]
    runs += [MadeUp(batch=batch) for batch in (16, 2048)]
    halves = Stages((0.001, 0.0012), replicas=2, send=0.0001, average=0.001, planned=0.8)
    runs.append(MadeUp(strategy="pipeline", workers=4, batch=64, stages=halves))
    paper = ({"match": {"workers": 2, "nodes": 1}, "epoch_seconds": 82.06, "test_accuracy": 0.9843, "test_loss": 0.0559,
              "note": f"Table 2 {EVIL}"},
             {"match": {"workers": 64}, "epoch_seconds": 20.5})  # fmt: skip
    _write_all(folder, runs, title=f"Made-up training {EVIL}", paper=paper, failed={"lost": f"rank 1 died {EVIL}"},
               left_out=("device cuda: there is no GPU",))  # fmt: skip
    (folder / "damaged").mkdir()
    (folder / "damaged" / "summary.json").write_text("{")
    (folder / "lost").mkdir()
    failed = Summary(FAILED, "ring", 2, "gloo", EVIL, "mnist", 128, 256, 1, 0, error=f"rank 1 died {EVIL}")
    write_summary(folder / "lost", failed)
    return folder


def language_models(folder: Path) -> Path:
    """A language model, which has a loss and a perplexity and no accuracy: workers, batch sizes, repeats."""
    given: dict[str, Any] = {"model": "gpt-tiny", "data": "tiny-text", "task": "language-model"}
    runs = [MadeUp(seed=seed, **given) for seed in range(2)]
    runs += [MadeUp(strategy=strategy, workers=workers, seed=seed, **given) for seed in range(2)
             for strategy in ("ring", "allreduce") for workers in (2, 4)]  # fmt: skip
    runs += [MadeUp(batch=batch, **given) for batch in (16, 2048)]
    return _write_all(folder, runs, title="Made-up language models")


def servers_and_ring(folder: Path) -> Path:
    """Emulated compute on nodes of a lab, as in experiments/ps-vs-ring.toml: links of two speeds by smaller gradients.

    Two models; at the slower links one to three servers, and a ring that averages while backward goes on or after it.
    """
    runs = []
    for model, megabytes in ((SHORT_EVIL, 1920.0), ("resnet50", 320.0)):
        given: dict[str, Any] = {"model": model, "data": "cifar10", "megabytes": megabytes, "speed": 12.5, "batch": 32,
                                 "compute": "emulated:k80", "steps": 32, "pace": 8.0, "bits": 5e8}  # fmt: skip
        for shrink in (32, 256):
            runs.append(MadeUp(shrink=shrink, **given))
            runs += [MadeUp(strategy="ring", workers=n, nodes=n, shrink=shrink, overlap="on", **given)
                     for n in (2, 3, 6)]  # fmt: skip
            runs += [MadeUp(strategy="ps-sync", workers=n, servers=1, nodes=n + 1, shrink=shrink, **given)
                     for n in (1, 3, 6)]  # fmt: skip
        runs += [MadeUp(strategy="ring", workers=n, nodes=n, shrink=32, overlap="off", **given) for n in (2, 6)]
        runs += [MadeUp(strategy="ps-sync", workers=6, servers=servers, nodes=6 + servers, shrink=32, **given)
                 for servers in (2, 3)]  # fmt: skip
    file = Path(__file__).parents[2] / "experiments" / "ps-vs-ring.toml"
    return _write_all(folder, runs, title="Made-up servers and ring", about="As `paceline bench` would make it.",
                      claims=tuple(tomllib.loads(file.read_text())["claim"]))  # fmt: skip


def sizes_cut_short(folder: Path) -> Path:
    """As the quick form of experiments/batch-size-guide.toml: one network trains, of the other only time is known.

    The paper's rows are of other data, one of them of a setting that was never run.
    """
    spec = {"validation": 0.1, "normalize": False, "read": "own", "dtype": "float32"}
    runs = [MadeUp(data="mnist-mini", batch=batch, epochs=3, seed=seed, spec=spec)
            for batch in (32, 256, 2048) for seed in range(2)]  # fmt: skip
    runs += [MadeUp(data="mnist-mini", strategy="allreduce", workers=2, batch=batch // 2, epochs=3, spec=spec)
             for batch in (32, 2048)]  # fmt: skip
    runs += [MadeUp(model="resnet18", data="mnist-mini", speed=50, batch=batch, epochs=1, steps=steps,
                    spec={**spec, "validation": 0.0, "test": False})
             for batch, steps in ((16, 80), (64, 20), (160, 8))]  # fmt: skip
    paper = ({"match": {"model": "shallow-cnn", "batch_size": 32}, "of": {"data": "mnist", "epochs": 5},
              "update_seconds": 0.01, "epoch_seconds": 9.0},
             {"match": {"data": "mnist", "epochs": 5, "read": "own"}, "epoch_seconds": 9.0})  # fmt: skip
    draw = ("time-by-batch", "accuracy-by-batch", "loss-by-batch", "throughput", "strong", "learning-time",
            "learning-samples", "time-to-accuracy", "breakdown", "memory")  # fmt: skip
    return _write_all(folder, runs, title="Made-up batch sizes", draw=draw, paper=paper)


def workers_on_nodes(folder: Path) -> Path:
    """As the quick form of experiments/mpi-mnist.toml, whose settings have the longest names: real and emulated.

    Other programs disturbed a run.
    """
    given: dict[str, Any] = {"model": "mnist-cnn", "data": "mnist-mini", "epochs": 3}
    runs = [MadeUp(batch=batch, **given) for batch in (128, 512)]
    sizes = ((2, 128), (4, 128), (8, 128), (2, 256))
    runs += [MadeUp(strategy=strategy, workers=workers, batch=batch, **given)
             for strategy in ("reduce-bcast", "allreduce") for workers, batch in sizes]  # fmt: skip
    runs += [MadeUp(strategy="reduce-bcast", workers=2, others=8.0, spec={"scale_lr": False, "threads": threads},
                    **given) for threads in (1, 2)]  # fmt: skip
    emulated: dict[str, Any] = given | {"compute": "emulated:0.175", "speed": 731, "steps": 32}
    runs.append(MadeUp(**emulated))
    runs += [MadeUp(strategy="reduce-bcast", workers=workers, nodes=nodes, bits=1e10, **emulated)
             for workers, nodes in ((2, 1), (4, 1), (8, 1), (4, 2), (8, 2), (4, 4), (8, 4))]  # fmt: skip
    return _write_all(folder, runs, title="Made-up workers on nodes")
