"""Replicas of shards as a strategy: equal starts, checks, what is metered, what a deadline does."""

from __future__ import annotations

import pytest
import torch
from tensor_cases import batches, divided
from torch import nn
from worlds import ThreadWorld, limited_to

from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.errors import CommTimeout, ReplicaError
from paceline.layout import share
from paceline.strategies.engine import StepTimer
from paceline.tensor.layers import ColumnLinear, RowLinear


def test_ranks_start_with_the_values_of_the_first_shard_and_replica() -> None:
    def case(comm: Comm) -> list[float]:
        strategy, _, _ = divided(comm, 2)
        with torch.no_grad():
            for tensor in (*strategy.model.parameters(), *strategy.model.buffers()):
                tensor.fill_(comm.rank)
        strategy.setup()
        state = strategy.state_dict()
        return [state[name].unique().item() for name in ("conv1.weight", "norm.running_mean", "dense1.weight")]

    # Shard 1 keeps its own part, which is that of replica 0's shard 1.
    assert ThreadWorld(4).run(case) == [[0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 1]]


def test_batchnorm_statistics_of_replicas_are_averaged_for_evaluation() -> None:
    def case(comm: Comm) -> float:
        strategy, _, _ = divided(comm, 2)
        mean = strategy.model.get_buffer("norm.running_mean")
        mean.fill_(strategy.replicas_comm.rank)
        strategy.evaluate(batches(2, strategy.replicas_comm.rank, 2))
        return mean[0].item()

    assert ThreadWorld(4).run(case) == [0.5] * 4


@pytest.mark.parametrize(("name", "wrong"), [("conv1.weight", 3), ("dense2.bias", 1), ("dense1.weight", 2)])
def test_a_rank_whose_weights_differ_is_named(name: str, wrong: int) -> None:
    def case(comm: Comm) -> int | None:
        strategy, _, _ = divided(comm, 2)
        strategy.check_replicas()
        if comm.rank == wrong:
            with torch.no_grad():
                strategy.model.get_parameter(name).view(-1)[0] += 1e-9
        try:
            strategy.check_replicas()
        except ReplicaError as error:
            return error.rank
        return None

    found = ThreadWorld(4).run(case)
    # A weight that is split has equals on the other replicas alone.
    assert found == ([wrong] * 4 if name != "dense1.weight" else [wrong, None, wrong, None])


def test_a_steps_bytes_are_counted_and_an_evaluations_are_not() -> None:
    def case(comm: Comm) -> list[list[int]]:
        strategy, _, _ = divided(MeteredComm(comm), 2, averaging="ring")
        counts = []
        for batch in batches(3, strategy.replicas_comm.rank, 2)[:2]:
            strategy.step(batch, 0.1, 0, StepTimer())
            strategy.evaluate([batch])
            meter = strategy.gradient_meter()
            counts.append([meter.bytes_sent, meter.opaque_bytes])
        strategy.close()
        return [*counts, [sum(p.numel() for p in strategy.model.parameters()) + len(list(strategy.model.parameters()))]]

    for rank, (once, twice, (values,)) in enumerate(ThreadWorld(4).run(case)):
        samples, own = 7, len(share(130, 2, rank % 2))
        gathered = samples * (own * 2 * 2 + own)  # conv2 has 2 x 2 pixels; dense3
        # A ring of two sends each half of the gradients and of the tail once: a flag for each parameter and two more.
        assert once[0] == 8 * (gathered + values + 2)
        # Backward of conv2 (16 channels of 4 x 4), dense1 and dense3, forward of dense2.
        assert once[1] == 8 * samples * (16 * 4 * 4 + 130 + 130 + 130)
        assert twice == [2 * count for count in once]


def test_a_shard_that_stays_away_ends_the_others_wait_at_the_deadline() -> None:
    def case(comm: Comm) -> list[str]:
        found = []
        for layer in (ColumnLinear, RowLinear):
            with limited_to(comm, 0.2) as short:
                if comm.rank:
                    split = layer(nn.Linear(6, 6), short)
                    with pytest.raises(CommTimeout) as caught:
                        split(torch.ones(2, split.weight.shape[1]))
                    found.append(str(caught.value))
        return found

    nothing, *others = ThreadWorld(3).run(case)
    assert nothing == []
    assert all("waited 0.2 s" in message for messages in others for message in messages)
    assert [len(messages) for messages in others] == [2, 2]
