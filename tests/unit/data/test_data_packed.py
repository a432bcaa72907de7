"""Packed own data: safetensors' layout, packed once, again when something changed, and whole or not there."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as any_array
from safetensors import safe_open
from safetensors.torch import load_file
from test_data_images import folder_of, picture, save

from paceline.data import packed
from paceline.data.load import load
from paceline.data.prepare import prepare
from paceline.data.samples import Moments
from paceline.errors import DataError


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "own pictures", {"a": 6, "b": 4})


def packing(folder: Path) -> Path:
    path = prepare(f"images:{folder}")
    assert path is not None
    return path


def test_it_is_one_file_that_safetensors_reads(tmp_path: Path, own: Path) -> None:
    path = packing(own)
    assert path.parent == tmp_path / "cache" / "own"
    assert path.name.startswith("own-pictures-")
    assert list(path.parent.iterdir()) == [path]
    data, tensors = load(f"images:{own}"), load_file(path)
    assert torch.equal(tensors["train_inputs"], data.train.inputs)
    assert torch.equal(tensors["train_targets"], data.train.targets)
    assert torch.equal(tensors["test_inputs"], data.test.inputs)
    assert torch.equal(tensors["test_targets"], data.test.targets)
    assert data.train.targets.dtype == torch.int64
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "paceline 2"
    assert metadata["source"] == str(own)
    assert json.loads(metadata["classes"]) == ["a", "b"]
    assert json.loads(metadata["mean"]) == list(data.info.mean or ())


def test_it_is_mapped_and_aligned(own: Path) -> None:
    data = load(f"images:{own}")
    for split in (data.train, data.test):
        assert split.where is not None
        images, labels = split.where
        assert labels.offset % 8 == 0
        raw = images.path.read_bytes()
        for index in range(len(split)):
            start = images.offset + images.stride * index
            assert raw[start : start + images.stride] == split.inputs[index].numpy().tobytes()


def test_names_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/own\xff"))
    folder_of(folder, {os.fsdecode(b"a\xff"): 3, "ü\n": 3})
    assert len(load_file(packing(folder))["train_inputs"]) == 4


def test_mean_and_deviation_are_of_the_training_images(own: Path) -> None:
    data = load(f"images:{own}")
    values = data.train.inputs.double() / 255
    assert data.info.mean == pytest.approx(values.mean((0, 2, 3)).tolist(), abs=1e-12)
    assert data.info.std == pytest.approx(values.std((0, 2, 3), correction=0).tolist(), abs=1e-12)


@given(any_array(np.float32, (7, 2, 3, 2), elements=st.floats(-1e6, 1e6, width=32)), st.lists(st.integers(1, 6)))
def test_mean_and_deviation_do_not_depend_on_the_pieces(images: np.ndarray, cuts: list[int]) -> None:
    moments = Moments()
    for piece in np.split(images, sorted(set(cuts))):
        moments.add(piece)
    mean, std = moments.result("float32")
    exact = images.astype(np.float64)
    assert mean == pytest.approx(exact.mean((0, 2, 3)), rel=1e-9, abs=1e-6)
    found = np.where((deviation := exact.std((0, 2, 3))) > 1e-6, deviation, 0)
    assert np.where(np.array(std) == 1.0, found, std) == pytest.approx(found, rel=1e-6, abs=1e-5)


def test_a_channel_that_never_changes_has_a_deviation_of_one() -> None:
    moments = Moments()
    moments.add(np.full((3, 1, 2, 2), 51, np.uint8))
    assert moments.result("uint8") == ((0.2,), (1.0,))


def test_it_is_packed_once(own: Path) -> None:
    first = packing(own).stat()
    assert packing(own).stat().st_ino == first.st_ino


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_packing_shows_a_bar_on_a_terminal_only(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stderr, bar in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stderr)
        packing(own).unlink()
        assert ("packing own pictures:" in stderr.getvalue()) is bar


def test_another_folder_of_the_same_name_is_packed_elsewhere(tmp_path: Path, own: Path) -> None:
    assert packing(own) != packing(folder_of(tmp_path / "other" / own.name, {"a": 3, "b": 3}))


@pytest.mark.parametrize("change", ["added", "removed", "renamed", "written", "touched"])
def test_it_is_packed_again_when_a_file_changed(own: Path, change: str) -> None:
    before = packing(own).stat().st_ino
    path = own / "a" / "3.png"
    if change == "added":
        save(own / "a" / "x.png", picture(5))
    elif change == "removed":
        path.unlink()
    elif change == "renamed":
        path.rename(path.with_name("x.png"))
    elif change == "written":
        save(path, picture(77))
    else:
        os.utime(path, (1, 1))
    assert packing(own).stat().st_ino != before
    assert len(load(f"images:{own}").train) == {"added": 9, "removed": 7}.get(change, 8)


def test_a_prepared_set_is_opened_without_looking_at_the_folder(own: Path) -> None:
    packing(own)
    save(own / "a" / "x.txt.png", picture(5))
    assert len(load(f"images:{own}", prepared=True).train) == 8


def header_of(path: Path) -> tuple[dict[str, dict[str, object]], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(path: Path, header: object, rest: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + rest)


@pytest.mark.parametrize(
    ("key", "inner", "value"),
    [
        ("train_inputs", "dtype", "U16"),
        ("train_inputs", "dtype", "F32"),
        ("train_inputs", "shape", [9, 3, 5, 7]),
        ("train_inputs", "shape", [9, 90]),
        ("train_inputs", "shape", 9),
        ("train_inputs", "shape", [-9, 3, 5, -6]),
        ("test_targets", "shape", [2.0]),
        ("train_targets", "data_offsets", [8, 80]),
        ("train_targets", "dtype", "I32"),
        ("more", "dtype", "U8"),
        ("__metadata__", "format", "paceline 0"),
        ("__metadata__", "kind", "tokens"),
        ("__metadata__", "kind", "arrays"),
        ("__metadata__", "kind", None),
        ("__metadata__", "mean", "[0.5]"),
        ("__metadata__", "mean", "[NaN, 0.5, 0.5]"),
        ("__metadata__", "classes", "no JSON"),
        ("__metadata__", "std", None),
        ("__metadata__", "fingerprint", None),
    ],
)
def test_a_broken_header_is_refused_and_packed_again(
    own: Path, capsys: pytest.CaptureFixture[str], key: str, inner: str, value: object
) -> None:
    path = packing(own)
    good = path.read_bytes()
    header, rest = header_of(path)
    header.setdefault(key, {})[inner] = value
    if value is None:
        del header[key][inner]
    with_header(path, header, rest)
    with pytest.raises(DataError, match=f"{path} was not packed by Paceline, or is damaged.*remove it"):
        load(f"images:{own}", prepared=True)
    assert packing(own).read_bytes() == good
    assert f"warning: {path} was not packed by Paceline" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"", b"short", (1 << 60).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]more"]
)
def test_what_has_no_header_is_refused(own: Path, content: bytes) -> None:
    path = packing(own)
    path.write_bytes(content)
    with pytest.raises(DataError, match="was not packed by Paceline, or is damaged"):
        load(f"images:{own}", prepared=True)


def test_a_packed_file_that_was_cut_or_vanished_is_refused(own: Path) -> None:
    path = packing(own)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"it should have {size} bytes, but has {size - 1}"):
        load(f"images:{own}", prepared=True)
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read .*safetensors: No such file.*`paceline data get images:"):
        load(f"images:{own}", prepared=True)


KILLED = """
import signal, sys
from pathlib import Path
import numpy as np
from paceline.data import packed
from paceline.data.samples import Content, Samples

def half():
    yield np.zeros((300, 1, 28, 28), np.uint8)
    print("half", flush=True)
    signal.pause()

labels = np.zeros(600, np.int64)
source = Path(sys.argv[1])
content = Content((1, 28, 28), "uint8", ("a", "b"), Samples(labels, half), Samples(labels, half))
packed.write(packed.place_of(source), content, source, "")
"""


def test_a_process_killed_in_the_middle_leaves_nothing_that_is_trusted(own: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(own)], stdout=subprocess.PIPE)
    assert process.stdout
    with process.stdout:
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    place = packed.place_of(own)
    (part,) = place.parent.iterdir()
    assert part.suffix == ".part"
    os.utime(part, (0, 0))
    assert packing(own) == place
    assert list(place.parent.iterdir()) == [place]
