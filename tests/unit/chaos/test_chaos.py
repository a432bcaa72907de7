"""When a storm strikes, and what the records of a training say about what it cost."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest
from made_up import write_run
from raw_lines import RawWriter

from paceline.chaos.outcome import judge
from paceline.chaos.storm import KILL, STOP, Fault, Often, moments, read_often
from paceline.errors import UsageError
from paceline.run.folder import read_summary


@pytest.mark.parametrize(
    ("kind", "text", "often"),
    [
        (KILL, "every=30s", Often(30.0)),
        (KILL, "every=1.5m", Often(90.0)),
        (STOP, "every=500ms,for=2s", Often(0.5, 2.0)),
        (STOP, "every=1h", Often(3600.0, 10.0)),
    ],
)
def test_how_often_is_said_in_words(kind: str, text: str, often: Often) -> None:
    assert read_often(kind, text) == often


@pytest.mark.parametrize("text", ["30s", "every=30", "every=0s", "every=-1s", "for=3s", "every=3s,for=1s", "every=x"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="such as every=30s"):
        read_often(KILL, text)


def test_a_seed_repeats_the_moments_whose_mean_is_as_asked() -> None:
    often = {KILL: Often(10.0), STOP: Often(40.0)}
    first = list(islice(moments(often, random.Random(3)), 5000))
    assert first == list(islice(moments(often, random.Random(3)), 5000))
    assert [at for at, _ in first] == sorted(at for at, _ in first)
    kills = sum(kind == KILL for _, kind in first)
    assert first[-1][0] / kills == pytest.approx(10.0, rel=0.1)
    assert first[-1][0] / (5000 - kills) == pytest.approx(40.0, rel=0.1)


START = 1000.0


def made_up(folder: Path) -> Path:
    """Two workers make 10 updates a second. Worker 1 is killed after 5 s; 0.5 s later worker 0 goes on alone, at half
    the speed; 2 s after the loss, worker 1 is back. The update that was under way is made again.
    """
    write_run(folder, [0.1], workers=2)
    for rank in range(2):
        (folder / f"rank_{rank}.jsonl").unlink()
    files = [RawWriter(folder / f"rank_{rank}.jsonl") for rank in range(2)]

    def regroup(rank: int, number: int, members: list[int], step: int, time: float, why: str = "") -> None:
        files[rank].write("regrouped", generation=number, members=members, step=step, time=time, seconds=0.1, why=why)

    def update(rank: int, step: int, time: float, seconds: float = 0.1) -> None:
        files[rank].write("step", step=step, epoch=0, time=time, seconds=seconds, samples=64, spans={})

    for rank in range(2):
        files[rank].write("start", rank=rank, time=START - 1, schema=1, minor=7)
        regroup(rank, 1, [0, 1], 0, START)
        for step in range(50):
            update(rank, step, START + 0.1 * (step + 1))
    update(1, 50, START + 5.0)  # only worker 1 has made it when it is killed
    regroup(0, 2, [0], 50, START + 5.5, "worker 1: its process was killed by signal 9")
    for step in range(50, 57):
        update(0, step, START + 5.7 + 0.2 * (step - 50), 0.2)
    for rank in range(2):
        regroup(rank, 3, [0, 1], 57, START + 7.0, "worker 1 joins")
        for step in range(57, 107):
            update(rank, step, START + 7.1 + 0.1 * (step - 57))
    for file in files:
        file.close()
    return folder


def test_the_cost_of_a_loss_is_read_from_the_records(tmp_path: Path) -> None:
    folder = made_up(tmp_path / "run")
    summary = read_summary(folder)
    assert summary is not None
    found = judge(folder, summary, [Fault(START + 5.0, KILL, 1), Fault(START + 9.0, STOP, 0, 0.1)], seed=4)
    assert (found.generations, found.again) == (3, 1)
    assert found.recovered == pytest.approx([0.7])
    assert found.back == pytest.approx([2.0])
    assert found.seconds == pytest.approx(12.0)
    assert found.goodput == pytest.approx(107 / 120)
    # Both worked for 5 s and for 5 s, one for 1.4 s, of 24 s of two workers.
    assert found.participation == pytest.approx((2 * 10 + 1.4) / 24)
    assert "0.70 s (median), 0.70 s (95 %), 0.70 s (worst) of 1" in "\n".join(found.lines())
