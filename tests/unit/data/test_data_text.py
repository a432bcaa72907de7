"""Texts and tokens: samples are blocks of one row of tokens, and their targets are the tokens one later."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.comm.base import Comm
from paceline.comm.single import SingleComm
from paceline.comm.threads import thread_world
from paceline.data import mini, text
from paceline.data.batch import form_of
from paceline.data.course import Course
from paceline.data.input import Input, OwnInput, ScatteredInput
from paceline.data.load import Dataset, load
from paceline.data.mapped import open_bytes, views
from paceline.data.origins import SHAKESPEARE
from paceline.data.prepare import prepare
from paceline.data.table import Text, describe, in_file, kind_of
from paceline.data.transforms import Prepare
from paceline.errors import AgreedError, DataError, UsageError
from paceline.training.setup import _agree_on_data

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """1,000 bytes, all different from their neighbours."""
    path = tmp_path / "plain.txt"
    path.write_bytes(bytes(65 + i * i % 26 for i in range(1000)))
    return path


def tokens_in(path: Path, values: list[int], dtype: str = "uint16") -> Path:
    np.array(values, np.dtype(dtype).newbyteorder("<")).tofile(path)
    return path


def test_a_sample_is_a_block_and_its_targets_are_one_token_later(plain: Path) -> None:
    content = np.frombuffer(plain.read_bytes(), np.uint8)
    data = load(f"text:{plain},block=16")
    for split, part in ((data.train, content[:900]), (data.test, content[900:])):
        assert len(split) == (len(part) - 1) // 16
        for number in range(len(split)):
            inputs, targets = split.take(torch.tensor([number]))
            assert inputs.tolist() == [part[16 * number : 16 * number + 16].tolist()]
            assert targets.tolist() == [part[16 * number + 1 : 16 * number + 17].tolist()]
    info = data.info
    assert (info.kind, info.shape, info.target_shape, info.classes) == ("tokens", (16,), (16,), 256)
    assert (info.train, info.test, info.input_dtype, info.target_dtype) == (56, 6, "int64", "int64")
    assert info.mean is None
    assert not info.normalize


def test_no_token_is_the_target_of_two_samples(plain: Path) -> None:
    tokens_in(plain, list(range(1000)))
    data = load(f"tokens:{plain},block=7")
    targets = torch.cat([data.train.targets.long().flatten(), data.test.targets.long().flatten()])
    assert len(targets.unique()) == len(targets)
    assert not set(data.train.inputs.flatten().tolist()) & set(data.test.inputs.flatten().tolist())


def test_a_file_is_mapped_and_not_read(plain: Path) -> None:
    """Inputs and targets share the memory of the file."""
    _, arrays, _ = text.read(f"text:{plain},block=16", Text("text", plain, 16))
    assert all(isinstance(array, np.memmap) for array in arrays)
    assert arrays[1].ctypes.data == arrays[0].ctypes.data + 1


@pytest.mark.parametrize("name", ["text:{},block=9", "tokens:{},block=9,dtype=uint16", "tokens:{},block=5,dtype=int32"])
def test_the_positions_in_the_file_are_those_of_the_samples(name: str, plain: Path) -> None:
    """MPI-IO reads there."""
    if name.startswith("tokens"):
        tokens_in(plain, list(range(1000)), name.rpartition("=")[2])
    data = load(name.format(plain))
    assert in_file(name.format(plain))
    for split in (data.train, data.test):
        assert split.where is not None
        inputs, targets = views(open_bytes(plain), split.where)
        assert inputs.tolist() == split.inputs.tolist()
        assert targets.tolist() == split.targets.tolist()


def test_what_is_not_in_a_file_as_tokens_cannot_be_read_with_mpi_io(plain: Path) -> None:
    for name in ("shakespeare", "shakespeare:block=8", f"text:{plain},level=characters,block=8"):
        assert not in_file(name)
        assert load(name).train.where is None


@pytest.mark.parametrize(("part", "cut"), [("0.1", 900), (".5", 500), ("0.25", 750)])
def test_the_last_part_is_for_testing(part: str, cut: int, plain: Path) -> None:
    data = load(f"text:{plain},block=10,test={part}")
    content = plain.read_bytes()
    assert bytes(data.test.inputs[0].tolist()) == content[cut : cut + 10]
    assert bytes(data.train.targets[-1].tolist()) in content[:cut]
    assert len(data.test) == (1000 - cut - 1) // 10


def test_characters_are_numbered_in_sorted_order(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    content = "naïve café 🙂 zebra\r\n" * 20
    path.write_bytes(content.encode())
    data = load(f"text:{path},level=characters,block=8")
    letters = sorted(set(content))
    assert data.info.classes == len(letters) == 15
    assert "".join(letters[i] for i in data.train.inputs.flatten().tolist()) == content[: 8 * len(data.train)]
    assert data.train.inputs.dtype == torch.uint8


def test_many_characters_take_two_bytes_each(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(map(chr, range(0x4E00, 0x4E00 + 700))), "utf-8")
    data = load(f"text:{path},level=characters,block=8")
    assert (data.info.classes, data.train.inputs.dtype) == (700, torch.uint16)
    assert data.test.inputs.flatten().tolist() == list(range(630, 630 + 8 * len(data.test)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_every_dtype(dtype: str, tmp_path: Path) -> None:
    values = [i % 120 for i in range(500)]
    path = tokens_in(tmp_path / "a.bin", values, dtype)
    data = load(f"tokens:{path},block=10,dtype={dtype}")
    assert data.train.inputs.flatten().tolist() == values[: 10 * len(data.train)]
    assert data.info.classes == 120
    assert load(f"tokens:{path},block=10,dtype={dtype},vocabulary=4000").info.classes == 4000
    ready = Prepare(torch.float64, torch.device("cpu"))
    batch = OwnInput(data, 0, 0, SingleComm(), ready).pick("train", torch.tensor([3, 1]))
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.targets[0].tolist() == values[31:41]


def test_the_default_dtype_is_that_of_nanogpt(tmp_path: Path) -> None:
    path = tokens_in(tmp_path / "train.bin", list(range(50_000, 50_257)) * 3)
    assert load(f"tokens:{path},block=16").info.classes == 50_257


def own(data: Dataset, comm: Comm) -> Input:
    return OwnInput(data, 10, 0, comm, Prepare(torch.float32, torch.device("cpu")))


def scattered(data: Dataset, comm: Comm) -> Input:
    form = form_of(data.train.inputs), form_of(data.train.targets)
    ready = Prepare(torch.float32, torch.device("cpu"))
    return ScatteredInput(data if comm.rank == 0 else None, data.info, form, 10, 0, comm, ready)


@pytest.mark.parametrize("make", [own, scattered])
def test_ranks_together_see_what_one_sees(make: Callable[[Dataset, Comm], Input], tmp_path: Path) -> None:
    data = load(f"tokens:{tokens_in(tmp_path / 'a.bin', list(range(1000)))},block=8")
    course = Course(data.info.train - 10, 12)
    alone = list(own(data, SingleComm()).epoch(course, 0, range(course.per_epoch)))

    def rank(comm: Comm) -> list[tuple[torch.Tensor, torch.Tensor]]:
        source = make(data, comm)
        batches = [*source.epoch(course, 0, range(course.per_epoch)), *source.evaluation("validation")[1]]
        return [(batch.inputs, batch.targets) for batch in batches]

    with ThreadPoolExecutor(3) as pool:
        ranks = list(pool.map(rank, thread_world(3, 10.0)))
    for step, whole in enumerate(alone):
        assert torch.equal(torch.cat([parts[step][0] for parts in ranks]), whole.inputs)
        assert torch.equal(torch.cat([parts[step][1] for parts in ranks]), whole.targets)
        assert torch.equal(whole.targets, whole.inputs + 1)
        assert whole.inputs.dtype == torch.int64
    assert sum(len(parts[-1][0]) for parts in ranks) == 10


def test_the_kind_of_a_data_set_is_known_from_its_name_if_it_can_be() -> None:
    kinds = {
        "tokens": ("shakespeare", "shakespeare:block=8", "text:nowhere.txt", "tokens:nowhere.bin,block=3"),
        "images": ("mnist", "synthetic:3x8x8", "images:nowhere"),
        "arrays": ("arrays:nowhere.npz", "mine:load"),  # possibly images
    }
    for kind, names in kinds.items():
        assert {kind_of(name) for name in names} == {kind}


# The text in the package.


def test_the_text_in_the_package_is_shakespeares() -> None:
    data = load("shakespeare")
    assert data.info == describe("shakespeare")
    assert (len(data.train), len(data.test)) == (data.info.train, data.info.test) == (9771, 1085)
    content = mini.read(SHAKESPEARE).decode("ascii")
    assert len(content) > 1_000_000
    assert content.count("by William Shakespeare") == 10
    assert "To be, or not to be,--that is the question:--" in content
    assert "Gutenberg" not in content
    start = bytes(data.train.inputs[0].tolist()).decode()
    assert content.startswith(start)


def test_the_text_in_the_package_has_parameters() -> None:
    data = load("shakespeare:block=64,level=characters,test=0.2")
    assert data.info == describe("shakespeare:block=64,level=characters,test=0.2")
    assert (data.info.shape, data.info.classes) == ((64,), 73)
    assert data.train.inputs.max() == 72
    assert 4 * len(data.test) == pytest.approx(len(data.train), rel=0.001)


# What is refused.


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("text:a.txt,block=0", "block=0"),
        ("text:a.txt,block=-3", "block=-3"),
        ("text:a.txt,block=1e3", "block=1e3"),
        ("text:a.txt,block=", "block="),
        ("text:a.txt,block=9999999999", "block=9999999999"),
        ("text:a.txt,block=8,block=9", "block=9"),
        ("text:a.txt,level=words", "level=words"),
        ("text:a.txt,test=0", "test=0"),
        ("text:a.txt,test=0.0", "test=0.0"),
        ("text:a.txt,test=1", "test=1"),
        ("text:a.txt,test=1.5", "test=1.5"),
        ("text:a.txt,test=nan", "test=nan"),
        ("text:a.txt,dtype=uint16", "dtype=uint16"),
        ("text:a.txt,=3", "=3"),
        ("tokens:a.bin,level=bytes", "level=bytes"),
        ("tokens:a.bin,dtype=float32", "dtype=float32"),
        ("tokens:a.bin,vocabulary=0", "vocabulary=0"),
        ("shakespeare:vocabulary=3", "vocabulary=3"),
        ("shakespeare:a.txt", "a.txt"),
        ("shakespeare:block=8,", ""),
    ],
)
def test_wrong_parameters_are_refused_with_those_that_are_allowed(name: str, part: str) -> None:
    own = {"tokens": "dtype=uint8, uint16, uint32, int32, int64; vocabulary=N"}
    allowed = own.get(name.partition(":")[0], "level=bytes or characters")
    with pytest.raises(UsageError) as error:
        describe(name)
    assert str(error.value) == (
        f"cannot read {part!r} in the data set {name!r}: allowed are block=N; {allowed}; test=PART, a number between 0 "
        f"and 1; each at most once"
    )


def test_the_name_of_a_file_may_have_commas_and_equals_signs(tmp_path: Path) -> None:
    for name in ("a,b.txt", "a=b.txt", "x=1,y=2/c.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"text" * 500)
        assert load(f"text:{path},block=8").info.shape == (8,)
        assert load(f"text:{path}").info.shape == (128,)


def refused(name: str) -> str:
    """What is wrong with a data set, before a process starts."""
    with pytest.raises(DataError) as error:
        prepare(name)
    return str(error.value)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    for kind in ("text", "tokens"):
        assert refused(f"{kind}:{tmp_path}/a") == f"{tmp_path}/a is empty (0 bytes)"


@pytest.mark.parametrize("size", [1, 2, 255, 1284])
def test_a_text_that_is_too_short_is_refused(size: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * size)
    message = refused(f"text:{tmp_path}/a")
    assert "at least 129 of each are needed for block=128: use a smaller block or a longer text" in message
    assert f"has {size - round(size / 10)} tokens for training and {round(size / 10)} for testing" in message


def test_the_shortest_text_has_one_sample_of_each(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abcd")
    info = load(f"text:{tmp_path}/a,block=1,test=.5").info
    assert (info.train, info.test) == (1, 1)
    with pytest.raises(DataError, match="use a smaller block"):
        describe("shakespeare:block=999999")


def test_bytes_that_are_not_utf_8_are_refused_with_their_position(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("é".encode() * 50 + b"\xff" + b"x" * 900)
    message = refused(f"text:{tmp_path}/a,level=characters,block=8")
    assert message.startswith(f"{tmp_path}/a is not UTF-8: it has the byte 0xff at position 100 (invalid start byte); ")
    assert "level=bytes" in message
    assert load(f"text:{tmp_path}/a,block=8").info.classes == 256


def test_tokens_outside_the_vocabulary_are_refused_with_position_and_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_PIECE", 300)  # the position is that in the file, in any piece
    values = [i % 100 for i in range(1000)]
    values[777] = 500
    path = tokens_in(tmp_path / "a", values)
    message = refused(f"tokens:{path},block=8,vocabulary=100")
    assert message.startswith(f"{path} has the token 500 at position 777, but tokens must be from 0 to 99: ")
    assert load(f"tokens:{path},block=8,vocabulary=501").info.classes == 501
    values[333] = -1
    path = tokens_in(tmp_path / "a", values, "int32")
    for given in ("", ",vocabulary=1000"):
        message = refused(f"tokens:{path},block=8,dtype=int32{given}")
        assert "has the token -1 at position 333" in message
    path = tokens_in(tmp_path / "a", [0] * 40 + [2**40] * 10, "int64")
    assert f"has the token {2**40} at position 40, but" in refused(f"tokens:{path},block=1,dtype=int64")


def test_a_file_that_ends_within_a_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1001)
    message = refused(f"tokens:{tmp_path}/a,block=8")
    assert "has 1001 bytes, which is not a multiple of the 2 bytes of uint16" in message


def test_ranks_with_different_texts_are_refused(tmp_path: Path) -> None:
    """The text has the same name and size on both machines, and differs in one byte of the test part."""
    names = []
    for rank in range(2):
        path = tmp_path / f"{rank}"
        path.write_bytes(b"to be " * 200 + (b"or" if rank else b"OR") + b" not" * 5)
        names.append(f"text:{path},block=8")
    both = [load(name) for name in names]

    def agree(comm: Comm, data: list[Dataset]) -> str:
        try:
            return _agree_on_data("text:mine,block=8", data[comm.rank], comm)[0].kind
        except AgreedError as error:
            return str(error)

    for data, expected in ((both, "rank 1 has different data than rank 0"), ([both[0]] * 2, "tokens")):
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda comm, data=data: agree(comm, data), thread_world(2, 10.0)))
        assert all(answer.startswith(expected) for answer in answers)
