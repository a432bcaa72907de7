"""CIFAR-10's Python batches: read without running any of what a pickle may ask for."""

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_cifar import batches, python2, python3, records

from paceline.data.python_batches import read
from paceline.data.sources import SourceError

BATCH = batches()["data_batch_1.bin"]
ROWS = records(BATCH)


def test_the_batch_made_by_hand_is_one_that_python_reads() -> None:
    """So that the tests stand on what Python 2 wrote and not on what this reader likes."""
    batch = pickle.loads(python2(BATCH), encoding="bytes")
    assert np.array_equal(batch[b"data"], ROWS[:, 1:])
    assert batch[b"labels"] == ROWS[:, 0].tolist()
    assert len(batch[b"filenames"]) == 4


@pytest.mark.parametrize("form", [python2, python3])
def test_the_data_and_labels_are_read(form: Any) -> None:
    data, labels = read(form(BATCH), "some-file")
    assert np.array_equal(data, ROWS[:, 1:])
    assert data.dtype == np.uint8
    assert labels == ROWS[:, 0].tolist()


class Call:
    """Pickled, it is a call of a function with arguments."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "call",
    [
        lambda path: Call(os.system, f"touch {path}"),
        lambda path: Call(open, str(path), "w"),
        lambda path: Call(eval, f"open({str(path)!r}, 'w')"),
        lambda path: Call(Path.touch, path),
        lambda path: Call(np.memmap, str(path), "u1", "w+", 0, (10,)),
        lambda path: Call(np.ndarray.tofile, np.zeros(3, np.uint8), str(path)),
    ],
)
def test_nothing_is_run(tmp_path: Path, protocol: int, call: Any) -> None:
    path = tmp_path / "trace"
    content = pickle.dumps({b"data": call(path), b"labels": [1]}, protocol)
    with pytest.raises(SourceError, match=r"some-file is not a Python batch of CIFAR-10: it (names|has the opcode)"):
        read(content, "some-file")
    assert not path.exists()


def test_the_same_pickle_does_harm_where_pickles_are_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps({b"data": Call(os.system, f"touch {tmp_path}/trace")}, 2))
    assert (tmp_path / "trace").exists()


def test_a_refused_function_is_named() -> None:
    with pytest.raises(SourceError, match=r"it names 'posix.system', which these files do not use; not run"):
        read(b"\x80\x02cposix\nsystem\nU\x05touch\x85R.", "some-file")
    with pytest.raises(SourceError, match=r"it names 'numpy.memmap'"):
        read(b"\x80\x02cnumpy\nmemmap\n.", "some-file")
    with pytest.raises(SourceError, match="it has the opcode STACK_GLOBAL, which these files do not use"):
        read(b"\x80\x04X\x05\0\0\0posixX\x06\0\0\0system\x93.", "some-file")
    with pytest.raises(SourceError, match="it has the opcode INST"):
        read(b"(iposix\nsystem\n.", "some-file")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "damaged, or not a pickle"),
        (b"no pickle at all", "damaged, or not a pickle|opcode"),
        (pickle.dumps([1, 2], 2), "it has a list instead of a dictionary"),
        (pickle.dumps({b"labels": [1]}, 2), "opcode APPEND"),
        (pickle.dumps({b"labels": [1, 2], b"x": 1}, 2), "its dictionary has no 'data'"),
        (pickle.dumps({b"data": np.zeros((2, 2), np.uint8), b"x": 1}, 2), "its dictionary has no 'labels'"),
        (pickle.dumps({b"data": b"text", b"labels": [1, 2]}, 2), "its 'data' is not a numpy array"),
        (
            pickle.dumps({b"data": np.zeros((2, 2)), b"labels": [1, 2]}, 2),
            "it makes a type of .'f8'.*only arrays of uint8",
        ),
        (pickle.dumps({b"data": np.zeros((2, 2), ">u2"), b"labels": [1, 2]}, 2), "it makes a type of .'u2'"),
        (pickle.dumps({b"data": np.zeros((2, 2), object), b"labels": [1, 2]}, 2), "it makes a type of .'O8'"),
        (pickle.dumps({b"data": np.zeros(4, np.uint8), b"labels": [1, 2]}, 2), "not one of two dimensions"),
        (pickle.dumps({b"data": np.zeros((2, 3), np.uint8, "F"), b"labels": [1, 2]}, 2), "not one of two dimensions"),
        (pickle.dumps({1: 2, 3: 4}, 2), "keys that are not strings"),
        (b"\x80\x02h\x07.", "damaged"),  # a memo that nobody made
        (b"\x80\x02e.", "damaged"),  # no mark
        (b"\x80\x02K\x01\x87.", "takes more from its stack than there is"),
        (b"\x80\x02.", "damaged"),
        (b"S'\\d'\n.", "opcode STRING"),
        (b"\x80\x02K\x01(K\x02e.", "appends to what is not a list"),
        (b"\x80\x02cnumpy\ndtype\n)\x85R.", "opcode EMPTY_TUPLE"),
        (b"\x80\x02T\xff\xff\xff\x7fabc", "damaged"),
        (b"\x80\x02T\xff\xff\xff\xffabc", "damaged"),
        (b"\x80\x02K\x01r\xff\xff\xff\xff.", "it has a int"),  # a memo of 4 billion entries is not made
    ],
)
def test_any_other_pickle_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(SourceError, match=f"some-file is .*({reason})"):
        read(content, "some-file")


def test_a_deep_or_endless_structure_is_refused() -> None:
    deep = b"K\x00" + b"\x85" * 200_000
    for content in (
        b"\x80\x02}(" + deep + b"K\x01u.",  # as a key, which would be hashed
        b"\x80\x02cnumpy\ndtype\n" + deep + b"R.",  # as an argument, which would be printed
        b"\x80\x02cnumpy\ndtype\nK\x00" + b"q\x00h\x00\x86" * 40 + b"R.",  # the same, of 2^40 parts
        b"\x80\x02]q\x00(h\x00h\x00e.",  # a list of itself
    ):
        with pytest.raises(SourceError, match="some-file"):
            read(content, "some-file")


def test_a_shape_that_does_not_fit_the_data_is_refused() -> None:
    content = python2(BATCH).replace(b"M\x04\x00M", b"M\x05\x00M")
    with pytest.raises(SourceError, match=r"some-file is damaged.*reshape"):
        read(content, "some-file")
    huge = python2(BATCH).replace(b"M\x04\x00M\x00\x0c", b"J" + struct.pack("<i", 2**31 - 1) + b"M\xff\xff")
    with pytest.raises(SourceError, match=r"some-file is damaged"):
        read(huge, "some-file")


@given(st.integers(0, len(python2(BATCH)) - 1))
def test_a_batch_cut_anywhere_is_refused_by_name(cut: int) -> None:
    with pytest.raises(SourceError, match="some-file"):
        read(python2(BATCH)[:cut], "some-file")


HEAD = python2(BATCH).index(ROWS[:, 1:].tobytes())


@settings(max_examples=300)
@given(st.integers(0, HEAD - 1), st.integers(1, 255))
def test_a_changed_byte_gives_a_batch_or_a_refusal_and_nothing_else(where: int, flip: int) -> None:
    content = bytearray(python2(BATCH))
    content[where] ^= flip
    try:
        data, _ = read(bytes(content), "some-file")
    except SourceError as why:
        assert "some-file" in str(why)  # noqa: PT017
    else:
        assert data.dtype == np.uint8
