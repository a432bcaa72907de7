"""The learning rate: from one worker's to the scaled one, and down to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from paceline.spec import RunSpec
from paceline.strategies.rate import learning_rate

LR, STEPS_PER_EPOCH, EPOCHS = 0.1, 100, 5
TOTAL = STEPS_PER_EPOCH * EPOCHS


def rates(
    workers: int = 4,
    *,
    scale_lr: bool = True,
    steps_per_epoch: int = STEPS_PER_EPOCH,
    total: int = TOTAL,
    **more: Any,
) -> list[float]:
    spec = RunSpec(strategy="ring", lr=LR, workers=workers, scale_lr=scale_lr, **more)
    return [learning_rate(spec, step, steps_per_epoch, total) for step in range(total)]


def torch_rates(
    make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler], steps: int, peak: float
) -> list[float]:
    """The rates of a scheduler of PyTorch."""
    optimizer = torch.optim.SGD([torch.zeros(1)], peak)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_a_rate_that_is_not_scaled_has_no_warm_up_unless_it_is_given() -> None:
    assert rates(1, decay="none") == [LR] * TOTAL
    assert rates(1) == rates(1, warmup_epochs=0) == rates(8, scale_lr=False)


def test_a_scaled_rate_has_a_warm_up_of_one_epoch_unless_another_is_given() -> None:
    assert rates(4) == rates(4, warmup_epochs=1) == rates(4, warmup_steps=STEPS_PER_EPOCH)
    assert rates(4, warmup_steps=0) == rates(4, warmup_epochs=0) != rates(4)


@pytest.mark.parametrize("more", [{"workers": 1}, {"workers": 8, "scale_lr": False}])
def test_a_rate_that_is_not_scaled_warms_up_from_zero(more: dict[str, Any]) -> None:
    """As PyTorch's LinearLR does if the update before its first had the rate 0; then comes the schedule."""
    warm = torch_rates(lambda o: lr_scheduler.LinearLR(o, 1 / 51, 1.0, 50), 50, LR)
    for warmup in ({"warmup_steps": 50}, {"warmup_epochs": 0.5}):
        got = rates(**more, **warmup, decay="linear")
        assert got[:50] == pytest.approx(warm, rel=1e-12)
        assert 0 < got[0] < got[49] < got[50] == LR > got[51]


@pytest.mark.parametrize("warmup", [0, 120])
@pytest.mark.parametrize("workers", [1, 4])
def test_the_decays_are_those_of_pytorch(workers: int, warmup: int) -> None:
    """Cosine and linear go from the end of the warm-up to zero at the end of training."""
    rest, peak = TOTAL - warmup, LR * workers
    expected = {
        "cosine": torch_rates(lambda o: lr_scheduler.CosineAnnealingLR(o, rest), rest, peak),
        "linear": torch_rates(lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, rest), rest, peak),
    }
    for decay, wanted in expected.items():
        assert rates(workers, warmup_steps=warmup, decay=decay)[warmup:] == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("warmup", [0, 120])
def test_step_decay_counts_its_epochs_from_the_first(warmup: int) -> None:
    wanted = torch_rates(lambda o: lr_scheduler.StepLR(o, 150, 0.5), TOTAL, LR * 4)
    got = rates(warmup_steps=warmup, decay="step", decay_every=1.5, decay_factor=0.5)
    assert got[warmup:] == pytest.approx(wanted[warmup:], rel=1e-12)


@pytest.mark.parametrize("decay", ["none", "cosine"])
@pytest.mark.parametrize("workers", [2, 8])
def test_warm_up_grows_evenly_from_one_workers_rate_to_the_scaled_one(workers: int, decay: str) -> None:
    got = rates(workers, warmup_epochs=0.5, decay=decay)
    assert got[0] == LR
    assert got[25] == pytest.approx(LR * (1 + workers) / 2)
    assert got[:51] == sorted(set(got[:51]))
    assert got[50] == pytest.approx(LR * workers)


def test_without_decay_the_scaled_rate_stays() -> None:
    assert rates(decay="none")[100:] == [LR * 4] * 400


def test_the_cosine_is_half_way_down_at_half_time_and_nothing_at_the_end() -> None:
    got = rates()
    assert got[300] == pytest.approx(LR * 4 / 2)
    assert got[100:] == sorted(set(got[100:]), reverse=True)
    assert 0 < got[-1] < LR * 4 * 1e-4


def test_without_scaling_many_workers_have_the_rates_of_one() -> None:
    assert rates(8, scale_lr=False, warmup_epochs=2) == rates(1, warmup_epochs=2)


def test_without_warm_up_the_first_rate_is_the_scaled_one() -> None:
    assert rates(warmup_epochs=0)[0] == pytest.approx(LR * 4)


@pytest.mark.parametrize("decay", ["none", "cosine"])
def test_a_warm_up_longer_than_the_training_is_as_long_as_that(decay: str) -> None:
    got = rates(warmup_epochs=50, decay=decay, total=30)
    assert got[0] == LR
    assert got == sorted(set(got))
    assert got[-1] == pytest.approx(LR * (1 + 3 * 29 / 30))


@settings(deadline=None)
@given(
    workers=st.integers(1, 64),
    scale_lr=st.booleans(),
    warmup_epochs=st.none() | st.floats(0, 100),
    decay=st.sampled_from(["none", "cosine", "linear", "step"]),
    steps_per_epoch=st.integers(1, 50),
    total=st.integers(1, 60),
)
def test_no_rate_is_ever_above_the_scaled_one_or_below_nothing(
    workers: int, scale_lr: bool, warmup_epochs: float | None, decay: str, steps_per_epoch: int, total: int
) -> None:
    got = rates(
        workers,
        scale_lr=scale_lr,
        warmup_epochs=warmup_epochs,
        decay=decay,
        decay_every=0.3,
        decay_factor=0.1,
        steps_per_epoch=steps_per_epoch,
        total=total,
    )
    assert all(0 <= rate <= LR * (workers if scale_lr else 1) * (1 + 1e-12) for rate in got)
