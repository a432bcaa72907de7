"""Tensors of a rank are counted as PyTorch allocates them; peaks of runs that follow the model are predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up import steady, write_run
from torch import nn

from paceline.predict.fit import fit_probes
from paceline.predict.forecast import forecasts
from paceline.predict.live import ModelTensors, evaluation_bytes, step_bytes
from paceline.predict.memory import PRIOR, MemoryModel, fit_memory, needs_of
from paceline.predict.probes import Probe, read_probes
from paceline.spec import RunSpec, resolve

CNN, MB = 690_590 * 4, 1e6
SPEC = {"model": "mnist-cnn", "data": "mnist"}


def spec_of(strategy: str, workers: int = 2, **given: Any) -> RunSpec:
    return resolve(("test", {**SPEC, "strategy": strategy, "workers": workers, **given}), here=False).spec


def test_a_chain_of_layers_keeps_what_backward_needs() -> None:
    """Linear layers keep their inputs; backward has a gradient of an activation, and those of the weights."""
    wide, batch = 100, 1000
    model = nn.Sequential(*(nn.Linear(wide, wide, bias=False) for _ in range(4)))
    activation, weight = 4 * batch * wide, 4 * wide * wide

    def example(device: str) -> torch.Tensor:
        return torch.zeros(batch, wide, device=device)

    kept = step_bytes(model, example, keep_gradients=True)
    assert 5 * activation <= kept <= 8 * activation
    assert 5 * activation <= step_bytes(model, example, keep_gradients=False) <= kept
    assert 2 * activation <= evaluation_bytes(model, example) <= 3 * activation
    assert model.training
    assert weight < activation


def test_activations_grow_with_the_batch() -> None:
    tensors = ModelTensors(spec_of("sequential", 1))
    one, two = (tensors.step(spec_of("sequential", 1, batch_size=n), keep_gradients=False) for n in (256, 512))
    assert two == pytest.approx(2 * one, rel=0.02)


@pytest.mark.parametrize(
    ("given", "copies"),
    [
        ({"optimizer": "sgd", "momentum": 0.0}, 0),
        ({"optimizer": "sgd", "momentum": 0.9}, 1),
        ({"optimizer": "adam"}, 2),
        ({"optimizer": "adamw"}, 2),
    ],
)
def test_optimizer_state_is_what_the_optimizer_creates(given: dict[str, Any], copies: int) -> None:
    spec = spec_of("sequential", 1, **given)
    tensors = ModelTensors(spec)
    (need,) = needs_of(spec, tensors)
    assert tensors.optimizer(spec) == copies
    assert need.stays == CNN * (1 + copies)


def test_averaging_adds_buckets_and_pieces_and_servers_have_state_instead_of_workers() -> None:
    tensors = ModelTensors(spec_of("sequential", 1))
    (alone,) = needs_of(spec_of("sequential", 1, optimizer="adam"), tensors)
    (ring,) = needs_of(spec_of("ring", 2, optimizer="adam"), tensors)
    assert alone.stays + CNN < ring.stays < alone.stays + 3 * CNN
    worker, server = needs_of(spec_of("ps-sync", 4, optimizer="adam"), tensors)
    assert worker.stays == 3 * CNN
    assert server.stays == (2 + 2 + 2 + 4) * CNN
    _, half = needs_of(spec_of("ps-sync", 4, optimizer="adam", servers=2), tensors)
    assert half.stays < server.stays


def probe(folder: Path, strategy: str, workers: int, batch: int, base: float, factor: float) -> Probe:
    """A run whose peaks are those of a model with this base and this factor."""
    given = SPEC | {"batch_size": batch, "threads": 1}
    write_run(folder, steady(0.1, 60), workers=workers, strategy=strategy, cores=1, spec=given)
    (made,) = read_probes([folder])
    truth = PRIOR.copy()
    truth[[0, 2]] = base, factor
    need, *_ = needs_of(made.spec, ModelTensors(made.spec))
    path = folder / "summary.json"
    peaks = [int(need.stays + need.row @ truth)] * workers
    path.write_text(json.dumps(json.loads(path.read_text()) | {"peak_rss_bytes": peaks, "batch_size": batch}))
    return read_probes([folder])[0]


def test_base_and_factor_are_found_again(tmp_path: Path) -> None:
    base, factor = 310 * MB, 1.1
    settings = [("sequential", 1, 256), ("sequential", 1, 2048), ("ring", 2, 256)]
    probes = [probe(tmp_path / f"{s}-{n}-{b}", s, n, b, base, factor) for s, n, b in settings]
    held = probe(tmp_path / "held", "gather", 4, 1024, base, factor)
    model = fit_memory(probes, probes[0].spec)
    value, low, high = model.predict(held.spec)
    peak = max(held.run.summary.peak_rss_bytes)
    assert not model.estimated
    assert value == pytest.approx(peak, rel=0.03)
    assert low < peak < high
    few = fit_memory(probes[:1], probes[0].spec).predict(held.spec)
    assert few[2] - few[1] > high - low


def test_runs_without_peaks_or_with_emulated_compute_give_the_memory_of_a_device(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steady(0.1, 60), spec=SPEC)
    probes = read_probes([tmp_path])
    model = fit_memory(probes, probes[0].spec)
    assert isinstance(model, MemoryModel)
    assert model.estimated
    value, low, high = model.predict(spec_of("ring", 2, batch_size=128))
    assert 4 * CNN < low <= value < high < 100 * MB


def test_a_forecast_has_memory(tmp_path: Path) -> None:
    made = [probe(tmp_path / "one", "sequential", 1, 256, 250 * MB, 1.2)]
    (said,) = forecasts(fit_probes(made), made, ["sequential"], [1], None, {})
    assert said.memory.value == pytest.approx(max(made[0].run.summary.peak_rss_bytes), rel=0.02)
    assert not said.memory_estimated
