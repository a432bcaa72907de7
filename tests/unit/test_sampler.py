"""Which samples a rank sees: all of them once an epoch, in an order that does not depend on the number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import UsageError
from paceline.training.sampler import Sampler, hold_out

SAMPLES, BATCH, SIZE = st.integers(1, 200), st.integers(1, 20), st.integers(1, 6)


def global_batches(samples: int, batch: int, size: int, seed: int = 0) -> list[list[int]]:
    """The next epoch's batches, each put together from its ranks' parts in the order of the ranks."""
    ranks = [list(Sampler(samples, batch, rank, size, seed)) for rank in range(size)]
    return [torch.cat(parts).tolist() for parts in zip(*ranks, strict=True)]


@settings(deadline=None)
@given(SAMPLES, BATCH, SIZE)
@example(samples=1, batch=20, size=6)
def test_every_sample_comes_exactly_once_an_epoch(samples: int, batch: int, size: int) -> None:
    batches = global_batches(samples, batch, size)
    assert sorted(index for indices in batches for index in indices) == list(range(samples))
    assert len(batches) == len(Sampler(samples, batch, 0, size))
    assert all(len(indices) == batch * size for indices in batches[:-1])


@settings(deadline=None)
@given(SAMPLES, BATCH, SIZE, st.integers(0, 2**32))
def test_a_step_is_the_same_samples_in_the_same_order_for_any_number_of_ranks(
    samples: int, batch: int, size: int, seed: int
) -> None:
    assert global_batches(samples, batch, size, seed) == global_batches(samples, batch * size, 1, seed)


@settings(deadline=None)
@given(SAMPLES, BATCH, SIZE)
def test_share_is_a_ranks_part_of_the_step_and_sums_to_one(samples: int, batch: int, size: int) -> None:
    samplers = [Sampler(samples, batch, rank, size) for rank in range(size)]
    parts = [list(sampler) for sampler in samplers]
    for step in range(len(samplers[0])):
        count = samplers[0].global_count(step)
        shares = [sampler.share(step) for sampler in samplers]
        assert shares == [len(parts[rank][step]) / count for rank in range(size)]
        assert sum(shares) == pytest.approx(1, abs=1e-15 * size)


@settings(deadline=None)
@given(SAMPLES, BATCH, SIZE)
def test_ranks_differ_by_at_most_one_sample_in_any_step(samples: int, batch: int, size: int) -> None:
    for parts in zip(*(Sampler(samples, batch, rank, size) for rank in range(size)), strict=True):
        counts = [len(part) for part in parts]
        assert max(counts) - min(counts) <= 1


def test_a_ragged_last_batch_is_divided_too_and_may_leave_a_rank_with_nothing() -> None:
    counts = [[len(part) for part in Sampler(10, 2, rank, 3)] for rank in range(3)]
    assert counts == [[2, 1], [2, 1], [2, 2]]
    counts = [[len(part) for part in Sampler(8, 2, rank, 3)] for rank in range(3)]
    assert sorted(last for _, last in counts) == [0, 1, 1]
    assert [Sampler(8, 2, rank, 3).share(1) for rank in range(3)] == [last / 2 for _, last in counts]


def test_every_epoch_and_every_seed_has_an_order_of_its_own_that_can_be_had_again() -> None:
    def epochs(seed: int) -> list[list[int]]:
        sampler = Sampler(100, 100, seed=seed)
        return [next(iter(sampler)).tolist() for _ in range(3)]

    orders = epochs(0) + epochs(1)
    assert len({tuple(order) for order in [*orders, list(range(100))]}) == 7
    assert epochs(0) == orders[:3]


def test_an_epoch_that_is_left_early_is_over_for_the_next() -> None:
    left, whole = Sampler(50, 5), Sampler(50, 5)
    next(iter(left))
    list(whole)
    assert torch.equal(torch.cat(list(left)), torch.cat(list(whole)))


@settings(deadline=None)
@given(st.integers(1, 300), st.floats(0, 1), st.integers(0, 2**32))
def test_hold_out_is_a_partition(samples: int, part: float, seed: int) -> None:
    count = round(samples * part)
    train, validation = hold_out(samples, count, seed)
    assert len(validation) == count
    assert sorted(train.tolist() + validation.tolist()) == list(range(samples))
    for indices in (train, validation):
        assert indices.tolist() == sorted(indices.tolist())


def test_hold_out_is_drawn_by_the_seed_and_apart_from_the_shuffle() -> None:
    def kept(seed: int) -> Tensor:
        return hold_out(100, 10, seed)[1]

    assert torch.equal(kept(0), kept(0))
    assert not torch.equal(kept(0), kept(1))
    assert not torch.equal(kept(0), Sampler(100, 10, seed=0).order()[:10].sort().values)


@pytest.mark.parametrize(("samples", "batch"), [(0, 1), (1, 0), (-1, 1)])
def test_nothing_to_sample_is_refused(samples: int, batch: int) -> None:
    with pytest.raises(UsageError, match=f"{samples} samples in batches of {batch}"):
        Sampler(samples, batch)
