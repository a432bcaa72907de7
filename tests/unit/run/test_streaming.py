"""Lines that are read one by one are those that are read all at once."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from raw_lines import RawWriter

from paceline.run.lines import last_step, read_lines, stream_lines
from paceline.run.records import Epoch, Resumed, Start, Step, Validation

KINDS = (Start, Resumed, Step, Epoch, Validation)


def write(path: Path, *steps: int) -> None:
    lines = RawWriter(path)
    lines.write("start", rank=0, time=1.0)
    for step in steps:
        lines.write("step", step=step, epoch=step // 4, time=2.0 + step, seconds=1.0, samples=8, spans={})
        if step % 4 == 3:
            lines.write("epoch", epoch=step // 4, seconds=4.0, samples=32)
            lines.write("validation", epoch=step // 4, loss=0.5, step=step + 1)
    lines.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run of 10 steps that was continued twice, with a line that a crash cut short and one of an unknown kind."""
    path = tmp_path / "rank_0.jsonl"
    write(path, *range(7))
    with path.open("a") as file:
        file.write('{"kind": "step", "step": 7, "epo')
    for start in (5, 3):
        lines = RawWriter(path)
        lines.write("resumed", step=start, epoch=start // 4, used=0, time=50.0)
        lines.write("of a later version", step=start)
        lines.close()
        write(path, *range(start, 10))
    return path


def test_what_was_superseded_is_left_out_as_when_all_are_read_at_once(path: Path) -> None:
    found = list(stream_lines(path, *KINDS))
    assert found == list(read_lines(path, *KINDS))
    assert [line.step for line in found if isinstance(line, Step)] == list(range(10))
    assert list(stream_lines(path, Epoch)) == list(read_lines(path, Epoch))
    assert list(stream_lines(path.with_name("none"), *KINDS)) == []


def test_steps_can_be_chosen_and_other_lines_stay(path: Path) -> None:
    found = list(stream_lines(path, *KINDS, steps=range(4, 6)))
    assert [line.step for line in found if isinstance(line, Step)] == [4, 5]
    others = [line for line in read_lines(path, *KINDS) if not isinstance(line, Step)]
    assert [line for line in found if not isinstance(line, Step)] == others


def test_a_step_is_found_whatever_the_order_of_its_fields(tmp_path: Path) -> None:
    text = '{"epoch": 0, "time": 1.0, "samples": 8, "seconds": 1.0, "spans": {}, "step": %d, "kind" : "step"}\n'
    (tmp_path / "a").write_text("".join(text % step for step in range(5)))
    assert [line.step for line in stream_lines(tmp_path / "a", Step, steps=range(2, 4))] == [2, 3]


def test_lines_come_before_the_rest_is_read_and_a_wrong_one_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "rank_3.jsonl"
    write(path, 0, 1)
    lines = RawWriter(path)
    lines.write("step", step="two", epoch=0, time=1.0, seconds=1.0, samples=8, spans={})
    lines.close()
    found = stream_lines(path, Step)
    assert [line.step for line in itertools.islice(found, 2)] == [0, 1]
    with pytest.raises(ValueError, match=r"rank_3\.jsonl: step is 'two'"):
        next(found)


def test_the_last_step_is_found_from_the_end_of_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert last_step(path) == 9
    monkeypatch.setattr("paceline.run.lines.TAIL", 400)
    assert last_step(path) == 9
    (path.parent / "empty").touch()
    assert last_step(path.parent / "empty") is None
    assert last_step(path.parent / "none") is None
