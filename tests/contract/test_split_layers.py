"""Split layers compute what the layers they replace compute, on every transport, and send what their table says."""

from __future__ import annotations

import pytest
import tensor_cases as cases
from worlds import ThreadWorld, World, Worlds

from paceline.layout import share

# torch's own word on a convolution whose padding differs on its two sides.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def test_split_layers_are_the_whole_layers_on_every_transport(world: World) -> None:
    every = 1 if (world.transport, world.size) == ("threads", 4) else 5
    assert max(world.run(cases.linears_match, every=every)) <= 1e-12
    assert max(world.run(cases.convolutions_match, every=every)) <= 1e-12


def test_one_shard_has_the_whole_layer() -> None:
    assert ThreadWorld(1).run(cases.linears_match, every=5)[0] <= 1e-15
    assert ThreadWorld(1).run(cases.convolutions_match, every=5)[0] <= 1e-15


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_a_layer_sends_what_its_table_says(shards: int) -> None:
    inputs, outputs, batch, size = 6, 10, 5, 4
    pixels, pixels_out = 5 * 6, 3 * 4
    for rank, found in enumerate(
        ThreadWorld(shards).run(cases.bytes_of_a_step, inputs=inputs, outputs=outputs, batch=batch)
    ):
        gathered = (shards - 1) * batch * len(share(outputs, shards, rank)) * size
        summed = batch * inputs * size if shards > 1 else 0
        assert found == {
            "column": [gathered, 0, 0, summed],
            "column, first": [gathered, 0, 0, 0],
            "column, kept": [0, 0, 0, summed],
            "row": [0, batch * outputs * size if shards > 1 else 0, 0, 0],
            "channels": [gathered * pixels_out, 0, 0, summed * pixels],
        }


@pytest.mark.parametrize(("transport", "shards"), [("threads", 2), ("threads", 3), ("gloo", 3), ("mpi", 2)])
def test_a_transformer_split_by_heads_trains_what_the_whole_one_trains(
    worlds: Worlds, transport: str, shards: int
) -> None:
    assert max(worlds.get(transport, shards).run(cases.transformer_trains)) <= 1e-10


@pytest.mark.parametrize("shards", [2, 3])
def test_each_half_of_a_block_is_summed_once_forward_and_once_backward(shards: int) -> None:
    for layers in (1, 3):
        assert ThreadWorld(shards).run(cases.calls_of_a_transformer, layers=layers) == [[2 * layers] * 2 + [0]] * shards


@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_shards_that_draw_alike_drop_the_same_values(worlds: Worlds, transport: str) -> None:
    for difference, drew in worlds.get(transport, 2).run(cases.drops_the_same):
        assert difference <= 1e-10
        assert drew
