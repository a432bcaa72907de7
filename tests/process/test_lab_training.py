"""Training between the nodes of a lab: the same weights as on one machine, the bytes that were priced, and faults."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import parity_cases as cases
import pytest
import torch
from live_lab import PACELINE, LiveLab, live_lab
from live_run import BIN, ENDLESS, logged, until
from own_modules import LEAKING
from safetensors.torch import load_file
from worlds import ThreadWorld

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.lab import client
from paceline.run.folder import read_nodes, read_summary
from paceline.run.records import Summary, Traffic
from paceline.server.layout import Layout
from paceline.server.layout import cost as served_cost

GLOBAL_BATCH, STEPS, PARAMETERS = 16, 4, 690_590
TRAINING = ["--model", "mnist-cnn", "--data", "mnist-mini", "--dropout", "0", "--dtype", "float64",
            "--steps", str(STEPS), "--no-scale-lr", "--no-test", "--log-every", "0"]  # fmt: skip
BY_TWO = ["--batch-size", str(GLOBAL_BATCH // 2)]
ROOT = ["--allow-run-as-root"] if os.getuid() == 0 else []
TORCHRUN = [str(BIN / "torchrun"), "--nnodes", "{nodes}", "--node-rank", "{index}", "--nproc-per-node", "1",
            "--master-addr", "{head}", "--master-port", "29500", "-m", "paceline", "train"]  # fmt: skip
# On how many nodes, by whom started, with what.
WAYS: dict[str, tuple[str, list[str], list[str]]] = {
    "torchrun": ("1gbit:2", ["--each"], [*TORCHRUN, "--strategy", "ring"]),
    "mpiexec": ("1gbit:2", [], [str(BIN / "mpiexec"), *ROOT, "-n", "2", PACELINE, "train", "--strategy", "allreduce"]),
    "ring": ("1gbit:2", [], [PACELINE, "train", "--strategy", "ring", "--workers", "2"]),
    "own mpiexec": ("1gbit:2", [], [PACELINE, "train", "--strategy", "ring", "--workers", "2", "--transport", "mpi"]),
    "servers": ("two-racks:3", [], [PACELINE, "train", "--strategy", "ps-sync", "--workers", "2"]),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of one process."""
    folder = tmp_path_factory.mktemp("alone")
    values = {
        "model": "mnist-cnn",
        "data": "mnist-mini",
        "dropout": 0.0,
        "dtype": "float64",
        "steps": STEPS,
        "batch_size": GLOBAL_BATCH,
        "scale_lr": False,
        "test": False,
        "strategy": "sequential",
        "workers": 1,
    }
    ThreadWorld(1).run(cases.train_here, folder=str(folder), values=values)
    return load_file(folder / "model.safetensors")


def run_lab(folder: Path, lab: str, options: list[str], words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PACELINE, "lab", "run", lab, *options, "--", *words], cwd=folder, capture_output=True,
                          text=True, timeout=100, check=False)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_the_weights_are_those_of_one_machine(way: str, alone: dict[str, torch.Tensor], tmp_path: Path) -> None:
    lab, options, words = WAYS[way]
    done = run_lab(tmp_path, lab, options, [*words, *TRAINING, *BY_TWO, "--name", "run"])
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "run"
    assert cases.distance(load_file(run / "model.safetensors"), alone) < 1e-11
    about = json.loads((run / "env.json").read_text())
    assert {row["host"] for row in about["ranks"]} == {"n1", "n2", "n3"} - (
        {"n3"} if len(about["ranks"]) == 2 else set()
    )
    assert about["lab"]["nodes"][0]["name"] == "n1"
    # Nothing went past the links: every node has sent at least its gradients, as the kernel counts.
    for node in read_nodes(run).values():
        first, last = (sample.interfaces.get("eth0", NOTHING) for sample in (node.samples[0], node.samples[-1]))
        assert last.tx_bytes - first.tx_bytes > (STEPS - 1) * PARAMETERS * 8
        loopback = node.samples[-1].interfaces.get("lo")
        assert loopback is None or loopback.tx_bytes < PARAMETERS * 8


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveLab]:
    with live_lab(nodes=4, share=[str(tmp_path_factory.getbasetemp())]) as found:
        yield found


def run_priced(lab: LiveLab, folder: Path, strategy: str, steps: int) -> list[Traffic]:
    """What each node has carried in an emulated run of so many steps, as the kernel counts; by rank."""
    code, said = lab.run("n1", PACELINE, "train", "--strategy", strategy, "--workers", "3", "--compute",
                         "emulated:0.01", "--steps", str(steps), "--log-every", "0", "--output-dir", str(folder),
                         "--name", "run")  # fmt: skip
    assert code == 0, said
    summary = check_summary(folder / "run")
    assert summary.compute.startswith("emulated")
    assert summary.test_accuracy is None
    carried = []
    for node in read_nodes(folder / "run").values():
        first, last = (sample.interfaces.get("eth0", NOTHING) for sample in (node.samples[0], node.samples[-1]))
        carried.append(Traffic(*(b - a for a, b in zip(astuple(first), astuple(last), strict=True))))
    return carried


NOTHING = Traffic(0, 0, 0, 0, 0, 0)
# Of IPv4 and of TCP with timestamps, in every packet. How many acknowledgements there are, which have nothing else,
# depends on how busy the machine is.
HEADERS = 20 + 32


@pytest.mark.parametrize("strategy", ["ring", "ps-sync"])
def test_the_kernel_counts_the_bytes_that_were_priced(strategy: str, lab: LiveLab, tmp_path: Path) -> None:
    """Emulated ranks of a ring send nothing but gradients; of a server, what it receives is nothing else."""
    steps = 12 if strategy == "ring" else 40  # a part that is taken over is sent twice, which is little of 40
    carried = run_priced(lab, tmp_path, strategy, steps)
    gradients = [steps] * 3
    if strategy == "ring":
        priced = AVERAGINGS["ring"].cost(3, PARAMETERS)
    else:
        priced = served_cost(3, Layout(PARAMETERS, PARAMETERS, 1, 4))
        gradients = check_summary(tmp_path / "run").own_figures[
            "gradients"
        ]  # a worker that is late has its part taken over
        received = carried[0].rx_bytes - HEADERS * carried[0].rx_packets
        assert received / steps / priced.bytes_received[0] == pytest.approx(1.0, abs=0.03)
    for rank in range(len(carried) - 3, len(carried)):
        sent = (carried[rank].tx_bytes - HEADERS * carried[rank].tx_packets) / gradients[rank]
        assert sent / priced.bytes_sent[rank] == pytest.approx(1.0, abs=0.03), rank
    assert carried[-1].tx_bytes / carried[-1].tx_packets < 1500, "packets are packets, not bundles"


@contextlib.contextmanager
def training(lab: LiveLab, folder: Path, *words: str) -> Iterator[client.Command]:
    """A run in a lab that has begun to train; `folder` is its run folder."""
    with (folder.parent / "said").open("w") as said:
        files = (0, said.fileno(), said.fileno())
        where = ["--output-dir", str(folder.parent), "--name", folder.name]
        command = client.begin(lab.plan.name, "n1", [PACELINE, "train", *words, *where], files)
        try:
            until("it trains", lambda: logged(folder))
            yield command
        finally:
            command.connection.close()


def check_summary(folder: Path) -> Summary:
    summary = read_summary(folder)
    assert summary is not None
    return summary


def test_a_run_whose_node_is_cut_off_ends_and_says_who_waited_for_whom(tmp_path: Path) -> None:
    """The link is silent: only the deadline tells. Healed before it, the run goes on as if nothing had been."""
    run = tmp_path / "run"
    with (
        live_lab(nodes=3, share=[str(tmp_path)]) as lab,
        training(lab, run, *ENDLESS, "--hidden", "32", "--workers", "3", "--timeout", "3") as command,
    ):
        client.ask(lab.plan.name, "cut", node="n3")
        time.sleep(0.4)
        before = logged(run)
        client.ask(lab.plan.name, "heal", node="n3")
        until("it goes on", lambda: logged(run) > before + 50)
        client.ask(lab.plan.name, "cut", node="n2")
        client.wait([command])
    assert command.exit_code == 1
    summary = check_summary(run)
    assert summary.status == "failed"
    assert "rank 2 for rank 1" in str(summary.error)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can limit the memory of a node")
def test_a_rank_that_needs_more_memory_than_its_node_has_is_named_with_the_limit(tmp_path: Path) -> None:
    (tmp_path / "leaking.py").write_text(LEAKING)
    nodes = [{}, {"memory": "600MB"}]
    with live_lab(preset=None, rate="1gbit", node=nodes, share=[str(tmp_path)]) as lab:
        code, said = lab.run("n1", PACELINE, "train", "--model", f"{tmp_path / 'leaking.py'}:build", "--strategy",
                             "ring", "--workers", "2", "--steps", "1000000", "--log-every", "0", "--output-dir",
                             str(tmp_path), "--name", "run")  # fmt: skip
    assert code == 1, said
    summary = check_summary(tmp_path / "run")
    assert (summary.status, summary.failed_rank) == ("failed", 1), said
    assert "was killed by the kernel because memory ran out" in str(summary.error)
    assert str(summary.error).endswith("/n2 is limited to 0.56 GiB")


def test_servers_go_on_without_a_node_that_was_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--model", "mlp", "--hidden", "32", "--strategy", "ps-sync", "--workers", "2", "--batch-size", "8"]
    with (
        live_lab(nodes=3, share=[str(tmp_path)]) as lab,
        training(lab, run, *words, "--steps", "400", "--no-test", "--worker-timeout", "1") as command,
    ):
        client.ask(lab.plan.name, "kill", node="n3")
        client.wait([command])
    assert command.exit_code == 0
    summary = check_summary(run)
    assert (summary.status, summary.steps) == ("completed", 400)
    assert [lost["rank"] for lost in summary.own_figures["lost_workers"]] == [2]
