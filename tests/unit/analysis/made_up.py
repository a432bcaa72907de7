"""Run folders that were never run, with the faults that the checks must find and the answers that analysis must."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from raw_lines import RawWriter

from paceline.run.atomic import write_whole
from paceline.run.folder import write_summary
from paceline.run.records import COMPLETED, build_summary

START = 1_700_000_000.0
DIVIDED = ("stages", "tensor", "microbatches", "schedule", "averaging", "recompute")  # options of the spec
IDLE = 2.0  # seconds that nodes are sampled before the first step


def steady(mean: float, count: int = 120, seed: int = 0, spread: float = 0.03) -> list[float]:
    return list(mean * np.random.default_rng(seed).lognormal(0, spread, count))


def write_run(
    folder: Path,
    seconds: Sequence[float],
    *,
    workers: int = 1,
    servers: int = 0,
    batch: int = 32,
    strategy: str | None = None,
    seed: int = 0,
    compute: Sequence[float] | None = None,  # of each worker, as a part of the step
    queued: float = 0.0,  # the part of compute that was waiting for a core
    losses: Sequence[float] | None = None,  # of each step
    per_epoch: int | None = None,  # steps; all are one epoch without it
    hosts: Sequence[str] | None = None,  # of each rank
    moves: Mapping[str, tuple[float, float]] | None = None,  # bytes in and out an update, of each host that is sampled
    others: float | None = None,  # cores of `here`'s 4 that other programs use; it is sampled with them
    cores: int = 8,
    threads: int = 1,
    lab: dict[str, Any] | None = None,
    spec: dict[str, Any] | None = None,
    machine: dict[str, Any] | None = None,  # more of the environment
    **summary: Any,
) -> Path:
    """A completed run whose steps took these seconds."""
    folder.mkdir(parents=True)
    chosen = strategy or ("ps-sync" if servers else "sequential" if workers == 1 else "ring")
    values = {"model": "mlp", "data": "mnist-mini", "strategy": chosen, "workers": workers, "batch_size": batch,
              "seed": seed, "lr": 0.01, "scale_lr": False, "optimizer": "sgd",
              **({"servers": servers} if servers else {}),
              **{name: summary[name] for name in DIVIDED if summary.get(name) is not None}, **(spec or {})}  # fmt: skip
    write_whole(folder / "spec.toml", "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + "\n")
    places = list(hosts or ["here"] * (servers + workers))
    ranks = [{"rank": rank, "role": "server" if rank < servers else "worker", "host": host, "pid": rank + 1}
             for rank, host in enumerate(places)]  # fmt: skip
    write_whole(
        folder / "env.json", json.dumps({"schema": 1, "ranks": ranks, "cores": cores, "lab": lab} | (machine or {}))
    )
    in_all = batch if chosen == "ps-async" else workers * batch
    parts = list(compute or [0.7] * workers)
    for rank in range(servers + workers):
        part = None if rank < servers else parts[rank - servers]
        own = batch if part is not None and servers else in_all
        _write_rank(folder / f"rank_{rank}.jsonl", seconds if rank == 0 or part is not None else [], part, own,
                    served=bool(servers), per_epoch=per_epoch or len(seconds), losses=losses,
                    queued=queued)  # fmt: skip
    for host, (bytes_in, bytes_out) in (moves or ({} if others is None else {"here": (0, 0)})).items():
        interface = "lo" if len(set(places)) == 1 else "eth0"
        _write_node(folder, host, seconds, bytes_in, bytes_out, interface, others)
    epochs = -(-len(seconds) // (per_epoch or len(seconds)))
    times = [
        sum(seconds[i : i + (per_epoch or len(seconds))]) for i in range(0, len(seconds), per_epoch or len(seconds))
    ]
    given = {"status": COMPLETED, "strategy": chosen, "workers": workers, "transport": "zmq" if servers else "gloo",
             "servers": servers, "model": values["model"], "data": values["data"], "batch_size": batch,
             "global_batch": in_all, "epochs": epochs, "seed": seed, "steps": len(seconds), "threads": threads,
             "epoch_seconds": times, "train_loss": [0.5] * epochs, "total_seconds": sum(seconds) + 1.0,
             **summary}  # fmt: skip
    write_summary(folder, build_summary(json.loads(json.dumps({"schema": 1, **given}))))
    return folder


def _write_rank(path: Path, seconds: Sequence[float], part: float | None, samples: int, *, served: bool,
                per_epoch: int, losses: Sequence[float] | None, queued: float) -> None:  # fmt: skip
    """`part` is what it computes, of a step; None is a server, which has updates without parts."""
    lines, now = RawWriter(path), START
    for step, value in enumerate(seconds):
        now += value
        last = "push" if served else "optimizer"
        spans = {} if part is None else {"input": 0.05 * value, "forward": part * value / 3,
                                         "backward": part * value * 2 / 3, "wait": (0.9 - part) * value,
                                         last: 0.05 * value}  # fmt: skip
        learned: dict[str, Any] = {"loss": losses[step]} if losses else {}
        if queued and spans:
            learned["queued"] = {name: queued * spans[name] for name in ("forward", "backward")}
        lines.write("step", step=step, epoch=step // per_epoch, time=now, seconds=value, samples=samples, **learned,
                    spans=spans)  # fmt: skip
    lines.close()


def _write_node(folder: Path, name: str, seconds: Sequence[float], bytes_in: float, bytes_out: float,
                interface: str, others: float | None) -> None:  # fmt: skip
    """Samples twice a second, from before the first step until after the last; the other interfaces carry noise."""
    lines = RawWriter(folder / f"node_{name}.jsonl")
    lines.write("node", schema=1, name=name, cores=4, memory_bytes=8 * 10**9, period=0.5, clock="unix",
                own_processes=others is None)  # fmt: skip
    ends = np.concatenate([[0.0], np.cumsum(seconds)])
    for number, now in enumerate(np.arange(-IDLE, ends[-1] + 1.0, 0.5)):
        updates = float(np.interp(now, ends, np.arange(len(ends))))
        counts = {"rx_bytes": int(1000 + updates * bytes_in), "rx_packets": int(10 + updates * bytes_in / 1000),
                  "tx_bytes": int(2000 + updates * bytes_out), "tx_packets": int(20 + updates * bytes_out / 1000),
                  "rx_drops": 0, "tx_drops": 0}  # fmt: skip
        noise = dict.fromkeys(counts, 12345 + 7_000_000 * number)
        machine = {} if others is None else {"machine_cpu": 1.5 + others, "steal": 0.0, "preemptions": 3.0,
                                             "run_cpu": 1.5}  # fmt: skip
        lines.write("sample", time=START + now, cpu=None if number == 0 else 1.5 + (others or 0.0), **machine,
                    memory_bytes=2 * 10**9 + number,
                    interfaces={interface: counts, "eth0" if interface == "lo" else "lo": noise})  # fmt: skip
    lines.close()
