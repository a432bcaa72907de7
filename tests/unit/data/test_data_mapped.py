"""Windows into a file: the right values, nothing copied, nothing outside, and only the pages that are used."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.data import cache
from paceline.data.load import load
from paceline.data.mapped import Records, open_bytes, views
from paceline.data.origins import ORIGINS
from paceline.errors import DataError


def test_views_are_of_the_file_and_cannot_be_written_to(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(40)))
    raw = open_bytes(path)
    (array,) = views(raw, [Records(path, 3, 9, 4, (2, 3), "uint8")])
    assert array.tolist() == [[[s, s + 1, s + 2], [s + 3, s + 4, s + 5]] for s in (3, 12, 21, 30)]
    assert np.shares_memory(array, raw)
    with pytest.raises(ValueError, match="read-only"):
        array[:] = 77


def test_a_file_larger_than_memory_can_be_mapped(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 42)
    assert open_bytes(path)[-1] == 0


def test_wide_values_are_read_as_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8) + np.arange(6, dtype="<f4").tobytes())
    (array,) = views(open_bytes(path), [Records(path, 8, 12, 2, (3,), "float32")])
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_nothing_outside_the_file_can_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(40))
    with pytest.raises((ValueError, TypeError)):
        views(open_bytes(path), [Records(path, 3, 10, 4, (8,), "uint8")])


def test_a_file_that_is_empty_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert open_bytes(tmp_path / "empty").size == 0
    with pytest.raises(DataError, match=r"cannot read .*absent: No such file"):
        open_bytes(tmp_path / "absent")


def resident(path: Path) -> int:
    """The bytes of a mapped file that are in this process's memory."""
    blocks = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    (block,) = (block for block in blocks if block.splitlines()[0].endswith(f" {path}"))
    found = re.search(r"^Rss: +(\d+) kB", block, re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def test_a_rank_reads_only_the_pages_of_the_samples_it_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of CIFAR-10's real size, 184 MB, all holes but for one record."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    origin = ORIGINS["cifar10"]
    path = cache.file_of("cifar10")
    path.parent.mkdir()
    with path.open("wb") as out:
        out.truncate(origin.size)
        out.seek(3073 * 40_000)
        out.write(bytes([7]) + bytes(each % 251 for each in range(3072)))
    data = load("cifar10", prepared=True)
    before = resident(path)
    chosen = torch.tensor([3, 40_000, 49_999])
    images, labels = data.train.inputs[chosen], data.train.targets[chosen]
    assert labels.tolist() == [0, 7, 0]
    assert images[1].flatten().tolist() == [each % 251 for each in range(3072)]
    # The kernel maps up to 64 KiB around a page that is touched.
    assert 0 < resident(path) - before <= 3 * 3 * 65_536
