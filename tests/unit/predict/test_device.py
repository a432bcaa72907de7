"""Compute of a device that was not measured comes from published figures; speeds of nodes from a lab file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_up import steady, write_run

from paceline.errors import UsageError
from paceline.lab.plan import read_plan
from paceline.predict.cluster import alike, of_lab
from paceline.predict.device import DERIVED_ERROR, FIGURE_ERROR, device_named, on_device
from paceline.predict.fit import fit_probes
from paceline.predict.forecast import Forecast, forecasts
from paceline.predict.probes import Probe, read_probes

SPEC = {"model": "resnet50", "data": "cifar10", "image_size": 224}


@pytest.fixture
def probes(tmp_path: Path) -> list[Probe]:
    write_run(tmp_path / "one", steady(4.0, 40), spec=SPEC)
    write_run(tmp_path / "two", steady(4.5, 40), workers=2, spec=SPEC | {"overlap": "off"})
    return read_probes([tmp_path])


def predicted(probes: list[Probe], device: str, workers: int, cluster: Any = None) -> Forecast:
    fit = on_device(fit_probes(probes), probes, device_named(device))
    (said,) = forecasts(fit, probes, ["ring"], [workers], cluster or alike(workers, 1e11), {})
    return said


def test_the_time_of_a_sample_is_the_published_one(probes: list[Probe]) -> None:
    fit = on_device(fit_probes(probes), probes, device_named("v100"))
    assert fit.compute_seconds(32) == pytest.approx(32 / 1075)
    assert fit.compute_error == FIGURE_ERROR
    assert fit.noise == fit_probes(probes).noise
    one = predicted(probes, "v100", 1)
    assert one.step_seconds.value == pytest.approx(32 / 1075, rel=0.02)
    assert one.beyond[0] == "device v100 was not measured: resnet50: 1075 images/s"
    assert one.memory_estimated


def test_a_faster_device_waits_more_for_the_link(probes: list[Probe]) -> None:
    slow, fast = (predicted(probes, device, 4, alike(4, 1e9)) for device in ("k80", "v100"))
    assert fast.step_seconds.value < slow.step_seconds.value
    assert fast.efficiency.value < slow.efficiency.value < 1


def test_a_figure_of_another_model_is_less_certain(tmp_path: Path) -> None:
    write_run(tmp_path / "one", steady(0.1, 60), spec={"model": "mnist-cnn", "data": "mnist"})
    small = read_probes([tmp_path])
    fit = on_device(fit_probes(small), small, device_named("k80"))
    assert fit.compute_error == DERIVED_ERROR
    assert "derived from resnet50's 51.9 images/s" in fit.device


def test_emulated_probes_are_named(tmp_path: Path) -> None:
    spec = SPEC | {"compute": "emulated:k80"}
    write_run(tmp_path / "one", steady(0.6, 60), spec=spec, compute_seconds=0.6)
    (probe,) = read_probes([tmp_path])
    probe.run.summary.compute = "emulated:k80"
    fit = on_device(fit_probes([probe]), [probe], device_named("p100"))
    assert fit.device.endswith("noise and messages are those of emulated compute (k80)")


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(UsageError, match=r"unknown device 'v10'.*did you mean 'v100'"):
        device_named("v10")


def test_a_slow_node_of_a_lab_file_slows_all_down(probes: list[Probe], tmp_path: Path) -> None:
    def lab(*speeds: float) -> Any:
        path = tmp_path / "lab.toml"
        nodes = [f'[[node]]\nname = "n{number}"\nspeed = {speed}\n' for number, speed in enumerate(speeds)]
        path.write_text('rate = "30gbit"\n' + "".join(nodes))
        return of_lab(read_plan(str(path)))

    even, slow = (predicted(probes, "k80", 3, each).step_seconds.value for each in (lab(1, 1, 1), lab(1, 0.5, 1)))
    assert slow - even == pytest.approx(32 / 51.9, rel=0.05)  # it takes twice as long, and nothing is hidden behind it
