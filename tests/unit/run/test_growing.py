"""A file that grows is read from where reading stopped, whatever is at its end."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from raw_lines import RawWriter

from paceline.run.growing import BLOCK, GrowingLines, ReplacedError
from paceline.run.records import End, Line, Planned, Step, Validation


def step(number: int, **more: Any) -> dict[str, Any]:
    values = {"step": number, "epoch": 0, "time": 1e9 + number, "seconds": 1.0, "samples": 4, "spans": {}}
    return {"kind": "step", **values, **more}


def numbers(lines: list[Line]) -> list[int]:
    return [line.step for line in lines if isinstance(line, Step)]


def test_each_time_what_is_new_is_read_and_an_unfinished_line_when_it_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    lines = GrowingLines(path, Step, End)
    assert lines.read() == []  # there is no file yet
    text = "".join(json.dumps(step(number)) + "\n" for number in range(3))
    for end in range(len(text) + 1):  # byte by byte, every place where a flush may end
        with path.open("a") as file:
            file.write(text[end - 1 : end] if end else "")
        whole = text[:end].count("\n") - text[: end - 1].count("\n") if end else 0
        assert len(lines.read()) == whole
    with path.open("a") as file:
        file.write('{"kind": "end", "time": 5}\n{"kind": "of a later version"}\n')
    assert lines.read() == [End(5.0)]
    assert lines.read() == []
    assert lines.faults == {}


def test_a_long_file_is_thinned_out_but_its_end_and_its_other_lines_are_read_whole(tmp_path: Path) -> None:
    path, many = tmp_path / "rank_0.jsonl", 60_000
    written = RawWriter(path)
    written.write("planned", steps=many, epochs=1)
    for number in range(many):
        written.write(**step(number))
        if number % 10_000 == 9999:
            written.write("validation", epoch=0, loss=1.0, step=number + 1)
    written.close()
    lines = GrowingLines(path, Planned, Step, Validation)
    found = lines.read()
    assert path.stat().st_size > 8 * BLOCK
    assert found[0] == Planned(many, 1)
    assert [line.step for line in found if isinstance(line, Validation)] == list(range(10_000, many + 1, 10_000))
    steps = numbers(found)
    assert steps == sorted(set(steps))
    assert steps[-2000:] == list(range(many - 2000, many))
    assert len(steps) < many / 4
    assert max(after - before for before, after in pairwise(steps)) < many / 100
    written = RawWriter(path)
    written.write(**step(many))
    written.close()
    assert numbers(lines.read()) == [many]


def test_of_the_first_line_and_the_last_bytes_whole_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    path.write_text("".join(json.dumps(step(number)) + "\n" for number in range(1000)))
    lines = GrowingLines(path, Step, last=2000)
    first, *found = numbers(lines.read())
    assert first == 0
    assert found == list(range(found[0], 1000))
    assert 10 < len(found) < 25
    assert lines.faults == {}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (json.dumps(step(1, loss="low")), "1 line of rank_0.jsonl cannot be read: loss is 'low', and a number"),
        ('{"kind": "step", "st', "1 line of rank_0.jsonl cannot be read: "),
        ("\0\xff" * 9, "1 line of rank_0.jsonl cannot be read: "),
        ("x" * (2 * BLOCK), "rank_0.jsonl cannot be read: "),
    ],
    ids=["wrong", "cut", "binary", "long"],
)
def test_what_cannot_be_read_is_left_out_and_said(tmp_path: Path, bad: str, said: str) -> None:
    path = tmp_path / "rank_0.jsonl"
    path.write_text(json.dumps(step(0)) + f"\n{bad}\n" + json.dumps(step(2)) + "\n", encoding="latin-1")
    lines = GrowingLines(path, Step)
    assert numbers(lines.read()) == [0, 2]
    assert said in lines.faults["lines"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank_0.jsonl")
    lines = GrowingLines(tmp_path / "rank_0.jsonl", Step)
    assert lines.read() == []
    assert "not a regular file" in lines.faults["file"]


def test_a_file_that_was_cut_replaced_or_removed_is_another_file(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    text = "".join(json.dumps(step(number)) + "\n" for number in range(9))
    for change in (
        lambda: path.write_text(text[:100]),
        lambda: (tmp_path / "new").write_text(text) and (tmp_path / "new").rename(path),
        path.unlink,
    ):
        path.write_text(text)
        lines = GrowingLines(path, Step)
        assert len(lines.read()) == 9
        change()
        with pytest.raises(ReplacedError):
            lines.read()
