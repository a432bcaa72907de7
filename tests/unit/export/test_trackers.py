"""TensorBoard reads what was written, and a tracker of somebody else is given the same."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import pytest
from event_files import scalars
from made_up import START, write_run

from paceline.errors import UsageError
from paceline.export.replay import replay
from paceline.export.trackers import TensorBoard, Tracked, check_tensorboard, hyperparameters, track_live
from paceline.export.values import NodeValues, Point, RankValues
from paceline.run.folder import rank_file
from paceline.run.recorder import Recorder
from paceline.run.records import Checkpoint, End, Epoch, FinalTest, NodeSample, Step, Traffic, Validation

STEP = Step(6, 1, 50.0, 0.25, 64, {"forward": 0.1, "wait": 0.05}, loss=0.5, lr=0.01, figures={"staleness": 2, "x": "y"})


class Collecting:
    """A tracker as somebody else might write one."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float], float]] = []
        self.options: dict[str, object] = {}
        self.closed = False

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self.points.append((step, dict(values), time))

    def hyperparameters(self, values: Mapping[str, str | bool | int | float]) -> None:
        self.options = dict(values)

    def close(self) -> None:
        self.closed = True


def test_a_line_has_these_values() -> None:
    values = RankValues()
    assert values.of(STEP) == Point(6, 50.0, {
        "train/loss": 0.5, "train/learning_rate": 0.01, "speed/samples_per_second": 256.0, "seconds/step": 0.25,
        "seconds/forward": 0.1, "seconds/wait": 0.05, "figures/staleness": 2.0,
    })  # fmt: skip
    assert values.of(Validation(1, 0.4, 0.9, metrics={"f1": 0.8}, step=7)) == Point(
        7, 50.0, {"validation/loss": 0.4, "validation/accuracy": 0.9, "validation/f1": 0.8}
    )
    assert values.of(Validation(1, 0.4)) == Point(7, 50.0, {"validation/loss": 0.4}), "of an earlier version"
    assert values.of(FinalTest(1, 0.3, step=7)) == Point(7, 50.0, {"test/loss": 0.3})
    own = values.of(Step(7, 1, 51.0, 0.5, 8, {}, tokens=100, metrics={"f1": 0.5}))
    assert own
    assert (own.values["speed/tokens_per_second"], own.values["train/f1"]) == (200.0, 0.5)
    values.of(STEP)
    assert values.of(Epoch(1, 3.0, 448, 0.6)) == Point(6, 50.0, {"epoch/loss": 0.6, "epoch/seconds": 3.0})
    assert values.of(Checkpoint(7, 51.0, 900, 0.2)) == Point(
        7, 51.0, {"checkpoint/seconds": 0.2, "checkpoint/bytes": 900.0}
    )
    assert values.of(End(52.0)) is None


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf")])
def test_what_is_not_a_finite_number_has_no_value(loss: float | None) -> None:
    point = RankValues().of(Step(0, 0, 1.0, 0.5, 8, {}, loss=loss))
    assert point == Point(0, 1.0, {"speed/samples_per_second": 16.0, "seconds/step": 0.5})


def test_a_node_has_its_cores_memory_and_the_network_that_carries_the_run() -> None:
    def sample(time: float, lo: int, eth: int) -> NodeSample:
        counted = {"lo": Traffic(lo, lo, 0, 0, 0, 0), "eth0": Traffic(eth, 2 * eth, 0, 0, 0, 0)}
        return NodeSample(time, 1.5, 10**9, interfaces=counted)

    for alone, bits in ((True, (800.0, 800.0)), (False, (80.0, 160.0))):
        values = NodeValues(alone=alone)
        assert values.of(sample(10.0, 0, 0)) == Point(0, 10.0, {"cores_busy": 1.5, "memory_bytes": 1e9})
        found = values.of(sample(12.0, 200, 20))
        assert found
        assert (found.step, found.values["bits_in_per_second"], found.values["bits_out_per_second"]) == (1, *bits)
        again = values.of(sample(14.0, 0, 0))
        assert again
        assert "bits_in_per_second" not in again.values, "the interface is a new one"


def test_tensorboard_reads_what_a_recorder_writes_as_it_trains(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0, track_live(tmp_path, 0, {"model": "mlp", "lr": 0.1, "steps": None}))
    for step in range(5):
        recorder.step(step, 0, 0.5, 64, {"forward": 0.1 * step}, loss=1 / (step + 1))
    recorder.write(Validation(0, 0.25, 0.75, step=5))
    recorder.close()
    read = scalars(tmp_path / "tensorboard" / "rank_0")
    assert [step for step, *_ in read["train/loss"]] == list(range(5))
    assert [value for *_, value in read["train/loss"]] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert [value for *_, value in read["speed/samples_per_second"]] == [128.0] * 5
    assert [(step, value) for step, _, value in read["validation/accuracy"]] == [(5, 0.75)]
    assert track_live(tmp_path, 1, {}) is None, "other ranks have nothing to add while it trains"


def test_a_run_that_is_continued_replaces_the_steps_that_it_makes_again(tmp_path: Path) -> None:
    for first, last, loss in ((0, 6, 1.0), (4, 8, 2.0)):  # two processes, as of a run that was killed
        before = set(tmp_path.iterdir())
        tracker = TensorBoard(tmp_path)
        for step in range(first, last):
            tracker.log(step, {"loss": loss}, START + step)
        if loss == 2.0:  # and a server that goes back to its checkpoint
            tracker.log(7, {"loss": 3.0}, START + 20)
            tracker.log(6, {"loss": 4.0}, START + 21)
        tracker.close()
        (made,) = set(tmp_path.iterdir()) - before
        made.rename(tmp_path / f"events.out.tfevents.{first}")
    assert scalars(tmp_path)["loss"] == [
        *((step, START + step, 1.0) for step in range(4)),
        *((step, START + step, 2.0) for step in (4, 5)),
        (6, START + 21, 4.0),
    ]


def test_what_is_known_later_than_later_steps_replaces_nothing(tmp_path: Path) -> None:
    """A checkpoint is written in the background, and an epoch may be recorded after a validation."""
    recorder = Recorder(tmp_path, 0, track_live(tmp_path, 0, {}))
    for step in range(6):
        recorder.step(step, 0, 0.5, 64, {})
        if step in (3, 5):
            recorder.write(Checkpoint(step - 1, START, 900, 0.2))
    recorder.write(Validation(0, 0.25, step=6))
    recorder.write(Epoch(0, 3.0, 384, 0.5))
    recorder.close()
    read = scalars(tmp_path / "tensorboard" / "rank_0")
    assert [step for step, *_ in read["seconds/step"]] == list(range(6))
    assert [step for step, *_ in read["checkpoint/bytes"]] == [2, 4]
    assert [step for step, *_ in read["validation/loss"]] == [6]
    assert [step for step, *_ in read["epoch/loss"]] == [5]


def test_a_tracker_of_somebody_else_is_given_every_rank_and_node(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [0.1] * 20, workers=2, losses=[1 / (1 + i) for i in range(20)],
                       hosts=("a", "b"), moves={"a": (1e6, 2e6)})  # fmt: skip
    made: dict[str, Collecting] = {}
    count = replay(folder, lambda path: made.setdefault(path.stem, Collecting()))
    assert made.keys() == {"rank_0", "rank_1", "node_a"}
    assert all(tracker.closed for tracker in made.values())
    assert count == sum(len(values) for tracker in made.values() for _, values, _ in tracker.points)
    for rank in (0, 1):
        points = made[f"rank_{rank}"].points
        assert [(step, values["train/loss"]) for step, values, _ in points] == [(i, 1 / (1 + i)) for i in range(20)]
        assert [time for *_, time in points] == pytest.approx([START + 0.1 * (i + 1) for i in range(20)])
        assert made[f"rank_{rank}"].options["strategy"] == "ring"
    assert max(values.get("bits_out_per_second", 0.0) for _, values, _ in made["node_a"].points) == pytest.approx(
        8 * 2e6 / 0.1, rel=0.01
    )
    some: dict[str, Collecting] = {}
    replay(folder, lambda path: some.setdefault(path.stem, Collecting()), range(5, 7))
    assert [step for step, *_ in some["rank_1"].points] == [5, 6]


def test_a_full_disk_ends_the_tracking_and_not_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Full(Collecting):
        def log(self, step: int, values: Mapping[str, float], time: float) -> None:
            raise OSError(28, "No space left on device")

    recorder = Recorder(tmp_path, 0, Tracked(Full()))
    for step in range(3):
        recorder.step(step, 0, 0.5, 64, {})
    recorder.close()
    assert rank_file(tmp_path, 0).read_text().count('"step"') >= 3
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_without_tensorboardx_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tensorboard("--tensorboard")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--tensorboard: tensorboardX is not installed; use `pip install 'paceline\["):
        check_tensorboard("--tensorboard")


def test_options_become_what_trackers_take() -> None:
    options = {"model": "mlp", "lr": 0.1, "workers": 2, "test": True, "hidden": [256, 64], "name": None}
    assert hyperparameters(options) == {"model": "mlp", "lr": 0.1, "workers": 2, "test": True, "hidden": "[256, 64]"}
