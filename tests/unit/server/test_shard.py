"""Chunks cover the values once; sums do not depend on the order of arrival; a state goes on as if never stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.server.layout import Layout
from paceline.server.shard import Applied, Refused, Shard, Sum

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.1, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.1, fused=True),
}


def noise(seed: int, length: int = 6) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def make(staleness: int | None = 0, optimizer: str = "momentum", trainable: int = 6, adapt: bool = False) -> Shard:
    return Shard({3: (noise(0), trainable)}, OPTIMIZERS[optimizer], lambda u: 0.1 / (1 + u), staleness, adapt=adapt)


def push(shard: Shard, update: int, slot: int, slots: int, version: int, values: Tensor) -> int | None:
    missed = shard.check(3, update, slot, slots, version, len(values))
    if missed is not None:
        shard.add(3, update, slot, slots, missed, values.clone())
    return missed


# Layout.

layouts = st.builds(Layout, st.integers(1, 500), st.integers(0, 500), st.integers(1, 7), st.sampled_from([4, 8]),
                    st.integers(8, 400))  # fmt: skip


@given(layouts)
def test_chunks_cover_every_value_once(layout: Layout) -> None:
    values = [place for chunk in range(layout.chunks) for place in layout.span(chunk)]
    assert values == list(range(layout.length))


@given(layouts)
def test_every_chunk_has_one_server(layout: Layout) -> None:
    chunks = [chunk for server in range(layout.servers) for chunk in layout.of_server(server)]
    assert chunks == list(range(layout.chunks))
    assert all(chunk in layout.of_server(layout.server_of(chunk)) for chunk in chunks)


@given(layouts)
def test_servers_differ_by_at_most_a_chunk(layout: Layout) -> None:
    sizes = [layout.bytes_of_server(server) for server in range(layout.servers)]
    assert sum(sizes) == layout.length * layout.itemsize
    assert max(sizes) - min(sizes) <= (max(len(layout.span(c)) for c in range(layout.chunks)) + 1) * layout.itemsize


@given(layouts)
def test_no_chunk_is_larger_than_asked(layout: Layout) -> None:
    for chunk in range(layout.chunks):
        assert (len(layout.span(chunk)) - 1) * layout.itemsize < layout.chunk_bytes


# Applied.


@given(st.permutations(range(12)), st.integers(0, 12))
def test_applied_knows_what_was_added(numbers: list[int], count: int) -> None:
    applied = Applied()
    for number in numbers[:count]:
        applied.add(number)
    assert [n for n in range(20) if n in applied] == sorted(numbers[:count])


def test_applied_stays_small() -> None:
    applied = Applied()
    for number in range(1000):
        applied.add(number)
    assert (applied.low, applied.above) == (1000, set())


# Sums.


@settings(max_examples=30)
@given(st.permutations(range(5)))
def test_a_sum_is_the_same_bit_for_bit_in_any_order(arrival: list[int]) -> None:
    parts = [noise(slot) * 10.0**slot for slot in range(5)]
    total = Sum(5)
    for slot in arrival:
        assert not total.complete
        assert not total.has(slot)
        total.add(slot, parts[slot].clone())
        assert total.has(slot)
    expected = (((parts[0] + parts[1]) + parts[2]) + parts[3]) + parts[4]
    assert total.complete
    assert total.total is not None
    assert torch.equal(total.total, expected)


@settings(max_examples=30)
@given(st.permutations([(u, slot) for u in range(3) for slot in range(3)]))
def test_updates_are_made_in_their_order_whatever_comes_first(arrival: list[tuple[int, int]]) -> None:
    def weights(order: list[tuple[int, int]]) -> Tensor:
        shard = make(staleness=2)
        for update, slot in order:
            push(shard, update, slot, 3, max(0, update - 2), noise(10 * update + slot))
        assert shard.chunks[3].version == 3
        return shard.chunks[3].values

    assert torch.equal(weights(arrival), weights(sorted(arrival)))


def test_a_gradient_that_is_there_is_taken_once() -> None:
    shard = make(staleness=1)
    assert push(shard, 0, 0, 2, 0, noise(1)) == 0
    assert push(shard, 0, 0, 2, 0, noise(1)) is None
    assert push(shard, 0, 1, 2, 0, noise(2)) == 0
    assert push(shard, 0, 1, 2, 0, noise(2)) is None
    assert shard.chunks[3].version == 1


def test_staleness_is_what_the_weights_have_missed() -> None:
    shard = make(staleness=2)
    assert [push(shard, update, 0, 1, version, noise(1)) for update, version in ((0, 0), (1, 0), (2, 0), (3, 3))] == [
        0, 1, 2, 0
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("update", "slot", "slots", "version"), [(3, 0, 1, 3), (2, 0, 1, 0), (1, 1, 1, 0), (0, 0, 0, 0), (0, 1, 3, 0)]
)
def test_what_breaks_the_bound_or_the_division_is_refused(update: int, slot: int, slots: int, version: int) -> None:
    shard = make(staleness=1)
    push(shard, 0, 0, 2, 0, noise(1))
    with pytest.raises(Refused):
        push(shard, update, slot, slots, version, noise(2))
    with pytest.raises(Refused):
        shard.check(3, 0, 1, 2, 0, 5)
    with pytest.raises(Refused):
        shard.check(4, 0, 1, 2, 0, 6)


def test_without_a_bound_a_gradient_is_an_update_once() -> None:
    shard = make(staleness=None)
    assert [push(shard, update, 0, 1, 0, noise(1)) for update in (5, 0, 5, 2)] == [0, 1, None, 2]
    assert shard.chunks[3].version == 3


def test_a_stale_gradient_can_get_a_smaller_rate() -> None:
    steps = []
    for adapt in (False, True):
        shard = make(staleness=None, optimizer="sgd", adapt=adapt)
        for update in range(3):
            before = shard.chunks[3].values.clone()
            push(shard, update, 0, 1, 0, noise(7))
        steps.append(shard.chunks[3].values - before)
    torch.testing.assert_close(steps[0], 2 * steps[1])


# Buffers.


def test_buffers_are_added_and_parameters_stepped() -> None:
    shard = make(optimizer="sgd", trainable=4)
    push(shard, 0, 0, 1, 0, noise(5))
    change = shard.chunks[3].values - noise(0)
    torch.testing.assert_close(change, torch.cat([-0.1 * noise(5)[:4], noise(5)[4:]]))


def test_a_chunk_of_buffers_alone_has_no_optimizer() -> None:
    shard = make(trainable=0)
    push(shard, 0, 0, 1, 0, noise(5))
    torch.testing.assert_close(shard.chunks[3].values, noise(0) + noise(5))


# Weights that are out, kept, saved.


def test_published_weights_do_not_change() -> None:
    shard = make()
    out = shard.chunks[3].published()
    before = bytes(out)
    push(shard, 0, 0, 1, 0, noise(1))
    assert bytes(out) == before != bytes(shard.chunks[3].published())


def test_kept_weights_come_back_under_a_version_of_their_own() -> None:
    shard = make()
    push(shard, 0, 0, 1, 0, noise(1))
    best = shard.chunks[3].values.clone()
    shard.keep()
    push(shard, 1, 0, 1, 1, noise(2))
    shard.recall()
    assert torch.equal(shard.chunks[3].values, best)
    assert shard.chunks[3].version == 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("trainable", [6, 4])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_going_on_from_a_copy_is_never_having_stopped(optimizer: str, trainable: int, at: int) -> None:
    shard, other = make(1, optimizer, trainable), make(1, optimizer, trainable)
    for update in range(at):
        push(shard, update, 0, 1, update, noise(update))
    shard.keep()
    tensors = {name: tensor.clone() for name, tensor in shard.tensors(3).items()}
    for update in range(7, 9):  # what it had become is forgotten
        push(other, update - 7, 0, 1, 0, noise(update))
    other.load(3, tensors, at)
    for update in range(at, at + 4):
        for each in (shard, other):
            push(each, update, 0, 1, update, noise(update))
    assert torch.equal(shard.chunks[3].values, other.chunks[3].values)
    assert torch.equal(shard.kept[3], other.kept[3])


def test_a_copy_has_no_gradient_that_is_not_applied() -> None:
    shard = make(staleness=1)
    push(shard, 0, 0, 2, 0, noise(1))
    shard.load(3, shard.tensors(3), 0)
    assert push(shard, 0, 0, 2, 0, noise(1)) == 0
