"""Synchronous parameter servers train the model that one process with the global batch trains; others keep books."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_loop
import pytest
import torch
import torch.nn.functional as F
from parity_cases import SETTINGS, check_trained, data_of, distance, model_of, recipe_of, train_here, values_for
from raw_lines import raw_lines
from safetensors.torch import load_file
from served import Killed, train_served
from worlds import ThreadWorld

from paceline.models.build import build
from paceline.run.records import INTERRUPTED
from paceline.server.layout import CHUNK_BYTES, Layout, cost
from paceline.strategies.parameter_server.flat import FlatModel

# Batch-norm over the global batch needs workers that meet.
SERVED = [name for name, (values, _) in SETTINGS.items() if "sync_batchnorm" not in values]
MEETINGS = [
    *(("ipc", w, s) for w, s in [(1, 1), (2, 1), (3, 1), (4, 1), (3, 2), (2, 3)]),
    *(("plain", 3, 2), ("curve", 3, 1), ("curve", 2, 2)),
]


def served_values(setting: str, workers: int, **more: Any) -> dict[str, Any]:
    values = values_for(setting, workers, **more)
    return values | {"log_every": 0}


@pytest.mark.parametrize(("wire", "workers", "servers"), MEETINGS)
def test_synchronous_servers_train_the_model_of_the_plain_loop(
    expected: Any, tmp_path: Path, wire: str, workers: int, servers: int
) -> None:
    turn = MEETINGS.index((wire, workers, servers))
    for setting in {"norm-sgd", SERVED[turn % len(SERVED)]}:
        values = served_values(setting, workers, strategy="ps-sync", servers=servers)
        summary, weights = train_served(values, tmp_path, wire)
        assert summary.own_figures["security"] == wire
        check_trained(summary, weights, expected(values), SETTINGS[setting][1])


@pytest.mark.parametrize(("servers", "killed"), [(1, False), (1, True), (2, True)])
def test_batch_norm_is_right_when_others_compute_a_lost_workers_parts(
    expected: Any, tmp_path: Path, servers: int, killed: bool
) -> None:
    """Of three workers one never comes, or dies in the middle; the others divide the batches that follow."""
    values = served_values("norm-sgd", 3, strategy="ps-sync", servers=servers, worker_timeout=1.0)
    workers, turns = range(servers, servers + 3), itertools.count()

    def die(rank: int) -> bool:
        if rank == workers[-1] and (tmp_path / f"rank_{rank}.jsonl").exists() and next(turns) == 10:
            raise Killed
        return False

    summary, weights = train_served(values, tmp_path, **{"stop": die} if killed else {"never": {workers[-1]}})
    [lost] = summary.own_figures["lost_workers"]
    assert lost["rank"] == workers[-1]
    assert (lost["samples"] > 0) == killed, "others compute the parts that it had in hand"
    slots = [_slots(tmp_path, workers, update) for update in range(summary.steps)]
    assert {len(each) for each in slots} == ({2, 3} if killed else {2})
    recipe = replace(recipe_of(values), parts=tuple(map(len, slots)))
    wanted = plain_loop.train(model_of(values), expected.start(values), data_of(values), recipe)
    check_trained(summary, weights, wanted)


def _slots(folder: Path, workers: range, update: int) -> set[int]:
    """The parts of an update, by what the workers that computed them wrote down."""
    records = (r for rank in workers for r in raw_lines(folder / f"rank_{rank}.jsonl") if r["kind"] == "step")
    return {r["figures"]["slot"] for r in records if r["step"] == update}


@pytest.mark.parametrize("servers", [1, 2])
def test_a_bound_of_zero_is_synchronous(expected: Any, tmp_path: Path, servers: int) -> None:
    for setting in ("cnn-adam", "norm-sgd"):
        values = served_values(setting, 3, strategy="ps-bounded", staleness=0, servers=servers)
        summary, weights = train_served(values, tmp_path)
        check_trained(summary, weights, expected(values))
        assert summary.own_figures["staleness"] == {"0": sum(summary.own_figures["gradients"])}


def test_one_asynchronous_worker_trains_it_too(expected: Any, tmp_path: Path) -> None:
    for setting in SERVED:
        values = served_values(setting, 1, strategy="ps-async", servers=2)
        summary, weights = train_served(values, tmp_path)
        check_trained(summary, weights, expected(values), SETTINGS[setting][1])


def test_the_best_epoch_by_validation_is_the_sequential_one(tmp_path: Path) -> None:
    more = {"validation": 0.25, "lr": 0.5, "scale_lr": False}
    alone = values_for("mlp-sgd", 1, strategy="sequential") | more
    ThreadWorld(1).run(train_here, folder=str(tmp_path / "alone"), values=alone)
    (tmp_path / "served").mkdir()
    values = served_values("mlp-sgd", 3, strategy="ps-sync", servers=2) | more
    summary, weights = train_served(values, tmp_path / "served")
    assert distance(weights, load_file(tmp_path / "alone" / "model.safetensors")) <= 1e-10
    assert len(summary.validation_loss) == 3
    assert summary.best_epoch == summary.validation_loss.index(min(summary.validation_loss))


@pytest.mark.parametrize("strategy", ["ps-sync", "ps-async", "ps-bounded"])
@pytest.mark.parametrize("servers", [1, 2])
def test_every_rank_moves_exactly_the_bytes_it_prices(tmp_path: Path, strategy: str, servers: int) -> None:
    values = served_values("mlp-sgd", 2, strategy=strategy, servers=servers, steps=6)
    summary, weights = train_served(values, tmp_path)
    length = sum(tensor.numel() for tensor in weights.values())
    layout = Layout(length, length, servers, 8)
    gradients = summary.own_figures["gradients"][servers:]
    assert sum(gradients) == (6 if strategy == "ps-async" else 12)
    # A server's price is for one gradient of each worker; asynchronous workers send as many as they come to.
    one = cost(1, layout)
    for server in range(servers):
        assert summary.bytes_received[server] == one.bytes_received[server] * sum(gradients)
        assert summary.bytes_sent[server] == one.bytes_sent[server] * sum(gradients)
    for worker, count in enumerate(gradients):
        assert summary.bytes_sent[servers + worker] == one.bytes_sent[servers] * count
        assert summary.bytes_received[servers + worker] == one.bytes_received[servers] * count
        assert summary.messages_sent[servers + worker] == one.messages_sent[servers] * count


def test_a_servers_price_grows_with_the_workers_and_a_workers_does_not() -> None:
    layout = Layout(10_000_000, 10_000_000, 2, 4)
    two, eight = cost(2, layout), cost(8, layout)
    assert sum(two.bytes_received[:2]) == 2 * 40_000_000
    assert sum(eight.bytes_received[:2]) == 8 * 40_000_000
    assert two.bytes_sent[2] == eight.bytes_sent[2] == 40_000_000
    assert layout.chunks == -(-40_000_000 // CHUNK_BYTES)


def test_a_flat_model_computes_in_its_own_memory() -> None:
    model = build("resnet18", (3, 16, 16), 10, None, None).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flat = FlatModel(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    flat.weights.fill_(1.0)
    assert all(bool((p == 1).all()) for p in model.parameters())
    images = torch.randn(2, 3, 16, 16)
    (F.cross_entropy(flat.model(images), torch.tensor([1, 2]))).backward()
    flat.collect(2, 2, last=True)
    assert flat.gradient[: flat.trainable].abs().sum() > 0


def test_every_worker_writes_down_what_it_did(tmp_path: Path) -> None:
    summary, _ = train_served(served_values("mlp-sgd", 3, strategy="ps-bounded", staleness=2), tmp_path)
    for rank, gradients in list(enumerate(summary.own_figures["gradients"]))[1:]:
        steps = [r for r in raw_lines(tmp_path / f"rank_{rank}.jsonl") if r["kind"] == "step"]
        assert len(steps) == gradients
        assert max(step["figures"]["staleness"] for step in steps) <= 2
        assert {"input", "forward", "backward", "push", "wait"} <= set(steps[0]["spans"])
    assert summary.own_figures["staleness_max"] is not None
    assert summary.own_figures["staleness_max"] <= 2
    assert sum((summary.own_figures["staleness"] or {}).values()) == sum(summary.own_figures["gradients"])


@pytest.mark.parametrize(("asked", "lost"), [({0, 1, 2, 3}, set()), ({1}, set()), ({2, 3}, {2, 3})])
def test_ranks_that_are_asked_to_stop_save_what_they_have(tmp_path: Path, asked: set[int], lost: set[int]) -> None:
    """All of two servers and two workers, as a scheduler asks; or one server; or, before the leader, all workers."""
    values = served_values("mlp-sgd", 2, strategy="ps-sync", servers=2, steps=1_000_000, worker_timeout=1.0)

    def stop(rank: int) -> bool:
        steps = [r["step"] for r in raw_lines(tmp_path / "rank_0.jsonl") if r["kind"] == "step"]
        return bool(steps) and (rank in asked or (rank == 0 and not _living(tmp_path)))

    summary, _ = train_served(values, tmp_path, stop=stop)
    assert summary.status == INTERRUPTED
    assert 0 < summary.steps < 1_000_000
    assert {row["rank"] for row in summary.own_figures["lost_workers"]} == lost, summary.own_figures["lost_workers"]


def _living(folder: Path) -> set[int]:
    """Workers that the leader has not lost."""
    return {2, 3} - {r["rank"] for r in raw_lines(folder / "rank_0.jsonl") if r["kind"] == "lost"}
