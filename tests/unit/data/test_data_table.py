"""What the table says, and how a synthetic data set is asked for."""

import subprocess
import sys

import pytest

from paceline.data.table import TABLE, describe
from paceline.errors import UsageError


def test_the_table_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, paceline.data.table; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "train", "test"),
    [("mnist-mini", 10_000, 2_000), ("mnist", 60_000, 10_000), ("fashion-mnist", 60_000, 10_000)],
)
def test_a_named_data_set_is_described(name: str, train: int, test: int) -> None:
    info = describe(name)
    assert (info.name, info.shape, info.classes, info.train, info.test) == (name, (1, 28, 28), 10, train, test)


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown data set 'minst'; did you mean 'mnist'.*fashion-mnist"):
        describe("minst")


@pytest.mark.parametrize("name", ["mnist:3x32x32", "synthetics:3x32x32", "", "MNIST"])
def test_what_is_not_in_the_table_is_unknown(name: str) -> None:
    with pytest.raises(UsageError, match="unknown data set"):
        describe(name)


@pytest.mark.parametrize(
    "name",
    [
        "synthetic:3x32x40,classes=100,train=5000,test=1000",
        "synthetic:test=1000,train=5000,3x32x40,classes=100",
    ],
)
def test_synthetic_parameters_come_in_any_order(name: str) -> None:
    info = describe(name)
    assert (info.name, info.shape, info.classes, info.train, info.test) == (name, (3, 32, 40), 100, 5000, 1000)


@pytest.mark.parametrize("name", ["synthetic", "synthetic:"])
def test_synthetic_parameters_that_are_left_out_have_defaults(name: str) -> None:
    info, default = describe(name), TABLE["synthetic"]
    assert (info.shape, info.classes, info.train, info.test) == ((1, 28, 28), 10, 10_000, 2_000)
    assert describe("synthetic:classes=7").classes == 7
    assert describe("synthetic:classes=7").train == default.train


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
        describe(f"synthetic:{parameters}")
    _, _, last = parameters.rpartition(",")
    assert any(f"cannot read {part!r} in the data set" in str(error.value) for part in (last, ""))
    assert "allowed are" in str(error.value)
    assert "as in synthetic:3x32x32,classes=100,train=5000,test=1000" in str(error.value)


def test_a_synthetic_data_set_larger_than_memory_is_refused() -> None:
    with pytest.raises(UsageError, match=r"would take .* GiB of memory"):
        describe("synthetic:3x999999999x999999999")
