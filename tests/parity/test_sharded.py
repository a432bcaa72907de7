"""A sharded optimizer keeps 1/N on each rank, and its steps send what the halves of a ring cost."""

from __future__ import annotations

import pytest
import sharded_cases as cases
from worlds import TRANSPORTS, ThreadWorld, Worlds

from paceline.collectives import in_place
from paceline.collectives.plan import Cost
from paceline.collectives.ring import ALL_GATHER, REDUCE_SCATTER, RING
from paceline.layout import share


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_rank_keeps_its_part_and_sends_the_bytes_of_a_ring(worlds: Worlds, transport: str, workers: int) -> None:
    found = worlds.get(transport, workers).run(cases.kept_and_sent)
    lengths = found[0]["lengths"]
    assert len(lengths) > 1
    sizes = [p.numel() for p in cases.make_model().parameters()]
    assert sum(sizes) <= sum(lengths) < sum(sizes) + 16 * len(sizes), "parameters begin at cache lines"
    assert sum(mine["moments"] for mine in found) == 2 * sum(sizes)
    # Gradients and weights in float32; the tail, in float64, is summed on all ranks.
    halves = [half.cost(workers, length, 4) for length in lengths for half in (REDUCE_SCATTER, ALL_GATHER)]
    costs = [*halves, RING.cost(workers, found[0]["tail"], 8)]
    if transport == "shm":  # as many bytes, without messages; the tail is summed by the transport
        costs = [in_place.cost(workers, length, 4) for length in lengths]
    for rank, mine in enumerate(found):
        assert mine["moments"] <= 2 * sum(len(share(length, workers, rank)) for length in lengths)
        assert tuple(mine["sent"]) == sent(costs, rank)
        assert mine["as before"], "channels-last weights stay so"
    for rank in range(workers):
        ring = [RING.cost(workers, length, 4) for length in lengths]
        assert sent(halves, rank) == sent(ring, rank), "the halves cost what a ring costs"


def sent(costs: list[Cost], rank: int) -> tuple[int, int, int]:
    """Bytes sent and received, and messages sent, in all steps."""
    columns = [(cost.bytes_sent[rank], cost.bytes_received[rank], cost.messages_sent[rank]) for cost in costs]
    a, b, c = (cases.STEPS * sum(column) for column in zip(*columns, strict=True))
    return a, b, c


@pytest.mark.parametrize("change", ["freeze", "replace"])
def test_parameters_that_change_on_one_rank_are_refused_on_all(change: str) -> None:
    for message in ThreadWorld(3).run(cases.refusal, change=change):
        assert "parameters were added, replaced, frozen or unfrozen during training" in message
