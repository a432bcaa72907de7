"""What the table says, and how a synthetic data set is asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.data.load import load
from paceline.data.prepare import prepare
from paceline.data.table import TABLE, DataInfo, describe
from paceline.errors import DataError, UsageError


def known(name: str) -> DataInfo:
    info = describe(name)
    assert info is not None
    return info


def test_the_table_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, paceline.data.table; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "train", "test"),
    [("mnist-mini", 10_000, 2_000), ("mnist", 60_000, 10_000), ("fashion-mnist", 60_000, 10_000)],
)
def test_a_named_data_set_is_described(name: str, train: int, test: int) -> None:
    info = known(name)
    assert (info.name, info.shape, info.classes, info.train, info.test) == (name, (1, 28, 28), 10, train, test)


def test_cifar_is_described() -> None:
    info = known("cifar10")
    assert (info.shape, info.classes, info.train, info.test) == ((3, 32, 32), 10, 50_000, 10_000)
    assert info.normalize


@pytest.mark.parametrize("info", TABLE.values(), ids=lambda info: info.name)
def test_mean_and_deviation_are_known_of_each_channel_of_real_data(info: DataInfo) -> None:
    if info.name == "synthetic" or info.kind != "images":
        assert (info.mean, info.std) == (None, None)
    else:
        assert info.mean is not None
        assert info.std is not None
        assert len(info.mean) == len(info.std) == info.shape[0]
        assert all(0 < value < 1 for value in info.mean + info.std)


def test_a_misspelt_name_is_answered_with_the_nearest_and_the_forms_of_own_data() -> None:
    with pytest.raises(UsageError, match=r"unknown data set 'minst'; did you mean 'mnist'.*fashion-mnist") as error:
        known("minst")
    for form in ("images:FOLDER", "arrays:FILE.npz", "package.module:function"):
        assert form in str(error.value)


def test_of_own_data_only_loading_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file.npz").touch()
    assert describe(f"images:{tmp_path}") is None
    assert describe(f"arrays:{tmp_path}/file.npz") is None
    assert describe("json.decoder:anything") is None
    monkeypatch.setenv("HOME", str(tmp_path))
    assert describe("arrays:~/file.npz") is None


def test_own_data_that_are_not_there_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file.npz").touch()
    for name, reason in (
        (f"images:{tmp_path}/nowhere", "nowhere does not exist; give a folder of images, a sub-folder for each class"),
        (f"images:{tmp_path}/file.npz", "file.npz is not a folder; give a folder of images"),
        (f"arrays:{tmp_path}/nowhere.npz", r"nowhere.npz does not exist; give a file of arrays, .npz"),
        (f"arrays:{tmp_path}", "is not a file; give a file of arrays"),
        (f"text:{tmp_path}/nowhere.txt,block=3", "nowhere.txt does not exist; give a file of text"),
        (f"tokens:{tmp_path}", "is not a file; give a file of tokens"),
        (f"images:{tmp_path}/{'x' * 300}", "cannot be accessed .File name too long"),
        ("images:~nobody-of-this-name/x", "cannot be found"),
    ):
        with pytest.raises(DataError, match=reason):
            prepare(name)
    with pytest.raises(UsageError, match="there is no Python package or module 'nopackage'"):
        prepare("nopackage.module:function")


def test_own_data_of_no_name_are_refused() -> None:
    own = "images:FOLDER, arrays:FILE.npz, text:FILE, tokens:FILE.bin, FILE.py:function or"
    for name in ("images:", "arrays:", "text:", "tokens:", "text:,block=3"):
        with pytest.raises(UsageError, match=f"'{name}' names no file: use {own}"):
            describe(name)


def test_own_data_say_themselves_where_they_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave --data-dir out"):
        prepare(f"images:{tmp_path}", tmp_path)
    with pytest.raises(UsageError, match="leave --data-dir out"):
        prepare(f"text:{tmp_path}/a.txt", tmp_path)
    for name in ("mnist-mini", "synthetic:train=50", "shakespeare", "shakespeare:block=64"):
        with pytest.raises(UsageError, match=f"{name} is not read from files; leave --data-dir out"):
            prepare(name, tmp_path)


def test_means_and_deviations_are_those_of_the_images() -> None:
    data = load("mnist-mini")
    values = data.train.inputs.double() / 255
    assert data.info.mean == pytest.approx([values.mean().item()], abs=1e-6)
    assert data.info.std == pytest.approx([values.std(unbiased=False).item()], abs=1e-6)


@pytest.mark.parametrize("name", ["mnist:3x32x32", "synthetics:3x32x32", "", "MNIST"])
def test_what_is_not_in_the_table_is_unknown(name: str) -> None:
    with pytest.raises(UsageError, match="unknown data set"):
        known(name)


@pytest.mark.parametrize(
    "name",
    [
        "synthetic:3x32x40,classes=100,train=5000,test=1000",
        "synthetic:test=1000,train=5000,3x32x40,classes=100",
    ],
)
def test_synthetic_parameters_come_in_any_order(name: str) -> None:
    info = known(name)
    assert (info.name, info.shape, info.classes, info.train, info.test) == (name, (3, 32, 40), 100, 5000, 1000)


@pytest.mark.parametrize("name", ["synthetic", "synthetic:"])
def test_synthetic_parameters_that_are_left_out_have_defaults(name: str) -> None:
    info, default = known(name), TABLE["synthetic"]
    assert (info.shape, info.classes, info.train, info.test) == ((1, 28, 28), 10, 10_000, 2_000)
    assert known("synthetic:classes=7").classes == 7
    assert known("synthetic:classes=7").train == default.train


@pytest.mark.parametrize(
    "parameters",
    [
        "32x32",
        "3x32x32x32",
        "3x0x32",
        "-3x32x32",
        "classes=0",
        "classes=-1",
        "classes=1.5",
        "classes=1_0",
        "classes=٣",
        "classes=",
        "train=9999999999",
        "rows=5",
        "train=5,train=6",
        "3x32x32,1x28x28",
        "train=5,,test=5",
        "train=5,",
        " train=5",
    ],
)
def test_bad_synthetic_parameters_are_refused_with_an_example(parameters: str) -> None:
    with pytest.raises(UsageError) as error:
        known(f"synthetic:{parameters}")
    _, _, last = parameters.rpartition(",")
    assert any(f"cannot read {part!r} in the data set" in str(error.value) for part in (last, ""))
    assert "allowed are" in str(error.value)
    assert "as in synthetic:3x32x32,classes=100,train=5000,test=1000" in str(error.value)


def test_a_synthetic_data_set_larger_than_memory_is_refused() -> None:
    with pytest.raises(UsageError, match=r"would take .* GiB of memory"):
        known("synthetic:3x999999999x999999999")
