"""A model that lies in parts on many ranks: one file of all parts, and parts of one file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from worlds import ThreadWorld, Worlds

from paceline.checkpoint import file_format
from paceline.comm.base import Comm, Work
from paceline.comm.metered import MeteredComm
from paceline.comm.single import SingleComm
from paceline.errors import UsageError
from paceline.layout import share
from paceline.models.build import build
from paceline.strategies import weights
from paceline.strategies.weights import Piece

# Shape, type, and the dimension it is divided along; None: one rank has it.
TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype, int | None]] = {
    "rows": ((7, 30), torch.float32, 0),
    "columns": ((5, 11), torch.float32, 1),
    "conv.in": ((6, 9, 3, 3), torch.float64, 1),
    "conv.out": ((9, 4, 3, 3), torch.float32, 0),
    "deep": ((3, 4, 5, 2), torch.float16, 2),
    "long": ((4000,), torch.float32, 0),
    "few": ((2, 3), torch.float32, 0),
    "one rank's": ((40, 5), torch.bfloat16, None),
    "number": ((), torch.int64, None),
    "flags": ((13,), torch.bool, 0),
    "thin": ((4, 2), torch.float32, 1),
    "nothing": ((0, 4), torch.float32, 1),
    "größe": ((3, 2), torch.complex64, None),
}


def start(path: Any, model: nn.Module, wanted: list[str]) -> Any:
    return weights.start_values(path, model.state_dict(), weights.head_of(model), wanted)


def whole_model() -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(1)  # ranks that are threads share torch's
    return {name: (torch.rand(shape, generator=own) * 100).to(dtype) for name, (shape, dtype, _) in TENSORS.items()}


def cut(ranks: int) -> dict[str, list[Piece]]:
    """Who has what, in no order; with more ranks than rows, some have nothing."""
    pieces = {}
    for number, (name, (shape, _, dim)) in enumerate(TENSORS.items()):
        size = shape[dim or 0] if shape else 1
        shares = [share(size, ranks, rank) for rank in range(ranks)]
        pieces[name] = [Piece(rank, dim, part.start, part.stop) for rank, part in enumerate(shares)][::-1] \
            if dim is not None else [Piece((number + 1) % ranks, 0, 0, size)]  # fmt: skip
    return pieces


def own_part(tensor: Tensor, piece: Piece) -> Tensor:
    part = tensor.narrow(piece.dim, piece.start, piece.stop - piece.start) if tensor.dim() else tensor
    return part.contiguous(memory_format=torch.channels_last) if part.dim() == 4 else part


class Noting(MeteredComm):
    """Notes the sizes of messages, and how often ranks meet."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.sizes: list[int] = []
        self.meetings = 0

    def barrier(self) -> None:
        self.meetings += 1
        super().barrier()

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        self.sizes.append(tensor.nbytes)
        return super().isend(tensor, to, tag)


def saves(comm: Comm, path: str) -> tuple[list[int], int]:
    """Save this rank's part; the sizes of the messages it sent, and how often it met the others."""
    values, pieces, noting = whole_model(), cut(comm.size), Noting(comm)
    own = {name: own_part(values[name], piece) for name in pieces for piece in pieces[name] if piece.rank == comm.rank}
    blank = {name: torch.empty_like(tensor, device="meta") for name, tensor in values.items()}
    weights.save_parts(Path(path), blank, pieces, own, noting)
    assert Path(path).exists()
    return noting.sizes, noting.meetings


def check_file(folder: Path, name: str) -> None:
    assert [path.name for path in folder.iterdir()] == [name]
    assert int.from_bytes((folder / name).read_bytes()[:8], "little") % 8 == 0  # so that all numbers are aligned
    saved, values = load_file(folder / name), whole_model()
    assert set(saved) == set(values)
    for key, tensor in values.items():
        assert saved[key].dtype == tensor.dtype
        assert saved[key].shape == tensor.shape
        assert torch.equal(saved[key], tensor), key


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_parts_of_every_shape_and_type_become_one_file(tmp_path: Path, ranks: int) -> None:
    sent = [sizes for sizes, _ in ThreadWorld(ranks).run(saves, path=str(tmp_path / "m.safetensors"))]
    check_file(tmp_path, "m.safetensors")
    away = sum(
        (piece.stop - piece.start) * values.nbytes // max(1, values.shape[piece.dim] if values.dim() else 1)
        for name, values in whole_model().items() for piece in cut(ranks)[name] if piece.rank
    )  # fmt: skip
    assert sum(map(sum, sent)) == away  # each byte once, and rank 0's own not at all
    assert sent[0] == []
    assert all(map(all, sent))


@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_real_processes_write_the_same_file(worlds: Worlds, tmp_path: Path, transport: str) -> None:
    worlds.get(transport, 2).run(saves, path=str(tmp_path / "m.safetensors"))
    check_file(tmp_path, "m.safetensors")


@pytest.mark.parametrize("most", [40, 100, 1000])
def test_no_message_is_larger_than_allowed_not_even_of_a_long_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(weights, "MESSAGE", most)
    ranks = ThreadWorld(3).run(saves, path=str(tmp_path / "m.safetensors"))
    check_file(tmp_path, "m.safetensors")
    assert most / 4 < max(max(sizes) for sizes, _ in ranks[1:]) <= most


def test_a_rank_whose_turn_comes_late_meets_the_others_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MESSAGE", 1000)
    ranks = ThreadWorld(3).run(saves, path=str(tmp_path / "m.safetensors"))
    total = sum(tensor.nbytes for tensor in whole_model().values())
    assert len({meetings for _, meetings in ranks}) == 1
    assert total // 2000 < ranks[0][1] <= total // 1000


def fails_half_way(comm: Comm, path: str) -> str:
    try:
        saves(comm, path)
    except Exception as error:  # noqa: BLE001  its type is what is asked for
        comm.abort("it failed")
        return type(error).__name__
    return "none"


@pytest.mark.parametrize("old", [None, b"the old weights"])
def test_what_ends_half_way_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bytes | None
) -> None:
    path = tmp_path / "m.safetensors"
    if old is not None:
        path.write_bytes(old)
    gather: Callable[..., None] = weights._gather

    def full(span: Any, *rest: Any) -> None:
        if span.name == "rows":
            raise OSError("no space left")
        gather(span, *rest)

    monkeypatch.setattr(weights, "_gather", full)
    assert ThreadWorld(2).run(fails_half_way, path=str(path)) == ["OSError", "CommError"]
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == ([(path.name, old)] if old is not None else [])


def test_pieces_that_do_not_make_up_a_tensor_are_found_out(tmp_path: Path) -> None:
    blank = {"x": torch.empty(4, 2, device="meta")}
    own = {"x": torch.zeros(3, 2)}
    for piece in (Piece(0, 0, 0, 3), Piece(0, 0, 1, 4), Piece(0, 0, 0, 4)):
        with pytest.raises(AssertionError, match="x: "):
            weights.save_parts(tmp_path / "m.safetensors", blank, {"x": [piece]}, own, SingleComm())
    assert list(tmp_path.iterdir()) == []


# Two ranks that are threads write 120 MB. Their tensors take no memory: all rows of one are the same row.
MEMORY = """
import sys
import threading
from pathlib import Path
import torch
from paceline.comm.threads import thread_world
from paceline.layout import peak_rss_bytes
from paceline.strategies.weights import Piece, save_parts

size = (15_000, 1000)
whole = {name: torch.empty(size, device="meta") for name in ("rows", "columns")}
pieces = {"rows": [Piece(1, 0, 0, 15_000)], "columns": [Piece(0, 1, 0, 400), Piece(1, 1, 400, 1000)]}
row = torch.arange(1000.0)
own = [
    {"columns": row[:400].expand(15_000, 400)},
    {"rows": row.expand(size), "columns": row[400:].expand(15_000, 600)},
]
comms = thread_world(2, 30)
ranks = [threading.Thread(target=save_parts, args=(Path(sys.argv[1]), whole, pieces, own[r], comms[r])) for r in (0, 1)]
before = peak_rss_bytes()
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
print(peak_rss_bytes() - before)
"""


def test_rank_0_has_little_of_the_others_parts_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    ended = subprocess.run([sys.executable, "-c", MEMORY, path], check=True, stdout=subprocess.PIPE, text=True)
    assert path.stat().st_size > 120_000_000
    with safe_open(path, "pt") as file:
        for name in ("rows", "columns"):
            assert torch.equal(file.get_slice(name)[14_999:], torch.arange(1000.0)[None])
    assert int(ended.stdout) < 3 * weights.MESSAGE  # the receiver's, and the sender's, which is here as well


SHAPE = (1, 16, 16)


def blank_model(classes: int = 10) -> nn.Module:
    with torch.device("meta"):
        return build("shallow-cnn", SHAPE, classes)


@pytest.fixture
def file(tmp_path: Path) -> tuple[str, dict[str, Tensor]]:
    torch.manual_seed(0)
    state = build("shallow-cnn", SHAPE, 10).state_dict()
    file_format.save(state, tmp_path / "m.safetensors")
    return str(tmp_path / "m.safetensors"), state


def test_a_rank_reads_its_own_parts_of_a_file_which_is_then_not_needed(file: tuple[str, dict[str, Tensor]]) -> None:
    path, state = file
    wanted = ["conv2.weight", "dense1.bias"]
    values, fresh = start(path, blank_model(), wanted)
    got = dict(values)
    Path(path).write_bytes(b"")
    assert fresh == []
    assert list(got) == wanted
    assert all(torch.equal(value, state[name]) for name, value in got.items())


def test_a_last_layer_for_other_classes_is_left_to_the_caller(file: tuple[str, dict[str, Tensor]]) -> None:
    path, _ = file
    values, fresh = start(path, blank_model(3), ["dense2.bias", "dense1.bias"])
    assert [name for name, _ in values] == ["dense1.bias"]
    assert sorted(fresh) == ["dense2.bias", "dense2.weight"]


def test_a_file_of_another_model_is_refused_before_anything_is_read(file: tuple[str, dict[str, Tensor]]) -> None:
    path, state = file
    file_format.save({name: value for name, value in state.items() if name != "conv1.bias"}, Path(path))
    with pytest.raises(UsageError, match=r"is the file of another model: conv1\.bias: not in the file"):
        start(path, blank_model(), ["dense1.bias"])
    with pytest.raises(UsageError, match="nowhere cannot be read as safetensors"):
        start("nowhere", blank_model(), ["dense1.bias"])
