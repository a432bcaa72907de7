"""The noise scale of problems whose gradients and noise are known."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from paceline import RunSpec, train
from paceline.advise.noise_scale import NoiseScale, Norms, Unknown, noise_scale, norms_of, of_run
from paceline.analysis.runs import Run, read_run
from paceline.predict.steps import Array
from paceline.run.records import Step

H = np.array([4.0, 1.0, 0.5, 0.1, 0.1])  # curvatures of the loss ½(x−x*)ᵀH(x−x*), where x−x* is all ones
NOISE = np.array([3.0, 2.0, 2.0, 1.0, 1.0])  # standard deviations of the gradient of one sample
TRUTH = float((NOISE**2).sum() / (H**2).sum())


def measured(dice: np.random.Generator, counts: tuple[int, ...], gradient: Array = H) -> Norms:
    """The norms of a step in which ranks have so many samples."""
    means = np.array([gradient + NOISE / np.sqrt(count) * dice.standard_normal(len(H)) for count in counts])
    whole = np.average(means, axis=0, weights=counts)
    parts = tuple((count, float(mean @ mean)) for count, mean in zip(counts, means, strict=True))
    return Norms(sum(counts), float(whole @ whole), parts)


def estimate(steps: list[Norms]) -> NoiseScale:
    found = noise_scale(steps)
    assert isinstance(found, NoiseScale)
    return found


@pytest.mark.parametrize("counts", [(4, 4), (3, 9, 20), (1, 30)])
def test_estimates_of_a_step_are_unbiased_for_any_shares(counts: tuple[int, ...]) -> None:
    dice = np.random.default_rng(1)
    steps = [measured(dice, counts) for _ in range(20_000)]
    for found, truth in [([s.variance for s in steps], (NOISE**2).sum()), ([s.gradient for s in steps], (H**2).sum())]:
        assert abs(np.mean(found) - truth) < 4 * np.std(found) / np.sqrt(len(found))


def test_equal_and_unequal_shares_give_the_same_answer() -> None:
    dice = np.random.default_rng(2)
    equal, unequal = (estimate([measured(dice, shares) for _ in range(20_000)]) for shares in [(8, 8), (2, 5, 9)])
    assert equal.batch.value == pytest.approx(TRUTH, rel=0.05)
    assert unequal.batch.value == pytest.approx(TRUTH, rel=0.05)


@pytest.mark.parametrize("memory", [0.0, 0.7])
def test_the_interval_covers_the_truth_in_nine_of_ten_trials(memory: float) -> None:
    """Also where gradients of neighbouring steps are alike."""
    covered = []
    for seed in range(400):
        dice = np.random.default_rng(seed)
        sizes = [float(dice.standard_normal())]
        for _ in range(119):
            sizes.append(memory * sizes[-1] + np.sqrt(1 - memory**2) * float(dice.standard_normal()))
        found = noise_scale([measured(dice, (6, 10), H * (1 + 0.2 * size)) for size in sizes])
        covered.append(isinstance(found, NoiseScale) and found.batch.low <= TRUTH / 1.04 <= found.batch.high)
    assert 0.84 <= np.mean(covered) <= 0.96


@pytest.mark.parametrize("counts", [(8, 8), (4, 8, 8, 12)])
def test_gradients_by_autograd_have_the_noise_scale_of_their_samples(counts: tuple[int, ...]) -> None:
    """Linear regression on a fixed set of samples, whose gradients are known one by one."""
    torch.manual_seed(0)
    inputs, weight = torch.randn(4000, 6), torch.ones(6, requires_grad=True)
    targets = inputs @ torch.arange(6.0) / 3 + torch.randn(4000)
    alone = (inputs @ weight - targets)[:, None].detach() * inputs
    truth = float(alone.var(dim=0).sum() / alone.mean(dim=0).square().sum())

    def squared(rows: torch.Tensor) -> float:
        loss = ((inputs[rows] @ weight - targets[rows]) ** 2 / 2).mean()
        return float(torch.autograd.grad(loss, weight)[0].square().sum())

    steps = []
    for _ in range(1500):
        rows = torch.randint(4000, (sum(counts),))
        parts = tuple((len(part), squared(part)) for part in rows.split(counts))
        steps.append(Norms(len(rows), squared(rows), parts))
    assert estimate(steps).batch.value == pytest.approx(truth, rel=0.06)


def test_a_gradient_of_zero_has_no_noise_scale_in_nineteen_of_twenty_trials() -> None:
    dice = np.random.default_rng(3)
    found = [noise_scale([measured(dice, (4, 4), 0 * H) for _ in range(40)]) for _ in range(400)]
    unknown = [each for each in found if isinstance(each, Unknown)]
    assert len(unknown) >= 0.92 * len(found)
    assert "cannot be told from its noise" in unknown[0].why


def test_few_steps_have_no_noise_scale() -> None:
    found = noise_scale([measured(np.random.default_rng(4), (8, 8))] * 3)
    assert found == Unknown("gradient norms of 3 steps are recorded, and 16 are needed")


def a_run(ranks: list[list[tuple[int, int, float | None]]], norm: float = 2.0) -> Run:
    """Of each rank and step: samples of all ranks, own ones, and their norm. The fields that are read."""
    steps = {
        rank: [Step(number, 0, 1.0, 0.1, samples, {}, own=own, norm=norm, own_norm=own_norm)
               for number, (samples, own, own_norm) in enumerate(each)]
        for rank, each in enumerate(ranks)
    }  # fmt: skip
    return cast(Run, SimpleNamespace(folder=Path("run"), steps=steps))


def test_norms_are_read_from_the_steps_of_all_ranks() -> None:
    run = a_run([[(12, 8, 3.0)] * 10, [(12, 4, 5.0)] * 10])
    parts = ((8, 9.0), (4, 25.0))
    assert norms_of(run) == [Norms(12, 4.0, parts, step) for step in range(3, 10)]  # the first quarter is left out


def test_steps_without_norms_of_all_samples_do_not_count() -> None:
    lost = a_run([[(12, 8, 3.0)] * 20, [(12, 4, None)] * 20])
    alone = a_run([[(12, 12, 3.0)] * 20])
    assert norms_of(lost) == norms_of(alone) == []
    assert isinstance(of_run(alone), Unknown)


def test_a_real_run_records_what_is_needed(tmp_path: Path) -> None:
    spec = RunSpec(model="mlp", data="mnist-mini", strategy="allreduce", workers=2, transport="threads", lr=1e-9,
                   global_batch=33, steps=40, record_norms=2, scale_lr=False, test=False, output_dir=str(tmp_path),
                   name="run")  # fmt: skip
    train(spec)
    run = read_run(tmp_path / "run")
    assert isinstance(run, Run)
    found = norms_of(run)
    assert [step.step for step in found] == list(range(10, 40, 2))
    assert {tuple(count for count, _ in step.parts) for step in found} == {(16, 17)}
    assert np.mean([step.variance for step in found]) > 0
    assert all(step.squared < max(squared for _, squared in step.parts) for step in found)  # the mean is shorter
