"""Costs that a simulation was given are found again from its step times; forecasts say what they go beyond."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up import steady, write_run

from paceline.errors import UsageError
from paceline.predict.cluster import alike
from paceline.predict.fit import LEAST_ERROR, PRIOR, UNSTEADY, Fit, case_of, fit_probes, typical_step
from paceline.predict.forecast import CROWD_ERROR, crowd_error, forecasts
from paceline.predict.noise import Noise
from paceline.predict.probes import Probe, read_probes, shape_of

TRUTH = replace(PRIOR, message=4e-4)
COMPUTE, OVERHEAD = 0.08, 0.01
SPEC = {"model": "mnist-cnn", "data": "mnist", "overlap": "on", "bucket_mb": 0.05, "compute": f"emulated:{COMPUTE}"}
PARTS: dict[str, dict[str, Any]] = {
    "pipeline": {"microbatches": 8, "schedule": "1f1b", "averaging": "allreduce"},
    "tensor": {"averaging": "allreduce"},
}


def lab(nodes: int, rate: float = 1e9) -> dict[str, Any]:
    return {
        "nodes": [{"name": f"n{i + 1}", "up": rate, "down": rate, "speed": 1.0, "noise": 0.0} for i in range(nodes)]
    }


def made_up(folder: Path, workers: int, strategy: str, seconds: float) -> Probe:
    """A run of this many workers, each on a node of a lab, whose steps took so long."""
    times = steady(seconds, 60, seed=workers, spread=0.001)
    part = {"pipeline": COMPUTE / workers, "tensor": 0.8 * seconds}.get(strategy, COMPUTE) / seconds
    write_run(folder, times, workers=workers, strategy=strategy, cores=16,
              lab=lab(workers), hosts=[f"n{i + 1}" for i in range(workers)], compute=[part] * workers,
              spec=SPEC | PARTS.get(strategy, {}))  # fmt: skip
    emulated(folder)
    (probe,) = read_probes([folder])
    return probe


def emulated(folder: Path) -> None:
    """Let the summary say that compute was emulated."""
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"compute": SPEC["compute"], "compute_seconds": COMPUTE}))


@pytest.fixture
def truth(tmp_path: Path) -> Any:
    """Makes probes whose step times follow from TRUTH."""

    def make(workers: int, strategy: str) -> Probe:
        guess = made_up(tmp_path / "guess" / f"{strategy}-{workers}", workers, strategy, 1.0)
        known = Fit(shape_of(guess), COMPUTE / 32, 0.0, 0.0, Noise(), OVERHEAD, {}, {}, {},
                    emulated=True)  # fmt: skip
        seconds = typical_step(case_of(known, guess, TRUTH, 1))
        return made_up(tmp_path / f"{strategy}-{workers}", workers, strategy, seconds)

    return make


def test_costs_are_found_again_and_predict_other_numbers_of_workers(truth: Any) -> None:
    probes = [truth(1, "sequential"), truth(2, "ring"), truth(4, "ring")]
    found = fit_probes(probes)
    # What cannot be told apart by two numbers of workers is the sum: a piece is received, and sent on.
    hop, true = (2 * each.message + each.latency for each in (found.costs["ring"], TRUTH))
    assert hop == pytest.approx(true, rel=0.15)
    assert found.per_sample * 32 == pytest.approx(COMPUTE, rel=0.01)
    assert max(found.errors.values()) < 1.5 * LEAST_ERROR
    held = truth(7, "ring")
    (said,) = forecasts(found, probes, ["ring"], [7], None, {})
    assert said.step_seconds.value == pytest.approx(held.seconds.value, rel=0.03)
    assert said.step_seconds.low < held.seconds.value < said.step_seconds.high
    assert said.samples_per_second.value == pytest.approx(7 * 32 / held.seconds.value, rel=0.03)


@pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
def test_parts_of_a_model_are_predicted_from_other_numbers_of_them(truth: Any, strategy: str) -> None:
    """Stages share the compute of a step; the spans of shards have messages in them, and tell nothing of it."""
    probes = [truth(1, "sequential"), truth(2, strategy), truth(4, strategy)]
    found = fit_probes(probes)
    assert found.per_sample * 32 == pytest.approx(COMPUTE, rel=0.01)
    held = truth(3, strategy)
    (said,) = forecasts(found, probes, [strategy], [3], None, {})
    assert said.step_seconds.value == pytest.approx(held.seconds.value, rel=0.03)
    assert said.global_batch == 32
    if strategy == "pipeline":
        assert probes[2].compute_seconds == pytest.approx(COMPUTE, rel=0.01)
    else:
        with pytest.raises(UsageError, match="add a run with --strategy sequential"):
            fit_probes(probes[1:])


def served_run(folder: Path, strategy: str, seconds: list[float], workers: int = 2) -> Path:
    """A run with one server, in a lab."""
    write_run(folder, seconds, workers=workers, servers=1, strategy=strategy, cores=16, lab=lab(workers + 1),
              hosts=[f"n{i + 1}" for i in range(workers + 1)], compute=[0.5] * workers, spec=SPEC)  # fmt: skip
    emulated(folder)
    return folder


@pytest.mark.parametrize("strategy", ["ps-async", "ps-bounded"])
def test_the_time_of_steps_that_come_in_bursts_is_their_mean(tmp_path: Path, strategy: str) -> None:
    # The first ones, of warm-up, do not count.
    bursts = [0.9] * 4 + random.Random(0).sample([0.1, 0.1, 0.1, 0.5] * 10, 40)
    (probe,) = read_probes([served_run(tmp_path / "run", strategy, bursts)])
    assert probe.seconds.value == pytest.approx(0.2)
    assert probe.seconds.low < 0.2 < probe.seconds.high
    assert len(probe.compute) >= 10


def test_runs_of_few_rounds_are_refused(tmp_path: Path) -> None:
    """Eight workers whose updates are their own: three rounds are 24 steps."""
    with pytest.raises(UsageError, match=r"[123] rounds of an update of each worker after warm-up; at least 5"):
        read_probes([served_run(tmp_path / "run", "ps-async", [0.1] * 28, workers=8)])


def test_each_collective_has_its_own_error_and_asynchronous_steps_a_larger_one(truth: Any) -> None:
    found = fit_probes([truth(1, "sequential"), truth(2, "ring")])
    wrong = replace(found, errors={"ring": 0.03, "servers": 0.05})
    assert wrong.error("ring", "ring") == 0.03
    assert wrong.error("servers", "ps-sync") == wrong.error("gather", "gather") == 0.05
    assert wrong.error("servers", "ps-async") == 0.05 * UNSTEADY


def test_workers_on_one_machine_are_less_certain_if_no_probe_had_as_many(truth: Any) -> None:
    probes = [truth(1, "sequential"), truth(2, "ring")]
    assert crowd_error(probes, probes[1].spec) == 0
    assert crowd_error(probes[:1], probes[1].spec) == CROWD_ERROR


def test_forecasts_are_repeatable_by_seed(truth: Any) -> None:
    probes = [truth(1, "sequential"), truth(2, "ring")]
    found = fit_probes(probes)
    first, again, other = (list(forecasts(found, probes, ["ring"], [2, 4], None, {}, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_what_goes_beyond_the_probes_is_said(truth: Any) -> None:
    probes = [truth(1, "sequential"), truth(2, "ring")]
    found = fit_probes(probes)

    def beyond(strategy: str, workers: int, cluster: Any = None, **given: Any) -> tuple[str, ...]:
        (said,) = forecasts(found, probes, [strategy], [workers], cluster, given)
        return said.beyond

    assert beyond("ring", 4) == ()
    assert "this way to communicate was not measured" in beyond("gather", 4)
    assert "more than 4 times the 2 workers of the probes" in beyond("ring", 9)
    assert "links that were not measured" in beyond("ring", 4, alike(4, 1e8))
    assert "a batch size that was not measured" in beyond("ring", 4, batch_size=64)


def test_bytes_are_those_of_cost(truth: Any) -> None:
    probes = [truth(1, "sequential"), truth(2, "ring")]
    found = fit_probes(probes)

    def sent(strategy: str, workers: int) -> int:
        (said,) = forecasts(found, probes, [strategy], [workers], alike(workers + 1, 1e9), {})
        return said.bytes_sent

    whole = 4 * 690_590
    assert sent("ring", 4) == pytest.approx(1.5 * whole, rel=0.01)
    assert sent("gather", 1000) == pytest.approx(999 * whole, rel=0.01)
    assert sent("reduce-bcast", 1000) == pytest.approx(10 * whole, rel=0.01)
    assert sent("ps-sync", 8) == pytest.approx(8 * whole, rel=0.01)
    assert sent("ps-async", 8) == pytest.approx(whole, rel=0.01)


def test_ten_thousand_ranks(truth: Any) -> None:
    """Slower than with few, because 20,000 messages follow each other."""
    probes = [truth(1, "sequential"), truth(2, "ring")]
    found = fit_probes(probes)
    few, many = forecasts(found, probes, ["ring"], [64, 10_240], alike(10_240, 1e10), {})
    assert many.step_seconds.value > 20_000 * found.costs["ring"].message > few.step_seconds.value


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"seconds": steady(0.1, 8)}, "8 steps after warm-up"),
        ({"spec": {"model": "mlp", "data": "mnist"}}, "a has model mnist-cnn, b has mlp"),
        ({"machine": {"processor": "y"}}, "a ran with processor x, b with y"),
        ({"others": 2.0}, "repeat it on an idle machine"),
        ({"workers": 2, "hosts": ["x", "y"]}, "2 machines whose links are not known"),
        ({"status": "failed", "error": "it broke"}, "failed: it broke"),
    ],
)
def test_runs_that_cannot_be_probes_are_refused(tmp_path: Path, other: dict[str, Any], said: str) -> None:
    usual: dict[str, Any] = {"seconds": steady(0.1, 60), "spec": {"model": "mnist-cnn", "data": "mnist"},
                             "machine": {"processor": "x"}}  # fmt: skip
    write_run(tmp_path / "a", **usual)
    write_run(tmp_path / "b", **usual | other)
    with pytest.raises(UsageError, match=said):
        read_probes([tmp_path / "a", tmp_path / "b"])


def test_emulated_and_real_runs_are_not_mixed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, steady(0.1, 60), spec={"model": "mnist-cnn", "data": "mnist"})
    emulated(tmp_path / "b")
    with pytest.raises(UsageError, match="emulated and real runs cannot be mixed"):
        read_probes([tmp_path])


@pytest.mark.parametrize(("half", "quarter"), [(0.06, 0.04), (0.04, 0.02)])
def test_compute_at_measured_batches_is_what_was_measured(tmp_path: Path, half: float, quarter: float) -> None:
    """Also if the smaller batch is the more efficient one; a still smaller one is not more efficient than that."""
    for batch, seconds in ((64, 0.1), (32, half)):
        write_run(tmp_path / str(batch), steady(seconds, 60), batch=batch, compute=[0.7])
    fit = fit_probes(read_probes([tmp_path]))
    assert fit.compute_seconds(64) == pytest.approx(0.07, rel=0.01)
    assert fit.compute_seconds(32) == pytest.approx(0.7 * half, rel=0.01)
    assert fit.compute_seconds(16) == pytest.approx(0.7 * quarter, rel=0.01)
