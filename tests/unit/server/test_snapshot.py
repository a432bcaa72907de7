"""A snapshot is whole or not there; the latest two stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open

from paceline.server import snapshot
from paceline.server.snapshot import Snapshots


def save(store: Snapshots, number: int) -> None:
    store.save(number, {"3.values": torch.arange(5) + number, "3.step": torch.tensor(2.5)}, {"at": number, "é": [1.5]})


def test_a_snapshot_comes_back_as_it_was(tmp_path: Path) -> None:
    store = Snapshots(tmp_path / "new", 1)
    assert store.numbers() == []
    save(store, 4)
    tensors, facts = Snapshots(tmp_path / "new", 1).load(4)
    assert torch.equal(tensors["3.values"], torch.arange(5) + 4)
    assert tensors["3.step"].item() == 2.5
    assert facts == {"at": 4, "é": [1.5]}


def test_what_is_written_beside_the_tensors_is_json_everywhere(tmp_path: Path) -> None:
    Snapshots(tmp_path, 0).save(1, {"values": torch.ones(1)}, {"loss": float("nan")})
    with safe_open(tmp_path / "server_0_1.safetensors", "pt") as file:
        assert file.metadata() == {"facts": '{"loss": null}'}


def test_the_latest_two_are_kept(tmp_path: Path) -> None:
    store = Snapshots(tmp_path, 0)
    for number in (5, 10, 95, 100):
        save(store, number)
    assert store.numbers() == [95, 100]
    assert len(os.listdir(tmp_path)) == 2


def test_servers_do_not_touch_each_other(tmp_path: Path) -> None:
    one, eleven = Snapshots(tmp_path, 1), Snapshots(tmp_path, 11)
    for number in (1, 2, 3):
        save(one, number)
    save(eleven, 1)
    eleven.forget_after(0)
    assert (one.numbers(), eleven.numbers()) == ([2, 3], [])


def test_what_comes_after_is_forgotten(tmp_path: Path) -> None:
    store = Snapshots(tmp_path, 0)
    save(store, 5)
    save(store, 10)
    store.forget_after(10)
    assert store.numbers() == [5, 10]
    store.forget_after(5)
    assert store.numbers() == [5]
    store.forget_after(0)
    assert store.numbers() == []


def test_a_write_that_breaks_off_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Snapshots(tmp_path, 0)
    save(store, 5)

    def half(_tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "save_file", half)
        with pytest.raises(OSError, match="full"):
            save(store, 10)
    assert store.numbers() == [5]
    assert store.load(5)[1]["at"] == 5
    save(store, 10)
    assert store.numbers() == [5, 10]


def test_other_files_are_no_snapshots(tmp_path: Path) -> None:
    for name in ("server_0_x.safetensors", "server_0_5.safetensors.tmp", ".server_0", "server_1_7.safetensors"):
        (tmp_path / name).write_bytes(b"")
    assert Snapshots(tmp_path, 0).numbers() == []


def test_reading_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "server_0_5.safetensors").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(SafetensorError):
        Snapshots(tmp_path, 0).load(5)
