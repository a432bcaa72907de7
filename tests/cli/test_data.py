"""`paceline data`, called as the command line calls it."""

import argparse
import gzip
import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.cli import data
from paceline.data import mini
from paceline.data.origins import MINI, ORIGINS, Origin
from paceline.errors import DataError, UsageError


@pytest.fixture(autouse=True)
def _no_network_and_a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MNIST without sources, of the packaged set's files, which are sure to be there."""
    monkeypatch.setitem(ORIGINS, "mnist", Origin("mnist", MINI))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PACELINE_DATA", raising=False)


def paceline_data(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    return data.run(parser.parse_args(arguments))


def test_list_shows_every_data_set_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    assert paceline_data("list") == 0
    *lines, empty, own = capsys.readouterr().out.splitlines()
    assert (empty, own.split()[:3]) == ("", ["Your", "own:", "images:FOLDER,"])
    assert [line.split()[0] for line in lines] == [
        "name",
        "mnist-mini",
        "mnist",
        "fashion-mnist",
        "cifar10",
        "synthetic",
        "shakespeare",
    ]
    assert lines[2].split()[1:9] == ["images", "60,000", "10,000", "1×28×28", "10", "not", "cached", "handwritten"]
    assert lines[4].split()[1:8] == ["images", "50,000", "10,000", "3×32×32", "10", "not", "cached"]
    assert lines[6].split()[1:9] == ["tokens", "9,771", "1,085", "128", "256", "in", "the", "package"]
    abouts = ("the first", "handwritten", "clothes", "small photographs", "generated patterns", "ten tragedies")
    assert len({line.index(about) for line, about in zip(lines[1:], abouts, strict=True)}) == 1


def test_get_fetches_from_a_folder_and_path_and_list_then_know_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paceline_data("get", "mnist", "--data-dir", str(mini.FOLDER), "--source", "folder") == 0
    assert capsys.readouterr().out.endswith(f", every part checked, in {tmp_path}/cache/mnist/mnist.bin\n")
    assert paceline_data("path", "mnist") == 0
    place = Path(capsys.readouterr().out.rstrip("\n"))
    assert place == tmp_path / "cache" / "mnist"
    (path,) = place.iterdir()
    content = path.read_bytes()
    for file in MINI:
        part, content = content[: file.size], content[file.size :]
        assert sha256(part).hexdigest() == file.sha256
    assert not content
    paceline_data("list")
    assert "  cached" in capsys.readouterr().out.splitlines()[2]
    path.write_bytes(b"cut")
    paceline_data("list")
    assert "  not cached" in capsys.readouterr().out.splitlines()[2]


def test_get_says_what_was_tried() -> None:
    with pytest.raises(DataError, match=r"no source has the data set mnist\. Tried:\n  folder: none was given"):
        paceline_data("get", "mnist")


def test_get_refuses_an_unknown_name_or_source() -> None:
    with pytest.raises(UsageError, match="unknown data set 'mnits'; did you mean 'mnist'"):
        paceline_data("get", "mnits")
    with pytest.raises(UsageError, match="unknown source 'ftp'"):
        paceline_data("get", "mnist", "--source", "ftp")


def test_there_is_nothing_to_get_of_what_is_not_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    assert paceline_data("get", "synthetic:train=50") == 0
    assert paceline_data("get", "mnist-mini") == 0
    assert capsys.readouterr().out.splitlines() == [
        "synthetic:train=50 is generated in memory: there is nothing to get",
        "mnist-mini is in the package: there is nothing to get",
    ]


def test_path_of_what_is_not_cached_says_how_to_get_it() -> None:
    with pytest.raises(UsageError, match=r"mnist is not in the cache .*`paceline data get mnist`"):
        paceline_data("path", "mnist")
    with pytest.raises(UsageError, match="synthetic is generated in memory"):
        paceline_data("path", "synthetic")


def test_path_of_the_packaged_set_is_in_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert paceline_data("path", "mnist-mini") == 0
    folder = Path(capsys.readouterr().out.rstrip("\n"))
    assert gzip.decompress((folder / f"{MINI[3].name}.gz").read_bytes())[:4] == b"\x00\x00\x08\x01"


def own_data(tmp_path: Path) -> tuple[str, str]:
    """A folder of images and a file of arrays, by the names of their data sets."""
    for name in ("cat/1", "cat/2", "dog/1", "dog/2", "dog/3"):
        (path := tmp_path / "pictures" / f"{name}.png").parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6)).save(path)
    images, labels = np.zeros((6, 4, 5), np.float32), np.arange(6) % 3
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    return f"images:{tmp_path}/pictures", f"arrays:{tmp_path}/own.npz"


def test_get_packs_own_data_and_says_what_and_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = ("3 training and 2 test images, 3×6×8, 2 classes", "6 training and 6 test images, 1×4×5, 3 classes")
    for name, said in zip(own_data(tmp_path), expected, strict=True):
        with pytest.raises(UsageError, match=f"is not in the cache .*`paceline data get {name}`"):
            paceline_data("path", name)
        assert paceline_data("get", name) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"{name}: {said}, in {tmp_path}/cache/own/")
        assert paceline_data("path", name) == 0
        path = Path(capsys.readouterr().out.rstrip("\n"))
        assert path.is_file()
        assert out.endswith(f" in {path}\n")


def test_get_refuses_a_source_for_own_data(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not fetched, so no source can be chosen: leave --source out"):
        paceline_data("get", own_data(tmp_path)[0], "--source", "web")


def test_there_is_nothing_to_get_of_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert paceline_data("get", "json.decoder:JSONDecoder") == 0
    said = "json.decoder:JSONDecoder is made by your own function: there is nothing to get\n"
    assert capsys.readouterr().out == said
    with pytest.raises(UsageError, match=r"json.decoder:JSONDecoder is made by your own function and has no folder"):
        paceline_data("path", "json.decoder:JSONDecoder")


def test_list_and_path_need_no_torch() -> None:
    code = (
        "import argparse, sys; from paceline.cli import data; data.run(argparse.Namespace(action='list', json=False)); "
        "data.run(argparse.Namespace(action='path', name='mnist-mini', json=False)); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_get_and_path_of_a_users_own_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be " * 100)
    name = f"text:{tmp_path}/a.txt,block=16,level=characters"
    assert paceline_data("get", name) == 0
    assert paceline_data("path", name) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{name}: 106 training and 11 test blocks of 16 tokens, vocabulary 7, in {tmp_path}/a.txt",
        f"{tmp_path}/a.txt",
    ]
    assert paceline_data("get", name, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["shape"], facts["classes"], facts["file"]) == ("tokens", [16], 7, f"{tmp_path}/a.txt")
    (tmp_path / "a.txt").write_text("too short")
    with pytest.raises(DataError, match="use a smaller block or a longer text"):
        paceline_data("get", name)


def test_the_text_in_the_package_has_a_folder_and_nothing_to_get(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("shakespeare", "shakespeare:block=64"):
        assert paceline_data("get", name) == 0
        assert paceline_data("path", name) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines == [f"{name} is in the package: there is nothing to get", str(mini.FOLDER)]
