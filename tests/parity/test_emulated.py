"""Runs with emulated compute move what real ones move, take the time, and claim nothing."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cases import train_here, values_for
from raw_lines import raw_lines
from served import train_served
from worlds import ThreadWorld

from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.data.batch import Batch
from paceline.emulation.device import DeviceInTurns, EmulatedDevice
from paceline.emulation.timing import measure
from paceline.launch.folder import begin_summary
from paceline.models.build import build
from paceline.pipeline.plan import StagePlan
from paceline.run.folder import read_summary
from paceline.run.recorder import Recorder
from paceline.run.records import COMPLETED, Summary
from paceline.spec import resolve
from paceline.strategies.emulated import EmulatedSynchronous
from paceline.strategies.engine import StepTimer
from paceline.strategies.setup import choose_place
from paceline.strategies.synchronous import Options
from paceline.training import setup
from paceline.training.console import Console
from paceline.training.driver import Job, train

EMULATED = {"compute": "emulated:0.002"}


def run_threads(folder: Path, values: dict[str, Any]) -> Summary:
    ThreadWorld(values["workers"]).run(train_here, folder=str(folder), values=values)
    summary = read_summary(folder)
    assert summary is not None
    return summary


def steps_of(folder: Path, rank: int) -> list[tuple[int, int, int]]:
    """Which steps there were, of how many samples in all and on this rank."""
    lines = raw_lines(folder / f"rank_{rank}.jsonl")
    return [(line["step"], line["samples"], line["own"]) for line in lines if line["kind"] == "step"]


def check_claims_nothing(summary: Summary, folder: Path) -> None:
    assert summary.status == COMPLETED
    assert summary.compute == "emulated:0.002"
    assert summary.compute_seconds == 0.002
    assert summary.epoch_seconds
    assert summary.train_loss == summary.train_accuracy == summary.validation_loss == summary.validation_accuracy == []
    assert summary.test_loss is summary.test_accuracy is summary.best_epoch is None
    assert not (folder / "model.safetensors").exists()
    for path in folder.glob("rank_*.jsonl"):
        assert "loss" not in path.read_text()
        assert "accuracy" not in path.read_text()


@pytest.mark.parametrize(
    ("strategy", "overlap"),
    [
        ("allreduce", "on"),
        ("ring", "on"),
        ("ring", "off"),
        ("reduce-bcast", "off"),
        ("gather", "on"),
        ("sharded", "on"),
        ("sharded", "off"),
    ],
)
def test_ranks_that_average_move_the_bytes_of_a_real_run(tmp_path: Path, strategy: str, overlap: str) -> None:
    values = values_for("mlp-float32", 2, strategy=strategy, test=False) | {"overlap": overlap, "bucket_mb": 0.01}
    real = run_threads(tmp_path / "real", values)
    emulated = run_threads(tmp_path / "emulated", values | EMULATED)
    for name in ("steps", "epochs", "parameters", "bytes_sent", "bytes_received", "messages_sent", "wire", "overlap"):
        assert getattr(emulated, name) == getattr(real, name), name
    assert all(emulated.bytes_sent)
    for rank in range(2):
        assert steps_of(tmp_path / "emulated", rank) == steps_of(tmp_path / "real", rank)
    check_claims_nothing(emulated, tmp_path / "emulated")


def check_moves_the_same(tmp_path: Path, values: dict[str, Any]) -> tuple[Summary, Summary]:
    """A real and an emulated run: steps, samples, bytes and messages are the same, and so are the names of spans."""
    real = run_threads(tmp_path / "real", values)
    emulated = run_threads(tmp_path / "emulated", values | EMULATED)
    names = ("steps", "epochs", "parameters", "grid", "bytes_sent", "bytes_received", "messages_sent")
    for name in (*names, "messages_received", "wire", "overlap", "model_properties"):
        assert getattr(emulated, name) == getattr(real, name), name
    assert all(emulated.bytes_sent)
    for rank in range(values["workers"]):
        assert steps_of(tmp_path / "emulated", rank) == steps_of(tmp_path / "real", rank)
        assert spans_of(tmp_path / "emulated", rank) == spans_of(tmp_path / "real", rank)
    check_claims_nothing(emulated, tmp_path / "emulated")
    return real, emulated


def divided(model: str, workers: int, **more: Any) -> dict[str, Any]:
    """12 samples for each replica; of the last batch of an epoch, replicas have different numbers of samples."""
    values = values_for(model, workers, test=False, batch_size=12, **more)
    return {name: value for name, value in values.items() if name != "overlap"}


def spans_of(folder: Path, rank: int) -> set[str]:
    lines = raw_lines(folder / f"rank_{rank}.jsonl")
    return {name for line in lines if line["kind"] == "step" for name in line["spans"]}


def events_of(folder: Path, rank: int) -> list[list[list[Any]]]:
    """What a rank did in its first steps, in order, without times."""
    lines = raw_lines(folder / f"rank_{rank}.jsonl")
    return [[event[:2] for event in line["events"]] for line in lines if line["kind"] == "timeline"]


@pytest.mark.parametrize(
    ("model", "stages", "workers", "more"),
    [
        ("norm-sgd", 2, 2, {"schedule": "gpipe"}),
        ("norm-sgd", 3, 3, {"schedule": "1f1b", "microbatches": 3}),
        ("norm-sgd", 2, 4, {"schedule": "1f1b", "averaging": "ring", "bucket_mb": 0.001}),
        ("norm-sgd", 3, 6, {"schedule": "gpipe", "averaging": "gather"}),
        ("mlp-float32", 2, 2, {"schedule": "one-at-a-time", "recompute": True}),
        ("mlp-float32", 2, 4, {"schedule": "gpipe", "recompute": True, "accumulate": 2}),
    ],
)
def test_stages_move_the_bytes_of_a_real_run(
    tmp_path: Path, model: str, stages: int, workers: int, more: dict[str, Any]
) -> None:
    """The cut is given by numbers of layers: by time, real runs and emulated ones may choose different ones."""
    values = divided(model, workers, strategy="pipeline", stages=stages, cut="layers", microbatches=4) | more
    check_moves_the_same(tmp_path, values)
    for rank in range(workers):
        assert events_of(tmp_path / "emulated", rank) == events_of(tmp_path / "real", rank)


@pytest.mark.parametrize(
    ("model", "shards", "workers", "more"),
    [
        ("mlp-float32", 2, 2, {}),
        ("mlp-float32", 3, 3, {}),
        ("cnn-adam", 3, 3, {}),
        ("mlp-float32", 2, 4, {"overlap": "on", "averaging": "ring", "bucket_mb": 0.01}),
        ("cnn-adam", 2, 4, {"overlap": "off", "accumulate": 2}),
        ("mlp-float32", 3, 6, {"overlap": "on", "bucket_mb": 0.01}),
    ],
)
def test_shards_move_the_bytes_of_a_real_run(
    tmp_path: Path, model: str, shards: int, workers: int, more: dict[str, Any]
) -> None:
    check_moves_the_same(tmp_path, divided(model, workers, strategy="tensor", tensor=shards) | more)


@pytest.mark.parametrize("values", [{"strategy": "pipeline", "stages": 2, "cut": "layers"}, {"strategy": "tensor"}])
def test_parts_of_a_transformer_move_the_bytes_of_a_real_run(tmp_path: Path, values: dict[str, Any]) -> None:
    """Its first and its last stage share weights, and sum their gradient; its shards have heads of their own."""
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    values = {"model": "gpt", "data": f"text:{tmp_path / 'text'},block=16", "batch_size": 4, **values}
    values |= {"workers": 4, "steps": 2, "tensor": 2} if values["strategy"] == "tensor" else {"workers": 2, "steps": 2}
    check_moves_the_same(tmp_path, {"task": "language-model", "test": False, "timeout": 20.0, **values})


def test_stages_sleep_as_long_as_their_parts_of_the_model_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, float] = {}

    def note(_: DeviceInTurns, seconds: float) -> None:
        name = threading.current_thread().name
        asked[name] = asked.get(name, 0.0) + seconds

    monkeypatch.setattr(DeviceInTurns, "sleep", note)
    values = divided("norm-sgd", 2, strategy="pipeline", schedule="gpipe", microbatches=4, steps=3)
    del values["epochs"]
    run_threads(tmp_path, values | {"compute": "emulated:600"})
    plan = StagePlan.from_dict(json.loads((tmp_path / "plan.json").read_text()))
    assert plan.how == "measured"
    expected = [3 * 4 * stage.seconds for stage in plan.stages]  # 3 steps of 4 micro-batches of 3 samples
    assert sorted(asked.values()) == pytest.approx(sorted(expected), rel=1e-3)
    assert sum(asked.values()) == pytest.approx(3 * 600, rel=1e-3)


@pytest.mark.parametrize("strategy", ["ps-sync", "ps-async", "ps-bounded"])
def test_servers_and_their_workers_move_the_bytes_of_a_real_run(tmp_path: Path, strategy: str) -> None:
    values = values_for("mlp-float32", 2, strategy=strategy, servers=2, test=False, steps=6) | {"log_every": 0}
    found = {}
    for name, more in (("real", {}), ("emulated", EMULATED)):
        (tmp_path / name).mkdir()
        found[name], _ = train_served(values | more, tmp_path / name)
    real, emulated = found["real"], found["emulated"]
    assert emulated.steps == real.steps == 6
    # Asynchronous workers share the updates as they come to it; servers see the same bytes.
    for name in ("bytes_sent", "bytes_received", "messages_sent"):
        ranks = slice(None) if strategy != "ps-async" else slice(0, 2)
        assert getattr(emulated, name)[ranks] == getattr(real, name)[ranks], name
    assert sum(emulated.own_figures["gradients"]) == sum(real.own_figures["gradients"])
    check_claims_nothing(emulated, tmp_path / "emulated")
    lines = [line for rank in (2, 3) for line in raw_lines(tmp_path / "emulated" / f"rank_{rank}.jsonl")]
    spans = [(line["spans"], line["own"]) for line in lines if line["kind"] == "step"]
    assert len(spans) == sum(emulated.own_figures["gradients"])
    assert all(part["forward"] + part["backward"] >= 0.002 / 12 * own for part, own in spans)


def train_alone(folder: Path, values: dict[str, Any], speed: float = 1.0) -> tuple[Summary, str]:
    """One rank; the summary, and what the console showed."""
    from paceline.comm.single import SingleComm

    spec = resolve(("test", {"strategy": "sequential", **values})).spec
    summary, shown, recorder = begin_summary(spec), io.StringIO(), Recorder(folder, 0)
    place = choose_place(spec, 0, speed=speed)
    train(Job(spec, MeteredComm(SingleComm()), place, Console(shown), lambda: False, summary).opened(folder, recorder))
    recorder.close()
    return summary, shown.getvalue()


def test_a_step_takes_the_time_of_its_own_samples_on_its_own_node(tmp_path: Path) -> None:
    values = {"model": "mlp", "data": "synthetic:1x8x8,train=25,test=5", "batch_size": 10, "epochs": 1}
    summary, shown = train_alone(tmp_path, values | {"compute": "emulated:0.02"}, speed=0.5)
    steps = [line for line in raw_lines(tmp_path / "rank_0.jsonl") if line["kind"] == "step"]
    assert [step["own"] for step in steps] == [10, 10, 5]
    for step in steps:
        assert step["seconds"] >= step["own"] / 10 * 0.02 / 0.5
        assert set(step["spans"]) == {"input", "forward", "backward"}
    assert "Emulated compute: 0.02 s for each batch of 10; nothing is trained or saved" in shown
    assert "acc" not in shown
    assert summary.compute_seconds == 0.02


def test_a_data_set_is_neither_read_nor_resized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the data set was opened")

    monkeypatch.setattr(setup, "load", never)
    monkeypatch.setattr(setup, "prepare", never)
    values = {"model": "shallow-cnn", "data": "cifar10", "image_size": 64, "batch_size": 500, "steps": 2}
    summary, _ = train_alone(tmp_path, values | {"compute": "emulated:k80"})
    assert summary.steps == 2
    assert summary.status == COMPLETED


def test_shrunken_gradients_take_as_many_messages_and_fewer_bytes(tmp_path: Path) -> None:
    ring = values_for("mlp-float32", 2, strategy="ring", test=False) | EMULATED | {"bucket_mb": 0.01}
    served = values_for("mlp-float32", 2, strategy="ps-sync", servers=2, test=False, steps=6) | EMULATED
    found = []
    for shrink in (1, 8):
        folder = tmp_path / f"served-{shrink}"
        folder.mkdir()
        averaged = run_threads(tmp_path / f"ring-{shrink}", ring | {"shrink": shrink})
        found.append((averaged, train_served(served | {"log_every": 0, "shrink": shrink}, folder)[0]))
    for whole, small in zip(*found, strict=True):
        assert whole.parameters == small.parameters
        assert (whole.shrink, small.shrink) == (1, 8)
        assert 0.1 < sum(small.bytes_sent) / sum(whole.bytes_sent) < 0.2
    assert found[0][0].messages_sent == found[1][0].messages_sent


def step_three_times(comm: Comm) -> list[Any]:
    """The largest gradient afterwards, what the weights have changed by, and who heard of rank 1's wish to stop."""
    model = build("mlp", (1, 8, 8), 10)
    before = [p.clone() for p in model.parameters()]
    device = EmulatedDevice(0.0, measure(model, (1, 8, 8)))
    strategy = EmulatedSynchronous(comm, model, Options("ring", bucket_mb=0.001, overlap="on"), device)
    strategy.setup()
    count = 0 if comm.rank else 4  # a rank can have no samples
    batch = Batch(torch.empty(count, 0), torch.zeros(count, dtype=torch.int64), 4)
    stops = [strategy.step(batch, 0.1, comm.rank == 1 and step == 2, StepTimer()).stop for step in range(3)]
    largest = max(slot.view.abs().max().item() for slot in strategy.buckets.slots)
    assert all(p.grad is not None for p in model.parameters())
    changed = max((p - b).abs().max().item() for p, b in zip(model.parameters(), before, strict=True))
    strategy.close()
    return [largest, changed, stops]


def test_gradients_stay_zero_weights_stay_and_a_wish_to_stop_gets_round() -> None:
    assert ThreadWorld(3).run(step_three_times) == [[0.0, 0.0, [False, False, True]]] * 3
