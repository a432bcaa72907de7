"""The learning rate: from one worker's to the scaled one, and down to nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.spec import RunSpec
from paceline.strategies.rate import learning_rate

LR, STEPS_PER_EPOCH, EPOCHS = 0.1, 100, 5
TOTAL = STEPS_PER_EPOCH * EPOCHS


def rates(
    workers: int = 4,
    *,
    scale_lr: bool = True,
    warmup_epochs: float = 1.0,
    decay: str = "cosine",
    steps_per_epoch: int = STEPS_PER_EPOCH,
    total: int = TOTAL,
) -> list[float]:
    spec = RunSpec(strategy="ring", lr=LR, workers=workers, scale_lr=scale_lr, warmup_epochs=warmup_epochs, decay=decay)
    return [learning_rate(spec, step, steps_per_epoch, total) for step in range(total)]


def test_one_worker_has_no_warm_up() -> None:
    assert rates(1, warmup_epochs=3, decay="none") == [LR] * TOTAL
    assert rates(1, warmup_epochs=3)[0] == LR
    assert rates(1, warmup_epochs=3) == rates(1, warmup_epochs=0)


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
    assert rates(8, scale_lr=False, warmup_epochs=2) == rates(1)


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
    warmup_epochs=st.floats(0, 100),
    decay=st.sampled_from(["none", "cosine"]),
    steps_per_epoch=st.integers(1, 50),
    total=st.integers(1, 60),
)
def test_no_rate_is_ever_above_the_scaled_one_or_below_nothing(
    workers: int, scale_lr: bool, warmup_epochs: float, decay: str, steps_per_epoch: int, total: int
) -> None:
    got = rates(
        workers,
        scale_lr=scale_lr,
        warmup_epochs=warmup_epochs,
        decay=decay,
        steps_per_epoch=steps_per_epoch,
        total=total,
    )
    assert all(0 <= rate <= LR * (workers if scale_lr else 1) * (1 + 1e-12) for rate in got)
