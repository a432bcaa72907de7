"""Words and files, on every transport that has them."""

from pathlib import Path

import numpy as np
import pytest
import word_cases as cases
from worlds import TRANSPORTS, World, Worlds


def test_everyone_hears_everyone(world: World) -> None:
    expected = ["" if rank == 1 else f"Größe {rank}" * rank for rank in range(world.size)]
    assert world.run(cases.shares) == [expected] * world.size


def test_a_long_text_is_cut_between_letters(world: World) -> None:
    assert world.run(cases.cut_short) == [[2048] * world.size] * world.size


def test_what_one_rank_refuses_all_refuse_with_its_words(world: World) -> None:
    everyone = list(range(world.size))
    assert world.run(cases.refuses, bad=[]) == [f"done {rank}" for rank in everyone]
    assert world.run(cases.refuses, bad=[1]) == ["rank 1: no such folder on 1"] * world.size
    assert world.run(cases.refuses, bad=everyone) == ["no such folder on 0"] * world.size


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_takes_longer_than_the_deadline_is_waited_for(worlds: Worlds, transport: str) -> None:
    assert worlds.get(transport, 3).run(cases.takes_long) == [False, True, False]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_mpi_io_reads_what_a_mapped_file_has(worlds: Worlds, tmp_path: Path, size: int) -> None:
    path = tmp_path / "records.bin"
    np.random.default_rng(0).integers(0, 256, 16 + 500 * 331, np.uint8).tofile(path)
    for length, offset, stride in ((330, 17, 331), (1, 16, 331), (331, 16, 331), (200, 0, 256)):
        cut = worlds.get("mpi", size).run(
            cases.reads, path=str(path), length=length, offset=offset, stride=stride, records=490
        )
        assert cut == [[True] * 3] * size, (length, offset, stride)


def test_mpi_io_on_a_file_that_is_too_short_or_not_there_is_an_error(worlds: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "short.bin"
    path.write_bytes(bytes(100))
    for rank, message in enumerate(worlds.get("mpi", 2).run(cases.reads_beyond, path=str(path))):
        assert message == f"DataError: {path} is too short: rank {rank} needs 110 bytes, but it has 100"
    for message in worlds.get("mpi", 2).run(cases.reads_nothing_there, path=str(tmp_path / "none")):
        assert f"read {tmp_path / 'none'} with" in message


@pytest.mark.parametrize("transport", ["threads", "gloo"])
def test_other_transports_say_that_they_cannot_read_files(worlds: Worlds, transport: str) -> None:
    messages = worlds.get(transport, 2).run(cases.reads_nothing_there, path="anything")
    assert messages == [f"{transport} cannot read files collectively: only mpi can"] * 2
