"""Language models and regressions train as in a plain PyTorch loop with torch's own optimizer, clipping and means.

Targets that do not count are not spread evenly: workers have different numbers of tokens that count. Ten steps in
float64 with a batch that is one sample smaller at the end of each epoch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import parity_cases as cases
import pytest
import torch
import torch.nn.functional as F
from parity_cases import distance
from safetensors.torch import load_file
from served import train_served
from torch import Tensor, nn
from worlds import TRANSPORTS, ThreadWorld, Worlds

import paceline
from paceline.data.load import load
from paceline.models.build import construct
from paceline.run.folder import read_summary
from paceline.run.records import Summary
from paceline.spec import RunSpec

SAMPLES, BLOCK, VOCABULARY, BATCH, STEPS = 59, 12, 23, 12, 10
LM: dict[str, Any] = {
    "task": "language-model",
    "model": "test_parity_tasks:small_gpt",
    "data": "test_parity_tasks:sentences",
    "optimizer": "adamw",
    "weight_decay": 0.1,
    "lr": 0.003,
}
SQUARES: dict[str, Any] = {
    "task": "regression",
    "model": "test_parity_tasks:Curve",
    "data": "test_parity_tasks:curves",
    "lr": 0.01,
}
OWN: dict[str, Any] = SQUARES | {"task": "test_parity_tasks:weighted"}
SAME: dict[str, Any] = {
    "dtype": "float64",
    "global_batch": BATCH,
    "steps": STEPS,
    "epochs": 9,
    "decay": "none",
    "timeout": 20.0,
}
TASKS = {"language-model": LM, "regression": SQUARES, "own": OWN}
# Every strategy that trains the model of one process; workers that share its work, and what else it needs.
SHARED: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "ring": {"overlap": "on", "bucket_mb": 0.01},
    "reduce-bcast": {},
    "gather": {},
    "sharded": {"overlap": "on", "bucket_mb": 0.01},
    "tensor": {},
    "pipeline": {"microbatches": 3, "cut": "parameters"},
}


def small_gpt(shape: tuple[int, ...], classes: int) -> nn.Module:
    from paceline.models.gpt import Gpt

    return Gpt(3, 6, 96, shape[0], classes, 0.0)


def sentences() -> Any:
    """Tokens whose later ones depend on earlier ones; half of the samples have only a few targets that count."""
    rng = np.random.default_rng(3)
    sets = []
    for count in (SAMPLES, 9):
        tokens = (rng.integers(0, VOCABULARY, (count, 1)) + 3 * np.arange(BLOCK + 1)) % VOCABULARY
        targets = tokens[:, 1:].copy()
        targets[::2, : BLOCK - 2] = -100
        sets.append((tokens[:, :-1].copy(), targets))
    return tuple(sets)


class Curve(nn.Module):
    """Two numbers for each sample; wide enough to be split over shards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 192), nn.Tanh(), nn.Linear(192, 192), nn.Tanh(), nn.Linear(192, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def curves() -> Any:
    rng = np.random.default_rng(4)
    sets = []
    for count in (SAMPLES, 9):
        x = rng.normal(size=(count, 3))
        sets.append((x, np.stack([np.sin(x.sum(1)), x[:, 0] * x[:, 1]], 1)))
    return tuple(sets)


def weighted(output: Tensor, targets: Tensor) -> tuple[Tensor, float, float]:
    """Samples count by how large their targets are; the metric is how many have the right sign."""
    weights = targets.abs().sum(1)
    loss = (weights * (output - targets).abs().sum(1)).sum()
    return loss, weights.sum().item(), float((output.sign() == targets.sign()).all(1).sum())


def mean_loss(task: str, output: Tensor, targets: Tensor) -> Tensor:
    if task == "language-model":
        return F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-100)
    if task == "regression":
        return F.mse_loss(output, targets)
    weights = targets.abs().sum(1)
    return (weights * (output - targets).abs().sum(1)).sum() / weights.sum()


def plain(
    task: str, clip: float | None = None, *, bf16: bool = False, sgd: bool = False, steps: int = STEPS
) -> tuple[dict[str, Tensor], float]:
    """Train on one process; the weights, and the loss on the test set."""
    values = TASKS[task]
    (x, y), (x_test, y_test) = (
        tuple(map(torch.from_numpy, part)) for part in (sentences if task == "language-model" else curves)()
    )
    if task != "language-model":
        x, y, x_test, y_test = x.double(), y.double(), x_test.double(), y_test.double()
    info = load(values["data"]).info
    model = construct(values["model"], info.shape, info.classes).to(torch.float32 if sgd else torch.float64)
    known = {name: values[name] for name in ("task", "model", "data")}
    model.load_state_dict(paceline.initial_weights(RunSpec(**known)))
    kind = torch.optim.AdamW if values.get("optimizer") == "adamw" else torch.optim.Adam
    optimizer: torch.optim.Optimizer = kind(
        model.parameters(), values["lr"], weight_decay=values.get("weight_decay", 0.0)
    )
    per_epoch = math.ceil(SAMPLES / BATCH)
    if sgd:
        optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for step in range(steps):
        epoch, number = divmod(step, per_epoch)
        order = torch.from_numpy(np.random.default_rng([0, 0, epoch]).permutation(SAMPLES))
        chosen = order[number * BATCH : (number + 1) * BATCH]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(x[chosen])
        mean_loss(task, output.float() if bf16 else output, y[chosen]).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        output = model(x_test)
    return dict(model.state_dict()), mean_loss(task, output.float() if bf16 else output, y_test).item()


@pytest.fixture(scope="module")
def expected() -> Any:
    found: dict[Any, Any] = {}

    def get(task: str, clip: float | None = None) -> tuple[dict[str, Tensor], float]:
        if (task, clip) not in found:
            found[task, clip] = plain(task, clip)
        return found[task, clip]  # type: ignore[no-any-return]

    return get


def check(summary: Summary | None, weights: dict[str, Tensor], wanted: tuple[dict[str, Tensor], float]) -> None:
    assert summary is not None
    assert summary.steps == STEPS
    assert distance(weights, wanted[0]) <= 1e-10
    assert summary.test_loss == pytest.approx(wanted[1], rel=1e-10)


def run(world: Any, folder: Path, values: dict[str, Any]) -> tuple[Summary | None, dict[str, Tensor]]:
    world.run(cases.train_here, folder=str(folder), values=values)
    return read_summary(folder), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("task", TASKS)
def test_one_process_trains_the_plain_model(expected: Any, tmp_path: Path, task: str) -> None:
    for number, more in enumerate(({}, {"microbatches": 3}, {"accumulate": 4}, {"accumulate": 5, "microbatches": 2})):
        values = SAME | TASKS[task] | {"strategy": "sequential", "workers": 1} | more
        check(*run(ThreadWorld(1), tmp_path / str(number), values), expected(task))


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("strategy", SHARED)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_workers_train_the_plain_model(
    worlds: Worlds, expected: Any, tmp_path: Path, transport: str, strategy: str, workers: int
) -> None:
    # All tasks on threads; the language model, whose weights differ between workers, on every transport.
    for task in TASKS if transport == "threads" else ["language-model"]:
        values = SAME | TASKS[task] | {"strategy": strategy, "workers": workers} | SHARED[strategy]
        check(*run(worlds.get(transport, workers), tmp_path / task, values), expected(task))


@pytest.mark.parametrize("strategy", SHARED)
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(expected: Any, tmp_path: Path, strategy: str) -> None:
    values = SAME | LM | {"strategy": strategy, "workers": 3, "clip_norm": 0.4} | SHARED[strategy]
    assert distance(expected("language-model", 0.4)[0], expected("language-model")[0]) > 1e-4
    check(*run(ThreadWorld(3), tmp_path / "3", values), expected("language-model", 0.4))
    if strategy in ("tensor", "pipeline"):
        part = {"tensor": "tensor", "pipeline": "stages"}[strategy]
        values |= {"workers": 4, part: 2}
        check(*run(ThreadWorld(4), tmp_path / "2x2", values), expected("language-model", 0.4))


@pytest.mark.parametrize("strategy", ["sequential", *SHARED])
def test_autocast_computes_in_bfloat16_as_in_a_plain_loop(tmp_path: Path, strategy: str) -> None:
    """Weights have moved as far and in the same direction, but for rounding; with SGD, as Adam would magnify that."""
    start, wanted, full = (plain("language-model", sgd=True, steps=n, bf16=b)[0]
                           for n, b in ((0, False), (STEPS, True), (STEPS, False)))  # fmt: skip
    workers = 1 if strategy == "sequential" else 2
    values = SAME | LM | {"dtype": "float32", "precision": "bf16", "strategy": strategy, "workers": workers}
    values |= {"optimizer": "sgd", "lr": 0.02, "weight_decay": 0.0, "momentum": 0.0}
    _, weights = run(ThreadWorld(workers), tmp_path, values | SHARED.get(strategy, {}))

    def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
        return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in b))

    assert apart(full, wanted) > 1e-3 * apart(wanted, start)
    assert apart(weights, wanted) < 0.03 * apart(wanted, start)


@pytest.mark.parametrize("strategy", SHARED)
def test_accumulated_batches_are_one_batch(expected: Any, tmp_path: Path, strategy: str) -> None:
    """Also if a part of a batch is empty on some worker."""
    for accumulate in (2, 5):
        values = SAME | LM | {"strategy": strategy, "workers": 3, "accumulate": accumulate} | SHARED[strategy]
        check(*run(ThreadWorld(3), tmp_path / str(accumulate), values), expected("language-model"))


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 2)])
@pytest.mark.parametrize("task", TASKS)
def test_servers_train_the_plain_model(expected: Any, tmp_path: Path, task: str, workers: int, servers: int) -> None:
    values = SAME | TASKS[task] | {"strategy": "ps-sync", "workers": workers, "servers": servers, "log_every": 0}
    for number, more in enumerate(({}, {"accumulate": 2})):
        folder = tmp_path / str(number)
        folder.mkdir()
        check(*train_served(values | more, folder), expected(task))


@pytest.mark.parametrize(("strategy", "workers", "servers"),
                         [("ps-sync", 3, 1), ("ps-sync", 2, 2), ("ps-sync", 2, 3), ("ps-bounded", 2, 2),
                          ("ps-async", 1, 2)])  # fmt: skip
def test_servers_clip_by_the_norm_of_the_whole_model(
    expected: Any, tmp_path: Path, strategy: str, workers: int, servers: int
) -> None:
    values = (
        SAME | LM | {"strategy": strategy, "workers": workers, "servers": servers, "log_every": 0, "clip_norm": 0.4}
    )
    bound = {"staleness": 0} if strategy == "ps-bounded" else {}
    check(*train_served(values | bound, tmp_path), expected("language-model", 0.4))


@pytest.mark.parametrize(
    ("strategy", "workers"), [("ring", 3), ("sharded", 3), ("pipeline", 2), ("tensor", 2), ("ps-sync", 2)]
)
def test_predictions_are_counted_by_class(tmp_path: Path, strategy: str, workers: int) -> None:
    values = {"model": "mlp", "data": "synthetic:1x12x12,classes=4,train=64,test=21", "hidden": (192, 96), "steps": 6,
              "global_batch": 16, "dtype": "float64", "timeout": 20.0, "log_every": 0}  # fmt: skip
    alone, _ = run(ThreadWorld(1), tmp_path / "alone", values | {"strategy": "sequential", "workers": 1})
    values |= {"strategy": strategy, "workers": workers}
    folder = tmp_path / strategy
    folder.mkdir()
    trained = train_served(values, folder) if strategy == "ps-sync" else run(ThreadWorld(workers), folder, values)
    summary = trained[0]
    assert summary is not None
    assert alone is not None
    assert alone.confusion is not None
    assert summary.confusion == alone.confusion
    counted = torch.tensor(alone.confusion)
    assert counted.sum(1).tolist() == torch.bincount(load(str(values["data"])).test.targets).tolist()
    assert alone.test_accuracy == pytest.approx(counted.trace().item() / 21)
