"""Run folders that were never run, with the faults that the checks must find."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.records import COMPLETED, LineWriter, Summary, write_summary, write_whole

START = 1_700_000_000.0


def steady(mean: float, count: int = 120, seed: int = 0, spread: float = 0.03) -> list[float]:
    return list(mean * np.random.default_rng(seed).lognormal(0, spread, count))


def write_run(
    folder: Path,
    seconds: Sequence[float],
    *,
    workers: int = 1,
    batch: int = 32,
    strategy: str | None = None,
    seed: int = 0,
    compute: Sequence[float] | None = None,  # of each rank, as a part of the step
    cores: int = 8,
    threads: int = 1,
    lab: dict[str, Any] | None = None,
    spec: dict[str, Any] | None = None,
    **summary: Any,
) -> Path:
    """A completed run whose steps took these seconds."""
    folder.mkdir(parents=True)
    chosen = strategy or ("sequential" if workers == 1 else "ring")
    values = {"model": "mlp", "data": "mnist-mini", "strategy": chosen, "workers": workers, "batch_size": batch,
              "seed": seed, "dropout": 0.0, "lr": 0.01, "optimizer": "sgd", **(spec or {})}  # fmt: skip
    write_whole(folder / "spec.toml", "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + "\n")
    ranks = [{"rank": rank, "role": "worker", "host": "here", "pid": rank + 1} for rank in range(workers)]
    write_whole(folder / "env.json", json.dumps({"schema": 1, "ranks": ranks, "cores": cores, "lab": lab}))
    parts = list(compute or [0.7] * workers)
    for rank in range(workers):
        lines, now = LineWriter(folder / f"rank_{rank}.jsonl"), START
        for step, value in enumerate(seconds):
            now += value
            spans = {"input": 0.05 * value, "forward": parts[rank] * value / 3, "backward": parts[rank] * value * 2 / 3,
                     "wait": (0.9 - parts[rank]) * value, "optimizer": 0.05 * value}  # fmt: skip
            lines.write("step", step=step, epoch=0, time=now, seconds=value, samples=workers * batch, spans=spans)
        lines.close()
    given = {"status": COMPLETED, "strategy": chosen, "workers": workers, "transport": "gloo", "model": values["model"],
             "data": values["data"], "batch_size": batch, "global_batch": workers * batch, "epochs": 1, "seed": seed,
             "steps": len(seconds), "threads": threads, "epoch_seconds": [sum(seconds)], "train_loss": [0.5],
             "total_seconds": sum(seconds) + 1.0, **summary}  # fmt: skip
    write_summary(folder, Summary(**given))
    return folder
