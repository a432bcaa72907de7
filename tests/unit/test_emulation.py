"""Emulated compute: what may be asked for, what a device takes, when gradients are ready, and that a step takes it."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from raw_lines import RawWriter
from torch import nn

from paceline.cli.main import main
from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.comm.single import SingleComm
from paceline.data.batch import Batch
from paceline.data.table import TABLE as DATASETS
from paceline.emulation.device import EmulatedDevice
from paceline.emulation.standin import StandIn
from paceline.emulation.table import TABLE, Estimate, estimate, read
from paceline.emulation.timing import Timing, measure
from paceline.errors import UsageError
from paceline.launch.folder import begin_summary, make_folder
from paceline.models import table as models
from paceline.models.build import build
from paceline.run.folder import write_summary
from paceline.run.records import COMPLETED, RUNNING, Summary
from paceline.spec import resolve
from paceline.strategies.buckets import GradientBuckets
from paceline.strategies.comm_thread import CommThread
from paceline.strategies.emulated import EmulatedSynchronous, bucket_times
from paceline.strategies.engine import StepTimer
from paceline.strategies.setup import choose_place, make_emulation
from paceline.strategies.synchronous import RIDERS, Options

MODELS = [("mnist-cnn", (1, 28, 28)), ("resnet18", (3, 16, 16)), ("mlp", (1, 8, 8))]


def asked(**values: Any) -> Any:
    return resolve(("flag", {"compute": "emulated:0.5", **values})).spec


# What may be asked for.


def test_seconds_devices_and_real_compute_are_told_apart() -> None:
    assert read("real") is None
    assert cast(Any, read("emulated:0.25")).seconds == 0.25
    assert cast(Any, read("emulated:0")).seconds == 0
    assert cast(Any, read("emulated:k80")).device is TABLE["k80"]


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        ("emulated", "emulated:SECONDS"),
        ("emulated:", "emulated:SECONDS"),
        ("fast", "real, emulated:SECONDS"),
        ("emulated:k8", "did you mean 'k80'?"),
        ("emulated:-1", "0 to 3600"),
        ("emulated:nan", "0 to 3600"),
        ("emulated:inf", "0 to 3600"),
        ("emulated:runs/nothing", "no such run folder"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_is_allowed(compute: str, words: str) -> None:
    with pytest.raises(UsageError, match="--compute") as error:
        resolve(("flag", {"compute": compute}))
    assert words in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"validation": 0.1},
        {"check_replicas": 5, "workers": 2},
        {"sync_batchnorm": True, "workers": 2},
        {"read": "scatter", "workers": 2},
        {"transport": "nccl", "workers": 2},
        {"weights": __file__},
    ],
)
def test_what_makes_no_sense_without_computing_is_refused(values: dict[str, Any]) -> None:
    flag = next(iter(values)).replace("_", "-")
    with pytest.raises(UsageError, match=f"--{flag}.* with --compute emulated:0.5"):
        asked(**values)


def test_only_what_is_not_trained_can_be_smaller() -> None:
    with pytest.raises(UsageError, match="--shrink 8 is only for --compute emulated"):
        resolve(("test", {"shrink": 8}))
    said = resolve(("test", {"shrink": 8, "compute": "emulated:0.1"})).introduction()[0]
    assert said.startswith("Emulated compute (0.1, gradients 8 times smaller): mnist-cnn")


def test_a_stand_in_has_a_part_of_every_tensor() -> None:
    model = build("resnet18", (1, 28, 28), 10)
    small = StandIn(model, 100)
    assert [p.numel() for p in small.parameters()] == [-(-p.numel() // 100) for p in model.parameters()]
    assert [b.dtype for b in small.buffers()] == [b.dtype for b in model.buffers()]


def test_a_refused_run_ends_with_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", "--compute", "emulated:p10", "--output-dir", str(tmp_path / "runs")]) == 2
    assert "unknown device 'p10'; did you mean 'p100'?" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_mark_is_in_the_spec_the_heading_the_folder_and_the_summary(tmp_path: Path) -> None:
    resolved = resolve(("flag", {"compute": "emulated:k80", "output_dir": str(tmp_path)}))
    assert any(line.startswith('compute = "emulated:k80"') for line in resolved.lines())
    assert resolved.introduction()[0].startswith("Emulated compute (k80): mnist-cnn")
    assert "-emulated-" in make_folder(resolved.spec).name
    assert begin_summary(resolved.spec).compute == "emulated:k80"
    assert not resolved.spec.test


def test_every_device_names_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--devices"]) == 0
    shown = capsys.readouterr().out
    for device in TABLE.values():
        assert device.url.startswith("https://")
        assert device.url in shown
        assert bool(device.images) != bool(device.flops)
        assert device.flops or "resnet50" in device.images  # what other models are derived from
        assert set(device.images) <= set(models.TABLE)


# A run to take the time from.


def write_run(folder: Path, **values: Any) -> None:
    """A finished run of mlp: 60 steps of 10 images, the first ones slow, then 20 ms each."""
    spec = resolve(("test", {"model": "mlp", "epochs": 1})).spec
    write_summary(folder, dataclasses.replace(begin_summary(spec), **{"status": COMPLETED, **values}))
    (folder / "spec.toml").write_text('model = "mlp"\ndata = "mnist-mini"\n')
    slow, usual = ({"forward": forward, "backward": 2 * forward, "wait": 9.0} for forward in (1.0, 0.02 / 3))
    lines = RawWriter(folder / "rank_0.jsonl")
    lines.write("start", rank=0, time=1.0)
    for number in range(61):
        own, spans = (0, {}) if number == 60 else (10, slow if number < 15 else usual)
        lines.write("step", step=number, epoch=0, time=1.0, seconds=1.0, samples=20, own=own, spans=spans)
    lines.close()


def test_the_time_of_a_run_is_taken_without_its_first_steps(tmp_path: Path) -> None:
    write_run(tmp_path)
    resolved = resolve(("flag", {"model": "mlp", "batch_size": 50, "compute": f"emulated:{tmp_path}"}))
    assert resolved.spec.compute == "emulated:0.1"
    assert resolved.sources["compute"] == f"measured in {tmp_path}"


@pytest.mark.parametrize(
    ("run", "values", "words"),
    [
        ({"status": RUNNING}, {}, "a completed run is expected"),
        ({"compute": "emulated:k80"}, {}, "itself emulated"),
        ({"model": "resnet18"}, {}, "model resnet18, but this one has mlp"),
        ({}, {"image_size": 32}, "samples of 1x28x28, but this one has 1x32x32"),
        ({}, {"hidden": [64]}, "other --hidden layers"),
    ],
)
def test_a_run_that_does_not_tell_is_refused(
    tmp_path: Path, run: dict[str, Any], values: dict[str, Any], words: str
) -> None:
    write_run(tmp_path, **run)
    with pytest.raises(UsageError, match=words):
        resolve(("flag", {"model": "mlp", "compute": f"emulated:{tmp_path}", **values}))


def fifo(folder: Path) -> None:
    (folder / "spec.toml").unlink()
    os.mkfifo(folder / "spec.toml")


def spoil(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (fifo, "spec.toml: it is not a regular file"),
        (lambda folder: (folder / "spec.toml").unlink(), "No such file"),
        (spoil("spec.toml", '"mnist-mini"', "7"), "spec.toml: data must be a string"),
        (spoil("rank_0.jsonl", '"own": 10', '"own": "x"'), "rank_0.jsonl: own is 'x', and a whole number"),
        (spoil("rank_0.jsonl", '"forward": 1.0', '"forward": []'), "rank_0.jsonl: spans is a list, and a number"),
        (spoil("rank_0.jsonl", '"step": 40', '"step": [40]'), "rank_0.jsonl: step is a list, and a whole number"),
    ],
)
def test_a_damaged_run_is_refused_with_the_reason(tmp_path: Path, damage: Callable[[Path], object], words: str) -> None:
    write_run(tmp_path)
    damage(tmp_path)
    with pytest.raises(UsageError, match=words):
        resolve(("flag", {"model": "mlp", "compute": f"emulated:{tmp_path}"}))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run folder"):
        asked(compute=f"emulated:{tmp_path}")


# What a device takes.


def macs(model: str) -> float:
    return models.TABLE[model].gmacs * 1e9


@pytest.mark.parametrize(
    ("device", "model", "seconds", "how"),
    [
        ("k80", "resnet50", 1 / 51.9, "resnet50: 51.9 images/s"),
        ("k80", "vgg19", 19.63 / 15.47 / 35.4, "derived from vgg16's 35.4"),
        ("k80", "resnet152v2", 10.91 / 11.51 / 20, "derived from resnet152's 20"),
        ("p100", "mnist-cnn", 0.007666 / 4.089 / 219, "derived from resnet50's 219"),
        ("v100", "vgg16", 15.47 / 4.089 / 1075, "derived from resnet50's 1075"),
        ("gtx1660ti", "resnet18", 6 * 1.814e9 / 2.71872e12, "TFLOP/s"),
    ],
)
def test_a_device_takes_its_figure_or_what_follows_from_one(device: str, model: str, seconds: float, how: str) -> None:
    found = estimate(TABLE[device], model, macs(model))
    assert found.seconds == pytest.approx(seconds)
    assert how in found.how


def test_a_smaller_image_takes_less_and_says_that_it_is_derived() -> None:
    whole, quarter = (estimate(TABLE["k80"], "resnet50", macs("resnet50") / part) for part in (1, 4))
    how = "derived from resnet50's 51.9 images/s at 224x224 pixels by FLOPs"
    assert quarter == Estimate(whole.seconds / 4, how, derived=True)


def test_a_slower_node_takes_longer() -> None:
    spec = asked(compute="emulated:0.64", batch_size=64)
    model = build("mnist-cnn", (1, 28, 28), 10)
    for speed, expected in ((1.0, 0.01), (0.5, 0.02), (2.0, 0.005)):
        made = make_emulation(spec, DATASETS["mnist-mini"], model, choose_place(spec, 0, speed=speed), 0)
        assert made is not None
        assert made.device.seconds_per_sample == pytest.approx(expected)
        assert made.batch_seconds == 0.64


def test_noise_varies_the_time_of_a_step_around_its_mean_and_follows_from_seed_and_rank() -> None:
    model = build("mlp", (1, 28, 28), 10)

    def times(noise: float, rank: int, seed: int = 0) -> list[float]:
        spec = asked(compute="emulated:0.64", batch_size=64, seed=seed, model="mlp")
        made = make_emulation(spec, DATASETS["mnist-mini"], model, choose_place(spec, 0, noise=noise), rank)
        assert made is not None
        found = []
        for _ in range(4000):
            made.device.begin(64)
            found.append(made.device._seconds)
        return found

    assert set(times(0.0, 0)) == {0.64}
    varied = times(0.2, 1)
    assert varied == times(0.2, 1)
    assert varied != times(0.2, 2)
    assert varied != times(0.2, 1, seed=1)
    assert fmean(varied) == pytest.approx(0.64, rel=0.01)
    assert stdev(varied) / fmean(varied) == pytest.approx(0.2, rel=0.05)
    assert min(varied) > 0


def test_the_line_about_a_device_says_where_its_time_comes_from() -> None:
    spec = asked(compute="emulated:p100", model="resnet18", data="cifar10", batch_size=64)
    model = build("resnet18", (3, 32, 32), 10)
    made = make_emulation(spec, DATASETS["cifar10"], model, choose_place(spec, 0), 0)
    assert made is not None
    assert made.batch_seconds == pytest.approx(64 * 0.5554 / 4.089 / 219, rel=1e-3)
    assert "NVIDIA Tesla P100" in made.about
    assert "derived from resnet50's 219 images/s" in made.about


# When gradients are ready.


@pytest.mark.parametrize(("name", "shape"), MODELS)
def test_gradients_are_ready_in_the_order_of_a_real_backward(name: str, shape: tuple[int, int, int]) -> None:
    model = build(name, shape, 10)
    before = [p.clone() for p in model.parameters()]
    timing, order = measure(model, shape), list[int]()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    for number, p in enumerate(model.parameters()):
        p.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
    F.cross_entropy(model(torch.randn(2, *shape)), torch.tensor([1, 2]), reduction="sum").backward()
    assert list(timing.order) == order
    times = [timing.ready[number] for number in timing.order]
    assert times == sorted(times)
    assert 0 < timing.forward <= times[0]
    assert times[-1] == 1.0


@pytest.mark.parametrize("name", ["mnist-cnn", "alexnet", "resnet18"])
def test_the_multiply_adds_are_those_of_the_table(name: str) -> None:
    info = models.TABLE[name]
    with torch.device("meta"):
        model = build(name, info.shape, info.classes)
    timing = measure(model, info.shape)
    assert timing.macs == pytest.approx(macs(name), rel=1e-3)
    assert timing.forward == pytest.approx(1 / 3, abs=0.02)


def test_a_parameter_without_a_gradient_is_ready_at_the_end() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.used = nn.Linear(3, 3), nn.Linear(48, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.used(x.flatten(1))
            return out

    timing = measure(Partly(), (3, 4, 4))
    assert timing.ready[:2] == (1.0, 1.0)
    assert set(timing.order) == {2, 3}


# What a step does with it.


class Recorder:
    """Stands in for the communication thread."""

    def __init__(self, events: list[Any], buckets: GradientBuckets) -> None:
        self.events, self.buckets = events, buckets

    def put(self, flat: torch.Tensor) -> None:
        place = next(n for n, bucket in enumerate(self.buckets.buckets) if bucket.flat is flat)
        self.events.append(("put", place))

    def wait(self) -> None:
        self.events.append("wait")

    def close(self) -> None:
        pass


def recorded(model: nn.Module) -> tuple[GradientBuckets, list[Any]]:
    """Buckets of a few layers each that record when they are sent, as if there were other ranks."""
    events: list[Any] = []
    buckets = GradientBuckets(model, SingleComm(), AVERAGINGS["ring"], 100_000, RIDERS)
    buckets.thread = cast(CommThread, Recorder(events, buckets))
    return buckets, events


@pytest.mark.parametrize(("name", "shape"), MODELS[:2])
def test_a_bucket_goes_when_a_real_backward_would_send_it(name: str, shape: tuple[int, int, int]) -> None:
    model = build(name, shape, 10)
    timing, latest = measure(model, shape), list[float]()
    for number, p in enumerate(model.parameters()):
        p.register_post_accumulate_grad_hook(lambda _, number=number: latest.append(timing.ready[number]))
    buckets, events = recorded(model)
    times, sent = bucket_times(buckets, timing.ready), dict[int, float]()
    put = cast(Any, buckets.thread).put
    cast(Any, buckets.thread).put = lambda flat: (put(flat), sent.setdefault(events[-1][1], latest[-1]))
    loss = F.cross_entropy(model(torch.randn(2, *shape)), torch.tensor([1, 2]), reduction="sum")
    buckets.backward(loss, 1.0, overlap=True)
    assert len(sent) == len(times) - 1 > 2  # the last one waits for what rides with it
    assert [sent[number] for number in sorted(sent)] == times[:-1]


class Silent(EmulatedDevice):
    """Does not wait, and writes down what it would have waited for."""

    def __init__(self, timing: Timing, events: list[Any]) -> None:
        super().__init__(1.0, timing)
        self.events = events

    def reach(self, part: float) -> None:
        self.events.append(part)


def test_buckets_are_sent_in_order_while_backward_is_under_way() -> None:
    model = build("mnist-cnn", (1, 28, 28), 10)
    timing = measure(model, (1, 28, 28))
    buckets, events = recorded(model)
    strategy = EmulatedSynchronous(SingleComm(), model, Options(), Silent(timing, events))
    strategy.setup()
    strategy.buckets, strategy.ready = buckets, bucket_times(buckets, timing.ready)
    strategy.overlap.chosen = True
    batch = Batch(torch.empty(4, 0), torch.zeros(4, dtype=torch.int64), 4)
    result = strategy.step(batch, 0.1, True, StepTimer())
    last = len(buckets.buckets) - 1
    expected: list[Any] = [timing.forward]
    for number, part in enumerate(strategy.ready):
        expected += [part, ("put", number)] if number < last else [part]
    assert events == [*expected, 1.0, ("put", last), "wait"]
    assert result.stop


def test_a_step_takes_at_least_the_time_of_its_samples() -> None:
    device = EmulatedDevice(0.001, Timing(1.0, 0.25, (1.0,), (0,)))
    for samples in (20, 5, 0):
        start = time.monotonic()
        device.begin(samples)
        device.forward()
        assert time.monotonic() - start >= 0.25 * samples * 0.001
        device.reach(1.0)
        assert time.monotonic() - start >= samples * 0.001


def test_an_old_summary_was_of_real_compute() -> None:
    assert Summary(RUNNING, "ring", 2, "gloo", "mlp", "mnist", 1, 2, 1, 0).compute == "real"
