"""Data sets as tensors: the packaged, the cached and the made."""

import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from tiny_cifar import batches, cifar_origin
from tiny_origin import origin_of, tiny_content, whole, write

from paceline.data import mini
from paceline.data.load import Dataset, load
from paceline.data.origins import MINI, NAMES, ORIGINS
from paceline.data.prepare import prepare
from paceline.errors import DataError, UsageError

SMALL = "synthetic:2x9x7,classes=5,train=500,test=100"


@pytest.fixture(scope="module")
def packaged() -> Dataset:
    return load("mnist-mini")


def test_the_packaged_set_has_as_many_of_each_digit(packaged: Dataset) -> None:
    assert torch.bincount(packaged.train.targets).tolist() == [1_000] * 10
    assert torch.bincount(packaged.test.targets).tolist() == [200] * 10


def test_the_packaged_set_is_as_the_table_says(packaged: Dataset) -> None:
    for split, count in ((packaged.train, packaged.info.train), (packaged.test, packaged.info.test)):
        assert split.inputs.shape == (count, *packaged.info.shape)
        assert len(split) == count
        assert (split.inputs.dtype, split.targets.dtype) == (torch.uint8, torch.uint8)
        assert split.where is None


def test_the_packaged_set_is_shuffled(packaged: Dataset) -> None:
    assert all(len(batch.unique()) == 10 for batch in packaged.train.targets.view(-1, 500))


def test_the_packaged_files_have_the_digests_in_the_code() -> None:
    for file in MINI:
        content = mini.read(file)
        assert (len(content), sha256(content).hexdigest()) == (file.size, file.sha256)


def test_the_packaged_files_are_small() -> None:
    assert sum(path.stat().st_size for path in mini.FOLDER.iterdir()) < 2_500_000


def test_a_damaged_packaged_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mini, "FOLDER", tmp_path)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz: No such file.*install it again"):
        load("mnist-mini")
    (tmp_path / f"{NAMES[0]}.gz").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz: Not a gzipped file.*install it again"):
        load("mnist-mini")


@pytest.fixture
def tiny_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of a data set that takes the place of MNIST."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(ORIGINS, "mnist", origin_of(tiny_content()))
    return write(tmp_path / "given", tiny_content())


def test_a_cached_set_is_what_its_files_say(tiny_mnist: Path) -> None:
    data, content = load("mnist", tiny_mnist), tiny_content()
    assert data.train.inputs.shape == (20, 1, 28, 28)
    assert data.test.inputs.shape == (10, 1, 28, 28)
    assert data.train.inputs.numpy().tobytes() == content[NAMES[0]][16:]
    assert data.test.targets.tolist() == list(content[NAMES[3]][8:])
    assert data.test.targets.dtype == torch.uint8


def test_a_cached_set_is_mapped_and_not_copied(tiny_mnist: Path, tmp_path: Path) -> None:
    data = load("mnist", tiny_mnist)
    mapped = f"{tmp_path}/cache/mnist/mnist.bin"
    (line,) = (line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(mapped))
    first, last = (int(each, 16) for each in line.split()[0].split("-"))
    for tensor in (data.train.inputs, data.train.targets, data.test.inputs, data.test.targets):
        assert first <= tensor.data_ptr() < last


def test_a_set_damaged_after_it_was_cached_is_not_loaded(tiny_mnist: Path, tmp_path: Path) -> None:
    load("mnist", tiny_mnist)
    cached, given = tmp_path / "cache" / "mnist" / "mnist.bin", tiny_mnist / NAMES[3]
    for path in (cached, given):
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DataError, match=NAMES[3]):
        load("mnist", tiny_mnist)


@pytest.fixture
def tiny_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of a data set that takes the place of CIFAR-10."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(ORIGINS, "cifar10", cifar_origin("cifar10"))
    return write(tmp_path / "given", batches())


def test_cifar_is_records_of_a_label_and_three_colours(tiny_cifar: Path) -> None:
    data = load("cifar10", tiny_cifar)
    raw = whole(batches())
    assert data.train.inputs.shape == (20, 3, 32, 32)
    assert data.train.inputs.stride() == (3073, 1024, 32, 1)
    assert data.test.inputs.shape == (6, 3, 32, 32)
    for split, start in ((data.train, 0), (data.test, 20)):
        for index in range(len(split)):
            record = raw[3073 * (start + index) :][:3073]
            assert split.targets[index] == record[0]
            assert split.inputs[index].contiguous().numpy().tobytes() == record[1:]


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_a_split_says_where_it_lies(name: str, tiny_mnist: Path, tiny_cifar: Path) -> None:
    data = load(name, tiny_mnist)
    for split in (data.train, data.test):
        assert split.where is not None
        for records, tensor in zip(split.where, (split.inputs, split.targets), strict=True):
            raw = records.path.read_bytes()
            assert (records.count, *records.shape) == tuple(tensor.shape)
            for index in (0, records.count - 1):
                start = records.offset + records.stride * index
                value = tensor[index].contiguous().numpy().tobytes()
                assert raw[start : start + len(value)] == value


def test_a_prepared_set_is_opened_without_being_read(tiny_cifar: Path) -> None:
    path = prepare("cifar10", tiny_cifar)
    assert path is not None
    path.write_bytes(b"\x01" + path.read_bytes()[1:])  # a check of the digests would find this
    assert load("cifar10", prepared=True).train.targets[0] == 1


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_a_prepared_set_that_vanished_or_was_cut_is_refused(name: str, tiny_mnist: Path, tiny_cifar: Path) -> None:
    path = prepare(name, tiny_mnist)
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"{name}.bin does not exist, or does not have \d+ bytes.*`paceline data get"):
        load(name, prepared=True)
    path.unlink()
    with pytest.raises(DataError, match=rf"{name}.bin does not exist"):
        load(name, prepared=True)


@pytest.mark.parametrize("name", ["mnist-mini", SMALL])
def test_there_is_nothing_to_prepare_of_what_is_in_the_package_or_made(name: str) -> None:
    assert prepare(name) is None
    assert len(load(name, prepared=True).train) > 0


def test_preparing_needs_no_torch() -> None:
    code = "import sys, paceline.data.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_source_is_chosen_only_for_what_is_fetched() -> None:
    with pytest.raises(UsageError, match=r"mnist-mini is not fetched.*leave --source out"):
        prepare("mnist-mini", source="web")


def test_synthetic_data_are_the_same_every_time() -> None:
    data = load(SMALL)
    everything = (data.train.inputs, data.train.targets, data.test.inputs, data.test.targets)
    digest = sha256(b"".join(tensor.numpy().tobytes() for tensor in everything)).hexdigest()
    assert digest == "c75903bf22883a136fd161b7146ff9659b87fd47acfe63a800a5d1024713e4f7"


def test_synthetic_data_depend_on_their_parameters_and_not_on_their_order() -> None:
    data = load(SMALL)
    assert torch.equal(load("synthetic:test=100,train=500,classes=5,2x9x7").train.inputs, data.train.inputs)
    assert not torch.equal(load(SMALL.replace("test=100", "test=99")).train.inputs, data.train.inputs)


def test_synthetic_data_have_the_shape_that_was_asked_for() -> None:
    data = load(SMALL)
    assert data.train.inputs.shape == (500, 2, 9, 7)
    assert data.test.inputs.dtype == torch.uint8
    assert torch.bincount(data.train.targets).tolist() == [100] * 5
    assert load("synthetic:classes=300,train=600,test=300").test.targets.max() == 299


def test_synthetic_data_can_be_learnt() -> None:
    data = load(SMALL)
    images = data.train.inputs.flatten(1).float()
    means = torch.stack([images[data.train.targets == each].mean(0) for each in range(5)])
    guesses = torch.cdist(data.test.inputs.flatten(1).float(), means).argmin(1)
    assert (guesses == data.test.targets).float().mean() > 0.7


def test_an_unknown_data_set_is_not_loaded() -> None:
    with pytest.raises(UsageError, match="unknown data set"):
        load("imagenet")
