"""The idx format: what is read, and that nothing damaged is."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_origin import idx_bytes, origin_of, tiny_content, whole, write

from paceline.data import idx
from paceline.data.mapped import Records
from paceline.data.origins import NAMES
from paceline.errors import DataError

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3)


def decode(content: bytes, dims: int) -> np.ndarray:
    return idx.decode(np.frombuffer(content, np.uint8), "some-file", dims)


@given(SHAPES)
def test_what_was_written_is_read(shape: list[int]) -> None:
    array = decode(content := idx_bytes(*shape), len(shape))
    assert array.shape == tuple(shape)
    assert content.endswith(array.tobytes())


@given(SHAPES, st.data())
def test_a_file_cut_anywhere_is_refused_by_name(shape: list[int], data: st.DataObject) -> None:
    content = idx_bytes(*shape)
    cut = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(DataError, match="some-file"):
        decode(content[:cut], len(shape))


@given(SHAPES, st.data())
def test_a_changed_header_is_refused_by_name(shape: list[int], data: st.DataObject) -> None:
    content = bytearray(idx_bytes(*shape))
    where = data.draw(st.integers(0, 3 + 4 * len(shape)))
    content[where] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DataError, match="some-file"):
        decode(bytes(content), len(shape))


@given(SHAPES, st.binary(min_size=1, max_size=9))
def test_a_longer_file_is_refused_by_name(shape: list[int], more: bytes) -> None:
    with pytest.raises(DataError, match="some-file"):
        decode(idx_bytes(*shape) + more, len(shape))


def test_an_error_says_what_was_expected_and_found() -> None:
    with pytest.raises(DataError, match=r"3 dimension.*begin with 00 00 08 03, but begins with 00 00 08 01"):
        decode(idx_bytes(5), 3)
    with pytest.raises(DataError, match=r"header should have 16 bytes, but has 9"):
        decode(idx_bytes(2, 3, 4)[:9], 3)
    with pytest.raises(DataError, match=r"says 2 × 3 × 4, which is 40 bytes with the header, but it has 39"):
        decode(idx_bytes(2, 3, 4)[:-1], 3)


def test_a_header_of_no_items_is_refused() -> None:
    with pytest.raises(DataError, match="says 0 × 28 × 28"):
        decode(idx_bytes(0, 28, 28), 3)


def test_records_say_where_everything_is(tmp_path: Path) -> None:
    content = tiny_content()
    origin = origin_of(content)
    path = write(tmp_path, {"tiny.bin": whole(content)}) / "tiny.bin"
    sizes = [len(data) for data in content.values()]
    assert idx.records(path, origin) == [
        Records(path, 16, 784, 20, (1, 28, 28), "uint8"),
        Records(path, sizes[0] + 8, 1, 20, (), "uint8"),
        Records(path, sum(sizes[:2]) + 16, 784, 10, (1, 28, 28), "uint8"),
        Records(path, sum(sizes[:3]) + 8, 1, 10, (), "uint8"),
    ]


def test_a_part_with_a_wrong_header_is_refused_by_name(tmp_path: Path) -> None:
    content = tiny_content()
    damaged = content | {NAMES[2]: b"\1" + content[NAMES[2]][1:]}
    path = write(tmp_path, {"tiny.bin": whole(damaged)}) / "tiny.bin"
    with pytest.raises(DataError, match=rf"tiny.bin, its {NAMES[2]} is not an idx file.*begins with 01 00 08 03"):
        idx.records(path, origin_of(content))
