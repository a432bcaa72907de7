"""Whatever happens to the files of a checkpoint, no wrong values are ever loaded."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.manifest import Damaged, Manifest, Part, checkpoints, latest, verify
from paceline.checkpoint.save import Held, Saved, Saver
from paceline.checkpoint.state import Cut, hold
from paceline.data.course import Position

RANKS = 3


def state() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "model.a": torch.randn(7, 5),
        "model.b": torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        "model.c": torch.tensor(3),
        "optimizer.a.step": torch.tensor(2.0),
        "model.d": torch.randn(0, 4),
    }


def manifest(step: int) -> Callable[[tuple[Part, ...]], Manifest]:
    return lambda parts: Manifest(Position(step), {}, {}, parts)


def save(folder: Path, step: int, keep: int = 2) -> list[Saved | None]:
    """All ranks have the same, but for one tensor; one tensor is divided over them by columns."""
    everyone, wide = tuple(range(RANKS)), torch.arange(24.0).view(2, 12)
    savers = [Saver(folder, rank, everyone, keep, 10.0) for rank in everyone]
    for rank, saver in enumerate(savers):
        held = [hold(name, tensor, None, everyone) for name, tensor in state().items()]
        held.append(Held("model.own", torch.tensor([float(rank), float("inf")]), (2,), own=True))
        cut = Cut((2, 12), 1, 4 * rank, 4 * rank + 4)
        held.append(hold("model.wide", wide[:, cut.start : cut.stop], cut))
        saver.copy(held)
        saver.write(step, "test.1", {"rank": rank}, manifest(step))
    for saver in savers:
        saver.wait()
    return [saver.outcome() for saver in savers]


def check(checkpoint: Checkpoint) -> None:
    for name, tensor in state().items():
        assert torch.equal(checkpoint.tensor(name), tensor), name
    assert torch.equal(checkpoint.tensor("model.wide"), torch.arange(24.0).view(2, 12))
    assert torch.equal(checkpoint.tensor("model.own", 1), torch.tensor([1.0, float("inf")]))
    assert torch.equal(checkpoint.tensor("model.own"), torch.tensor([1.0, float("inf")]))  # the mean of 0, 1, 2


def test_what_is_saved_is_loaded_by_any_number_of_ranks(tmp_path: Path) -> None:
    assert all(saved and not saved.error for saved in save(tmp_path, 5))
    checkpoint = Checkpoint(tmp_path / "step_5")
    check(checkpoint)
    nhwc = state()["model.b"].permute(0, 2, 3, 1).reshape(-1)
    assert torch.equal(checkpoint.read("model.b", 0, 48, (0, 2, 3, 1)), nhwc)
    assert torch.equal(checkpoint.read("model.b", 5, 20, (0, 2, 3, 1)), nhwc[5:20])
    sizes = [part.bytes for part in checkpoint.manifest.parts]
    assert len(sizes) == RANKS
    assert torch.equal(checkpoint.read("model.wide", 6, 10, (1, 0)), torch.arange(24.0).view(2, 12).T.reshape(-1)[6:10])
    assert torch.equal(checkpoint.read("model.a", 5, 20), state()["model.a"].reshape(-1)[5:20])
    assert torch.equal(checkpoint.read("model.a", 5, 20, (1, 0)), state()["model.a"].T.reshape(-1)[5:20])


def test_a_copy_does_not_change_with_training(tmp_path: Path) -> None:
    values = torch.zeros(1000)
    saver = Saver(tmp_path, 0, [0], 2, 10.0)
    saver.copy([hold("model.a", values)])
    values.fill_(1.0)
    saver.write(1, "test", {}, manifest(1))
    saver.wait()
    assert not Checkpoint(tmp_path / "step_1").tensor("model.a").any()


def test_old_ones_go_when_a_new_one_is_complete(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step)
    assert [each.name for each in checkpoints(tmp_path)] == ["step_10", "step_3"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step_10", "step_3"]


def test_no_safetensors_header_is_believed_but_other_programs_can_read_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save(tmp_path, 1)
    found = {name for rank in range(RANKS) for name in load_file(tmp_path / "step_1" / f"part_{rank}.safetensors")}
    assert {"model.a", "model.wide@0", "model.own"} <= found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 1)
    save(folder, 2)
    return folder


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_or_a_cut_file_is_named_and_the_one_before_is_used(saved: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted((saved / "step_2").iterdir())))
    whole = path.read_bytes()
    changed = bytearray(whole)
    if data.draw(st.booleans()):
        changed[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del changed[data.draw(st.integers(0, len(whole) - 1)) :]
    try:
        path.write_bytes(changed)
        with pytest.raises(Damaged, match=path.name):
            verify(saved / "step_2")
        found = latest(saved)
        assert found is not None
        assert found[0].name == "step_1"
        assert path.name in str(found[2][0])
    finally:
        path.write_bytes(whole)
    verify(saved / "step_2")


def test_a_missing_file_is_named(saved: Path, tmp_path: Path) -> None:
    for name in ("manifest.json", "part_1.safetensors"):
        copy = tmp_path / name / "step_2"
        shutil.copytree(saved / "step_2", copy)
        (copy / name).unlink()
        with pytest.raises(Damaged, match=name):
            verify(copy)


def test_a_file_that_changes_after_it_was_verified_is_not_loaded(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "step_2", tmp_path / "step_2")
    checkpoint = Checkpoint(tmp_path / "step_2")
    part, piece = checkpoint.manifest.tensors["model.a"][0]
    data = bytearray((tmp_path / "step_2" / part.file).read_bytes())
    data[piece.offset] ^= 1
    (tmp_path / "step_2" / part.file).write_bytes(data)
    with pytest.raises(Damaged, match=r"model\.a"):
        checkpoint.tensor("model.a")


def test_if_a_rank_cannot_write_rank_0_says_who_and_nothing_is_left(tmp_path: Path) -> None:
    """Rank 1's file cannot be made: a folder has its name."""
    save(tmp_path, 1)
    savers = [Saver(tmp_path, rank, range(2), 2, 10.0) for rank in range(2)]
    (tmp_path / ".step_2.test.1" / "part_1.safetensors").mkdir(parents=True)
    for saver in savers:
        saver.copy([hold("model.a", torch.ones(3), None, (0, 1)), hold("model.b", torch.ones(3), None, (0, 1))])
        saver.write(2, "test.1", {}, manifest(2))
    for saver in savers:
        saver.wait()
    outcome = savers[0].outcome()
    assert outcome is not None
    assert outcome.error == "rank 1: Is a directory"
    assert [each.name for each in tmp_path.iterdir()] == ["step_1"]
    assert threading.active_count() >= 1


def test_a_part_that_will_not_come_is_not_waited_for(tmp_path: Path) -> None:
    """Rank 1 was killed before it could write; the checkpoint after that is complete."""
    savers = [Saver(tmp_path, rank, range(2), 2, 1e6) for rank in range(2)]
    for step, writing in ((1, savers[:1]), (2, savers)):
        for saver in writing:
            saver.copy([hold("model.a", torch.ones(3), None, (0, 1)), hold("model.b", torch.ones(3), None, (0, 1))])
            saver.write(step, "test.1", {}, manifest(step))
        if step == 1:
            assert savers[0].busy
            savers[0].abandon()
        for saver in writing:
            saver.wait()
    outcomes = [savers[0].outcome() for _ in range(2)]
    assert [outcome and outcome.error for outcome in outcomes] == [
        "a rank was restarted before rank 1 had written its part",
        "",
    ]
    assert [each.name for each in tmp_path.iterdir()] == ["step_2"]
