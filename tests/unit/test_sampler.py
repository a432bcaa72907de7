"""Which samples a rank sees: all of them once an epoch, in an order that does not depend on the number of ranks."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import ThreadWorld

from paceline.comm.base import Comm
from paceline.data.sampler import Sampler, hold_out
from paceline.errors import UsageError
from paceline.loop.data_parallel import DataParallel

SAMPLES, BATCH, SIZE = st.integers(1, 200), st.integers(1, 40), st.integers(1, 6)


def parts_of(sampler: Sampler) -> list[list[int]]:
    """The samples that count of a rank's next epoch: none in steps in which its share is 0."""
    return [indices if sampler.share(step) else [] for step, indices in enumerate(sampler)]


def global_batches(samples: int, batch: int, size: int, seed: int = 0) -> list[list[int]]:
    """The next epoch's batches, each put together from its ranks' parts in the order of the ranks."""
    ranks = [parts_of(Sampler(samples, batch, rank, size, seed)) for rank in range(size)]
    return [list(chain(*parts)) for parts in zip(*ranks, strict=True)]


@settings(deadline=None)
@given(SAMPLES, BATCH, SIZE)
@example(samples=1, batch=40, size=6)
def test_every_sample_comes_exactly_once_an_epoch(samples: int, batch: int, size: int) -> None:
    batches = global_batches(samples, batch, size)
    assert sorted(index for indices in batches for index in indices) == list(range(samples))
    assert len(batches) == len(Sampler(samples, batch, 0, size))
    assert all(len(indices) == batch for indices in batches[:-1])


@settings(deadline=None)
@given(SAMPLES, BATCH, SIZE, st.integers(0, 2**32), st.integers(0, 5))
def test_order_and_division_are_as_documented(samples: int, batch: int, size: int, seed: int, epoch: int) -> None:
    order = np.random.default_rng([seed, 0, epoch]).permutation(samples).tolist()
    for rank in range(size):
        sampler = Sampler(samples, batch, rank, size, seed)
        sampler.epoch = epoch
        for step, indices in enumerate(sampler):
            positions = order[step * batch : (step + 1) * batch]
            count = len(positions)
            assert indices == (positions[count * rank // size : count * (rank + 1) // size] or positions[:1])


@settings(deadline=None)
@given(SAMPLES, BATCH, SIZE)
def test_share_is_a_ranks_part_of_the_step_and_sums_to_one(samples: int, batch: int, size: int) -> None:
    samplers = [Sampler(samples, batch, rank, size) for rank in range(size)]
    parts = [parts_of(sampler) for sampler in samplers]
    for step in range(len(samplers[0])):
        count = samplers[0].global_count(step)
        shares = [sampler.share(step) for sampler in samplers]
        assert shares == [len(parts[rank][step]) / count for rank in range(size)]
        assert sum(shares) == pytest.approx(1, abs=1e-15 * size)


@settings(deadline=None)
@given(SAMPLES, BATCH, SIZE)
def test_ranks_differ_by_at_most_one_sample_in_any_step(samples: int, batch: int, size: int) -> None:
    for parts in zip(*(parts_of(Sampler(samples, batch, rank, size)) for rank in range(size)), strict=True):
        counts = [len(part) for part in parts]
        assert max(counts) - min(counts) <= 1


def test_a_global_batch_that_ranks_cannot_divide_evenly_stays_whole() -> None:
    counts = [[len(part) for part in Sampler(74, 64, rank, 3)] for rank in range(3)]
    assert counts == [[21, 3], [21, 3], [22, 4]]


def test_a_data_loader_gets_a_sample_where_a_rank_has_none_and_training_equals_one_process() -> None:
    """8 samples in global batches of 6: of the last two samples, three ranks cannot have one each."""
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x.sum(1))

    def trained(comm: Comm) -> tuple[list[float], list[float]]:
        model = nn.Linear(4, 1).double()
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        parallel = DataParallel(model, comm)
        sampler = Sampler(len(dataset), 6, comm.rank, comm.size)
        shares = []
        for _ in range(2):
            for step, (inputs, target) in enumerate(DataLoader(dataset, batch_sampler=sampler)):
                assert len(inputs) > 0
                optimizer.zero_grad()
                parallel.backward(F.mse_loss(parallel(inputs).flatten(), target), sampler.share(step))
                optimizer.step()
                shares.append(sampler.share(step))
        return [float(value) for p in model.parameters() for value in p.detach().flatten()], shares

    ((alone, _),) = ThreadWorld(1).run(trained)
    ranks = ThreadWorld(3).run(trained)
    assert [shares[1] for _, shares in ranks] == [0, 0.5, 0.5]
    for weights, _ in ranks:
        assert weights == pytest.approx(alone, abs=1e-12)


def test_every_epoch_and_every_seed_has_an_order_of_its_own_that_can_be_had_again() -> None:
    def epochs(seed: int) -> list[list[int]]:
        sampler = Sampler(100, 100, seed=seed)
        return [next(iter(sampler)) for _ in range(3)]

    orders = epochs(0) + epochs(1)
    assert len({tuple(order) for order in [*orders, list(range(100))]}) == 7
    assert epochs(0) == orders[:3]


def test_an_epoch_that_is_left_early_is_over_for_the_next() -> None:
    left, whole = Sampler(50, 5), Sampler(50, 5)
    next(iter(left))
    list(whole)
    assert list(left) == list(whole)


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
    with pytest.raises(UsageError, match=f"{samples} samples in global batches of {batch}"):
        Sampler(samples, batch)


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    with pytest.raises(UsageError, match=f"rank {rank} of 3"):
        Sampler(10, 5, rank, 3)
