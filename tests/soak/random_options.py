"""Train with random options: either they are refused, or the training completes; synchronous ones equal sequential."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from live_run import PACELINE, LiveRun
from parity_cases import distance
from safetensors.torch import load_file

from paceline.run.records import COMPLETED

TRIALS = 500
# What is trained; the rest of the options says how.
WHAT: dict[str, tuple[str, ...]] = {
    "model": ("mlp", "shallow-cnn", "mnist-cnn"),
    "data": tuple(f"synthetic:{shape},train={n},test=30" for shape in ("1x28x28", "3x32x32") for n in (97, 150)),
    "optimizer": ("adam", "adamw", "sgd"),
    "steps": ("1", "2", "5", "9"),
    "lr": ("0.0001", "0.001", "0.01"),
    "weight-decay": ("0", "0.01"),
    "decay": ("none", "cosine", "linear"),
    "warmup-steps": ("0", "3"),
    "seed": ("0", "1", "4294967295"),
    "augment": ("none", "crop", "crop-flip"),
    "image-size": ("28", "33"),
    "validation": ("0.1", "0.5"),
    "evaluate-every": ("0", "1", "3"),
    "patience": ("0", "1", "4"),
    "best-by": ("loss", "accuracy"),
    "normalize": ("yes", "no"),
}
DATA_PARALLEL = {
    "overlap": ("on", "off", "auto"),
    "bucket-mb": ("0.001", "0.05", "100"),
    "read": ("own", "scatter", "mpi-io"),
    "check-replicas": ("1", "3"),
    "sync-batchnorm": ("yes",),
    "transport": ("gloo", "threads", "mpi"),
}
SERVED = {"servers": ("1", "2", "3"), "checkpoint-every": ("0", "1", "3"), "restarts": ("0", "2")}
DIVIDED = {"averaging": ("allreduce", "ring", "reduce-bcast", "gather"), "transport": ("gloo", "threads", "mpi")}
HOW: dict[str, dict[str, tuple[str, ...]]] = {
    "sequential": {"microbatches": ("1", "2", "3")},
    **dict.fromkeys(("allreduce", "ring", "reduce-bcast", "gather", "sharded"), DATA_PARALLEL),
    "ps-sync": SERVED,
    "ps-bounded": SERVED | {"staleness": ("0", "1", "4")},
    "ps-async": SERVED | {"staleness-lr": ("yes",)},
    "pipeline": DIVIDED | {"stages": ("1", "2", "4"), "microbatches": ("1", "3", "8"), "recompute": ("yes",),
                           "schedule": ("one-at-a-time", "gpipe", "1f1b"), "cut": ("measured", "layers", "parameters")},
    "tensor": DIVIDED | {"tensor": ("1", "2", "3")},
}  # fmt: skip
# Their updates depend on the order of arrival.
UNORDERED = ("ps-bounded", "ps-async")


def trial(seed: int, folder: Path) -> Counter[str]:
    """Options that do not belong to the strategy are given now and then: they are refused, or change nothing."""
    dice = random.Random(seed)
    strategy, workers, batch = dice.choice(list(HOW)), dice.randint(1, 4), dice.choice([1, 7, 32])
    what = {name: dice.choice(values) for name, values in WHAT.items() if name in ("model", "data", "steps")}
    what |= {name: dice.choice(values) for name, values in WHAT.items() if name not in what and dice.random() < 0.3}
    how = {name: dice.choice(values) for name, values in HOW[strategy].items() if dice.random() < 0.4}
    if dice.random() < 0.1:
        name, values = dice.choice([item for options in HOW.values() for item in options.items()])
        how[name] = dice.choice(values)
    same = [
        "--dtype",
        "float64",
        "--dropout",
        "0",
        "--no-scale-lr",
        "--log-every",
        "0",
        "--timeout",
        "30",
        *flags(what),
    ]
    command = [*same, "--strategy", strategy, "--workers", str(workers), "--batch-size", str(batch), *flags(how)]
    with LiveRun([*PACELINE, *command], folder) as run:
        code = run.end()
        run.check_nothing_is_left()
        assert code in (0, 2), (command, run.stderr())
        assert "Traceback" not in run.stderr(), (command, run.stderr())
        if code == 2:
            assert run.stderr().startswith("paceline"), (command, run.stderr())
            assert not run.folder.exists(), command
            return Counter({"refused": 1})
        summary = run.summary()
        assert summary.status == COMPLETED, command
        assert summary.steps == int(what["steps"]), command
    if strategy in UNORDERED:
        return Counter({"completed": 1})
    alone = folder / "alone"
    alone.mkdir()
    with LiveRun([*PACELINE, *same, "--batch-size", str(summary.global_batch)], alone) as run:
        assert run.end() == 0, (command, run.stderr())
    trained = [load_file(path / "run" / "model.safetensors") for path in (folder, alone)]
    assert distance(*trained) <= 1e-9, command
    return Counter({"completed with the weights of one process": 1})


def flags(options: dict[str, str]) -> list[str]:
    """As words of a command; options that are "yes" or "no" are switches."""
    words = []
    for name, value in options.items():
        words += [f"--{name}"] if value == "yes" else [f"--no-{name}"] if value == "no" else [f"--{name}", value]
    return words
