"""A user's own arrays, from a file and from a function: what is read, and an error for each thing that is wrong."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.data import arrays
from paceline.data.load import Dataset, load
from paceline.data.prepare import prepare
from paceline.errors import DataError, UsageError
from paceline.spec import RunSpec
from paceline.strategies.setup import example

Arrays = dict[str, Any]  # of numpy arrays
MODULE = "own_arrays_of_the_test"


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of the user's in the working folder, whose function `make` gives what the test has put into GIVEN."""
    path = tmp_path / f"{MODULE}.py"
    path.write_text("GIVEN = None\ndef make():\n    return GIVEN\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    sys.modules.pop(MODULE, None)


def good(dtype: Any = np.uint8, inner: tuple[int, ...] = (5, 6)) -> Arrays:
    rng = np.random.default_rng(3)
    made: Arrays = {}
    for part, count in (("train", 9), ("test", 4)):
        values = rng.integers(0, 256, (count, *inner)).astype(dtype)
        made |= {f"x_{part}": values, f"y_{part}": np.arange(count) % 3}
    return made


def saved(tmp_path: Path, given: Arrays) -> str:
    np.savez(tmp_path / "own.npz", **given)
    return f"arrays:{tmp_path}/own.npz"


def returned(given: Any) -> str:
    __import__(MODULE)
    sys.modules[MODULE].GIVEN = given  # type: ignore[attr-defined]
    return f"{MODULE}:make"


def both(tmp_path: Path, given: Arrays) -> list[Dataset]:
    """The arrays by way of a file and by way of a function."""
    pairs = ((given["x_train"], given["y_train"]), (given["x_test"], given["y_test"]))
    return [load(saved(tmp_path, given)), load(returned(pairs))]


def check_refused(tmp_path: Path, given: Arrays, reason: str) -> None:
    """By both ways, with nothing left behind."""
    with pytest.raises(DataError, match=reason.replace("FROM", "own.npz")):
        prepare(saved(tmp_path, given))
    assert not list((tmp_path / "cache").rglob("*.*"))
    pairs = ((given["x_train"], given["y_train"]), (given["x_test"], given["y_test"]))
    with pytest.raises(DataError, match=reason.replace("FROM", f"{MODULE}:make")):
        load(returned(pairs))


LAYOUTS = [
    ((5, 6), (1, 5, 6), lambda x: x[:, None]),
    ((5, 6, 1), (1, 5, 6), lambda x: x.transpose(0, 3, 1, 2)),
    ((5, 6, 3), (3, 5, 6), lambda x: x.transpose(0, 3, 1, 2)),
    ((3, 5, 6), (3, 5, 6), lambda x: x),
    ((1, 5, 6), (1, 5, 6), lambda x: x),
    ((3, 5, 3), (3, 3, 5), lambda x: x.transpose(0, 3, 1, 2)),  # where both could be the channels, the last are
]


@pytest.mark.parametrize(("inner", "shape", "expected"), LAYOUTS)
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64, ">f4"])
def test_images_of_each_layout_and_type_are_read(
    tmp_path: Path, inner: tuple[int, ...], shape: tuple[int, ...], expected: Any, dtype: Any
) -> None:
    given = good(dtype, inner)
    for data in both(tmp_path, given):
        assert (data.info.shape, data.info.classes, data.info.train, data.info.test) == (shape, 3, 9, 4)
        assert data.info.normalize
        for split, part in ((data.train, "train"), (data.test, "test")):
            kept = np.uint8 if dtype is np.uint8 else np.float32
            assert split.inputs.numpy().dtype == kept
            assert np.array_equal(split.inputs.numpy(), expected(given[f"x_{part}"]).astype(kept))
            assert split.targets.tolist() == given[f"y_{part}"].tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_mean_and_deviation_are_of_the_training_images(tmp_path: Path, dtype: Any) -> None:
    given = good(dtype, (5, 6, 3))
    values = given["x_train"].astype(np.float64) / (255 if dtype is np.uint8 else 1)
    for data in both(tmp_path, given):
        assert data.info.mean == pytest.approx(values.mean((0, 1, 2)))
        assert data.info.std == pytest.approx(values.std((0, 1, 2)))


def test_the_names_of_medmnist_are_known_too(tmp_path: Path) -> None:
    given = good()
    named = {
        "train_images": given["x_train"],
        "train_labels": given["y_train"][:, None].astype(np.uint8),
        "val_images": given["x_test"],
        "val_labels": given["y_test"],
        "test_images": given["x_test"],
        "test_labels": given["y_test"][:, None].astype(np.uint8),
    }
    data = load(saved(tmp_path, named))
    assert np.array_equal(data.train.inputs[:, 0], given["x_train"])
    assert data.train.targets.tolist() == given["y_train"].tolist()


def test_a_compressed_file_and_one_in_fortran_s_order_are_read(tmp_path: Path) -> None:
    given = good(inner=(5, 6, 3))
    given["x_train"] = np.asfortranarray(given["x_train"])
    np.savez_compressed(tmp_path / "own.npz", **given)
    data = load(f"arrays:{tmp_path}/own.npz")
    assert np.array_equal(data.train.inputs, given["x_train"].transpose(0, 3, 1, 2))


def test_many_pieces_are_as_good_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "PIECE_BYTES", 70)  # two images
    given = good(inner=(5, 6))
    assert np.array_equal(load(saved(tmp_path, given)).train.inputs[:, 0], given["x_train"])
    bad = good(np.float32)
    bad["x_train"][6, 2, 3] = np.nan
    bad["x_train"][8] = np.inf
    with pytest.raises(DataError, match=r"x_train of .*own.npz has 31 value.*the first nan at \[6, 2, 3\]"):
        prepare(saved(tmp_path, bad))


def test_a_large_file_is_packed_in_little_memory(tmp_path: Path) -> None:
    """120 MB of images and a limit of 96 MB on what may be added."""
    np.savez(
        tmp_path / "own.npz",
        x_train=np.zeros((40_000, 3, 25, 40), np.uint8),
        y_train=np.arange(40_000) % 2,
        x_test=np.zeros((10, 3, 25, 40), np.uint8),
        y_test=np.zeros(10, int),
    )
    code = (
        "import resource, sys; from paceline.data import arrays, images; from paceline.data.prepare import prepare; "
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize(); "
        "resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20),) * 2); "
        "print(prepare(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"arrays:{tmp_path}/own.npz"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).stat().st_size > 120_000_000


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_counted_and_the_first_is_named(tmp_path: Path, value: float) -> None:
    for part in ("train", "test"):
        given = good(np.float32)
        given[f"x_{part}"][2, 1, 4] = value
        given[f"x_{part}"][3, 0, :2] = value
        check_refused(tmp_path, given, rf"x_{part} of .*FROM has 3 value.*not finite.*the first {value} at \[2, 1, 4\]")


def test_values_that_float32_cannot_hold_are_refused(tmp_path: Path) -> None:
    given = good(np.float64)
    given["x_train"][0, 0, 0] = 1e300
    check_refused(tmp_path, given, r"x_train of .*FROM has 1 value.*the first 1e\+300 at \[0, 0, 0\]")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"x_train": np.zeros((9, 30), np.uint8)},
            "x_train of .*FROM has samples of 30 uint8, but x_test of .*FROM of 5×6 uint8: they must be equal",
        ),
        ({"x_train": np.zeros((9, 2, 5, 6), np.uint8)}, r"shape \(9, 2, 5, 6\); images .* with 1 or 3 channels"),
        ({"x_train": np.zeros((0, 5, 6), np.uint8)}, r"x_train of .*FROM is empty: its shape is \(0, 5, 6\)"),
        ({"x_test": np.zeros((4, 5, 0), np.uint8)}, "x_test of .*FROM is empty"),
        (
            {"x_train": np.zeros((9, 5, 6), np.int64)},
            "x_train of .*FROM has samples of 5×6 int64, but x_test of .*FROM of 5×6 uint8: they must be equal",
        ),
        ({"x_train": np.zeros((9, 5, 6), bool)}, "x_train of .*FROM has samples of 5×6 bool, but x_test"),
        (
            {"x_train": np.zeros((9, 5, 6), complex)},
            "has values of type complex128; inputs must be integers",
        ),
        ({"x_train": np.zeros((9, 5, 6), np.longdouble)}, "has values of type float128; inputs must be .* of up to 64"),
        ({"x_train": np.zeros((9, 5, 6), "S3")}, r"has values of type \|S3; inputs must be integers, booleans, or"),
        ({"x_train": np.zeros((), np.uint8)}, r"x_train of .*FROM is empty: its shape is \(\)"),
        ({"x_train": np.zeros((9, 0), np.uint8)}, r"x_train of .*FROM is empty: its shape is \(9, 0\)"),
        (
            {"x_test": np.zeros((4, 5, 7), np.uint8)},
            "x_train of .* has images of 5×6 uint8, but x_test of .* of 5×7 uint8",
        ),
        (
            {"x_test": np.zeros((4, 5, 6), np.float32)},
            "of 5×6 uint8, but x_test of .* of 5×6 float32: they must be equal",
        ),
        ({"y_train": np.arange(8) % 3}, "y_train of .*FROM has 8 labels, but x_train of .* has 9 images"),
        ({"y_test": np.zeros(0, int)}, "y_test of .*FROM has 0 labels, but x_test of .* has 4 images"),
        ({"y_train": np.arange(9) % 3 / 1}, "y_train of .*FROM has samples of float64, but y_test of .* of int64"),
        ({"y_train": np.arange(9) % 2 == 1}, "y_train of .*FROM has values of type bool; targets must be integers"),
        ({"y_train": np.eye(9, dtype=int)}, r"y_train of .*FROM has the shape \(9, 9\); labels must have the shape"),
        ({"y_train": np.arange(9) % 3 - 1}, "y_train of .*FROM has the label -1; labels must be 0, 1, 2 …"),
        (
            {"y_train": np.array([0, 1, 2] * 2 + [0, 1, 4])},
            "has the label 4, but no sample of class 3: labels must be 0",
        ),
        ({"y_train": np.array([1, 2, 3] * 3)}, "has the label 3, but no sample of class 0"),
        ({"y_train": np.full(9, 2**64 - 1, np.uint64)}, "has the label 18446744073709551615; labels must be 0, 1, 2"),
        ({"y_train": np.zeros(9, int)}, "y_train of .*FROM has only the label 0; there must be 2 or more classes"),
        (
            {"y_test": np.array([0, 1, 2, 3])},
            "y_test of .*FROM has the label 3, but the largest label of y_train .* is 2",
        ),
        ({"y_test": np.array([0, 1, 2, -3])}, "y_test of .*FROM has the label -3"),
    ],
)
def test_wrong_arrays_are_refused_with_their_name_and_value(tmp_path: Path, change: Arrays, reason: str) -> None:
    check_refused(tmp_path, good() | change, reason)


# Other data than images with a class each.


def table(x_inner: tuple[int, ...], x_dtype: Any, y_inner: tuple[int, ...], y_dtype: Any) -> Arrays:
    rng = np.random.default_rng(3)
    made: Arrays = {}
    for part, count in (("train", 9), ("test", 4)):
        made[f"x_{part}"] = (rng.normal(0, 9, (count, *x_inner)) ** 2).astype(x_dtype)
        made[f"y_{part}"] = (rng.normal(0, 2, (count, *y_inner)) ** 2).astype(y_dtype)
    made["y_train"].flat[0] = max(made["y_train"].max(), made["y_test"].max())  # every class is in the training set
    return made


KINDS = [
    ((13,), np.float32, (), np.float32),
    ((13,), np.float64, (2, 3), np.float64),
    ((4, 5, 6), np.float16, (1,), np.float16),
    ((2, 7, 7), np.float32, (7, 7), np.int16),  # a class for each pixel
    ((3, 7, 7), np.uint8, (7, 7), np.int64),
    ((16,), np.uint16, (16,), np.int64),
    ((3, 8, 8), np.uint8, (), np.float32),
    ((5, 3, 8, 8), np.uint8, (2,), np.float32),
    ((), np.float32, (), ">f8"),
    ((6,), bool, (), np.float32),
    ((6,), ">i4", (), np.float32),
]


@pytest.mark.parametrize(("x_inner", "x_dtype", "y_inner", "y_dtype"), KINDS)
def test_inputs_and_targets_of_any_shape_and_type_are_read(
    tmp_path: Path, x_inner: tuple[int, ...], x_dtype: Any, y_inner: tuple[int, ...], y_dtype: Any
) -> None:
    given = table(x_inner, x_dtype, y_inner, y_dtype)
    kinds = {"f": "float32", "b": "bool"}
    for data in both(tmp_path, given):
        info = data.info
        assert (info.kind, info.shape, info.target_shape, info.train, info.test) == ("arrays", x_inner, y_inner, 9, 4)
        assert info.input_dtype == kinds.get(np.dtype(x_dtype).kind, "int64")
        assert info.target_dtype == kinds.get(np.dtype(y_dtype).kind, "int64")
        assert (info.mean, info.std, info.normalize) == (None, None, False)
        # Integers for integers are tokens for tokens: one vocabulary.
        tokens = info.input_dtype == info.target_dtype == "int64" and x_inner == y_inner != ()
        counted = ("y_train", "x_train", "x_test") if tokens else ("y_train",)
        wanted = 0 if info.target_dtype == "float32" else 1 + max(given[name].max() for name in counted)
        assert info.classes == wanted
        for split, part in ((data.train, "train"), (data.test, "test")):
            assert split.inputs.tolist() == given[f"x_{part}"].tolist()
            assert split.targets.tolist() == given[f"y_{part}"].tolist()
            assert split.inputs.numpy().dtype == np.dtype(x_dtype).newbyteorder("=")
            inputs, targets = split.take(torch.tensor([2, 1]))
            assert inputs.tolist() == given[f"x_{part}"][[2, 1]].tolist()
            assert targets.tolist() == given[f"y_{part}"][[2, 1]].tolist()
    inputs = example(RunSpec(), info, 3)
    assert (inputs.shape, str(inputs.dtype)) == ((3, *x_inner), f"torch.{info.input_dtype}")


def test_rows_with_class_numbers_are_checked_as_images_are(tmp_path: Path) -> None:
    given = good(np.float32, (13,))
    for data in both(tmp_path, given):
        assert (data.info.kind, data.info.shape, data.info.classes) == ("arrays", (13,), 3)
        assert data.train.targets.tolist() == given["y_train"].tolist()
    column = given | {"y_train": given["y_train"][:, None], "y_test": given["y_test"][:, None].astype(np.int8)}
    for data in both(tmp_path, column):
        assert data.test.targets.tolist() == given["y_test"].tolist()
    shutil.rmtree(tmp_path / "cache")
    check_refused(tmp_path, given | {"y_train": np.arange(9) % 2 * 2}, "no sample of class 1: .* of a regression are")
    check_refused(tmp_path, given | {"y_test": np.array([0, 1, 2, 3])}, "y_test of .* has the label 3, but the largest")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"y_test": np.zeros((4, 2))}, "y_train of .*FROM has samples of 3 float64, but y_test of .* of 2 float64"),
        ({"y_test": np.zeros((4, 3), np.float32)}, "has samples of 3 float64, but y_test of .* of 3 float32"),
        ({"x_test": np.zeros((4, 14))}, "x_train of .*FROM has samples of 13 float64, but x_test of .* of 14 float64"),
        (
            {"y_train": np.zeros((8, 3))},
            r"y_train of .*FROM has the shape \(8, 3\), but x_train of .* \(9, 13\): the",
        ),
        (
            {"y_train": np.full((9, 3), np.nan)},
            r"y_train of .*FROM has the value nan at \[0, 0\]; values must be fin",
        ),
        (
            {"x_test": np.full((4, 13), np.inf)},
            r"x_test of .*FROM has the value inf at \[0, 0\]; values must be fin",
        ),
        ({"y_train": np.zeros((9, 3), complex)}, "y_train .* complex128; targets must be integers, or floating-point"),
        (
            {"y_train": np.full((9, 3), -1), "y_test": np.zeros((4, 3), int)},
            r"y_train of .*FROM has the class -1; classes must be 0, 1, 2 … \(-100 is ignored\)",
        ),
        (
            {"y_train": np.ones((9, 3), int), "y_test": np.full((4, 3), 2)},
            "y_test of .*FROM has the label 2, but the largest label of y_train of .* is 1",
        ),
    ],
)
def test_wrong_numbers_are_refused_with_their_name_and_value(tmp_path: Path, change: Arrays, reason: str) -> None:
    check_refused(tmp_path, table((13,), np.float64, (3,), np.float64) | change, reason)


def test_the_target_that_is_ignored_is_allowed_in_sequences(tmp_path: Path) -> None:
    given = table((5,), np.int64, (5,), np.int64)
    given["y_train"][3, 2] = given["y_test"][0, 1] = -100
    for data in both(tmp_path, given):
        assert data.train.targets[3, 2] == data.test.targets[0, 1] == -100


def test_packed_numbers_can_be_read_with_mpi_io(tmp_path: Path) -> None:
    data = load(saved(tmp_path, table((5,), np.float16, (2,), np.float64)))
    assert data.train.where is not None
    for records, tensor in zip(data.train.where, (data.train.inputs, data.train.targets), strict=True):
        assert records.offset % tensor.itemsize == 0
        raw = records.path.read_bytes()
        start = records.offset + records.stride * 3
        assert raw[start : start + records.stride] == tensor[3].numpy().tobytes()


def several(count: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(count)
    inputs = {"ids": rng.integers(0, 50, (count, 6)), "extra": torch.from_numpy(rng.normal(size=(count, 2)))}
    return inputs, (rng.normal(size=count), rng.integers(0, 3, (count, 4)).astype(np.int32))


def test_a_function_may_return_several_inputs_and_targets() -> None:
    train, test = several(9), several(4)
    data = load(returned((train, test)))
    info = data.info
    assert (info.kind, info.shape, info.classes, info.train, info.test) == ("arrays", (6,), 0, 9, 4)
    assert info.inputs == {"ids": "int64 6", "extra": "float32 2"}
    inputs, targets = data.test.take(torch.tensor([3, 0]))
    assert inputs["ids"].tolist() == test[0]["ids"][[3, 0]].tolist()
    assert inputs["extra"].dtype == torch.float64
    assert [each.tolist() for each in targets] == [each[[3, 0]].tolist() for each in test[1]]
    tried = example(RunSpec(), info, 2, torch.float64)
    assert {name: (each.dtype, each.shape) for name, each in tried.items()} == {
        "ids": (torch.int64, (2, 6)),
        "extra": (torch.float64, (2, 2)),
    }
    (x, _), (z, _) = train, test
    pair = load(returned((((x["ids"], x["extra"]), np.arange(9) % 3), ((z["ids"], z["extra"]), np.arange(4) % 3))))
    assert (pair.info.inputs, pair.info.classes) == (("int64 6", "float32 2"), 3)
    assert pair.info.target_shape == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"ids": np.zeros((9, 7), int)},
            "has training samples .*int64 7.*, but test samples .*int64 6.*: they must",
        ),
        ({"ids": np.zeros((8, 6), int)}, r"x_train and y_train of .*:make have \[8, 9\] samples"),
        ({"ids": np.full((9, 6), np.nan)}, r"'ids' in x_train of .*:make has the value nan at \[0, 0\]"),
        ({"ids": [1, 2]}, "'ids' in x_train of .*:make is a list instead of a numpy array or a torch tensor"),
        ({"ids": (np.zeros(9), np.zeros(9))}, "'ids' in x_train of .*:make is a tuple instead of"),
        ({"more": np.zeros(9)}, "has training samples .*more.*, but test samples"),
        ({3: np.zeros(9)}, "x_train of .*:make has the key 3; keys must be names of the model's arguments"),
    ],
)
def test_wrong_ones_of_several_are_named(change: Any, reason: str) -> None:
    (inputs, targets), test = several(9), several(4)
    with pytest.raises(DataError, match=reason):
        load(returned(((inputs | change, targets), test)))


def test_no_inputs_at_all_are_refused() -> None:
    with pytest.raises(DataError, match=r"x_train of .*:make is an empty tuple"):
        load(returned((((), np.zeros(9)), ((), np.zeros(4)))))


def test_missing_names_are_named(tmp_path: Path) -> None:
    given = good()
    del given["y_test"]
    with pytest.raises(
        DataError, match=r"own.npz has no y_test, only x_test, x_train, y_train: the arrays x_train, y_tr"
    ):
        prepare(saved(tmp_path, given))
    with pytest.raises(DataError, match=r"own.npz has no train_labels, only test_images, train_images"):
        prepare(saved(tmp_path, {"train_images": given["x_train"], "test_images": given["x_test"]}))
    with pytest.raises(DataError, match=r"own.npz has no x_train, only no arrays"):
        prepare(saved(tmp_path, {}))


def test_python_objects_are_not_unpickled(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/trace",)

    given = good() | {"y_train": np.array([Harm()] * 9, object)}
    np.savez(tmp_path / "own.npz", **given)
    (tmp_path / "trace").unlink(missing_ok=True)
    with pytest.raises(DataError, match=r"y_train of .*own.npz has Python objects instead of numbers"):
        prepare(f"arrays:{tmp_path}/own.npz")
    assert not (tmp_path / "trace").exists()


def damaged(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        where = content.index(good()["x_train"].tobytes())
        path.write_bytes(content[:where] + bytes([content[where] ^ 1]) + content[where + 1 :])
    elif how in ("short", "long"):
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                other = data[:-1] if how == "short" else data + b"?"
                archive.writestr(name, other if name == "x_test.npy" else data)
    elif how == "no npy":
        with zipfile.ZipFile(path, "w") as archive:
            for name in arrays.KERAS:
                archive.writestr(f"{name}.npy", b"no array")
    elif how == "negative":
        path.write_bytes(content.replace(b"(9, 5, 6)", b"(-9,5, 6)"))
    else:
        path.write_bytes({"empty": b"", "text": b"x_train = 5"}[how])


@pytest.mark.parametrize("how", ["cut", "flipped", "short", "long", "no npy", "negative", "empty", "text"])
def test_a_file_that_is_no_npz_or_damaged_is_named(tmp_path: Path, how: str) -> None:
    name = saved(tmp_path, good())
    damaged(tmp_path / "own.npz", how)
    with pytest.raises(
        DataError, match=r"own.npz is not an .npz file of numpy, or is damaged .*make it with numpy.savez"
    ):
        prepare(name)
    assert not list((tmp_path / "cache").rglob("*.*"))


@pytest.mark.parametrize("header", ["-" * 9000 + "1", "  x\n y", "{'shape': (", "(" * 3000, "a" + ".a" * 4000])
def test_a_header_that_python_s_parser_does_not_take_is_a_damaged_file(tmp_path: Path, header: str) -> None:
    """numpy reads it as if it were Python: too deep, badly indented, cut short."""
    text = header.encode() + b"\n"
    with zipfile.ZipFile(tmp_path / "own.npz", "w") as archive:
        for name in arrays.KERAS:
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    with pytest.raises(DataError, match=r"own.npz is not an .npz file of numpy, or is damaged"):
        arrays.open_npz(tmp_path / "own.npz")


def test_a_changed_file_is_packed_again(tmp_path: Path) -> None:
    assert load(saved(tmp_path, good())).info.shape == (1, 5, 6)
    assert load(saved(tmp_path, good(inner=(7, 8)))).info.shape == (1, 7, 8)


def test_a_function_is_given_the_folder_if_it_asks(tmp_path: Path, module: Path) -> None:
    module.write_text(
        "import numpy as np\n"
        "def make(folder):\n"
        "    x = np.full((4, 5, 6), len(folder.name), np.uint8)\n"
        "    return (x, np.arange(4) % 2), (x, np.arange(4) % 2)\n"
    )
    data = load(f"{MODULE}:make", Path("/some/where"))
    assert data.train.inputs.unique().tolist() == [5]
    assert data.train.where is None


def test_a_function_may_return_tensors_and_odd_arrays() -> None:
    given = good(np.float32)
    pairs = (
        (torch.from_numpy(given["x_train"]).requires_grad_(), torch.from_numpy(given["y_train"])),
        [given["x_test"][::-1], given["y_test"]],
    )
    data = load(returned(pairs))
    assert np.array_equal(data.train.inputs[:, 0], given["x_train"])
    assert np.array_equal(data.test.inputs[:, 0], given["x_test"][::-1])


def test_what_a_function_returns_is_not_copied_where_it_need_not_be() -> None:
    given = good(inner=(5, 6, 3))
    given["x_train"].flags.writeable = False
    data = load(returned(((given["x_train"], given["y_train"]), (given["x_test"], given["y_test"]))))
    assert data.train.inputs.data_ptr() == given["x_train"].ctypes.data
    assert data.test.inputs.data_ptr() == given["x_test"].ctypes.data


def test_nothing_is_prepared_of_a_function() -> None:
    assert prepare(returned(None)) is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "returned a NoneType; ..x_train, y_train., .x_test, y_test.. is expected"),
        ((1, 2), "returned a tuple;"),
        ((([1], [1]), ([1], [1])), "x_train of .*:make is a list instead of a numpy array or a torch tensor"),
        (((torch.zeros(2, 5, 6).bfloat16(), 1), (1, 1)), r"x_train of .* cannot be a numpy array: .*BFloat16.*\.float"),
    ],
)
def test_anything_else_that_a_function_returns_is_refused(value: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        load(returned(value))


def test_a_function_that_fails_is_named(module: Path) -> None:
    module.write_text("def make():\n    raise ValueError('no disk')\n")
    with pytest.raises(UsageError, match=rf"data set {MODULE}:make.*no disk"):
        load(f"{MODULE}:make")
