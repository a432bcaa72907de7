"""Files that are whole or not there, and records that outlive a crash."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.records import COMPLETED, LineWriter, Summary, read_lines, read_summary, write_summary, write_whole

SUMMARY = Summary(
    status=COMPLETED,
    strategy="ring",
    workers=2,
    transport="gloo",
    model="mnist-cnn",
    data="mnist-mini",
    batch_size=128,
    global_batch=256,
    epochs=2,
    seed=7,
    failed_rank=0,
    error="größe: “x”\nline two",
    epoch_seconds=[1.25, 0.1 + 0.2],
    train_loss=[2.3, 1e-300],
    bytes_sent=[2**60, 0],
)


def test_a_summary_reads_back_as_it_was_written(tmp_path: Path) -> None:
    write_summary(tmp_path, SUMMARY)
    assert read_summary(tmp_path) == SUMMARY
    assert json.loads((tmp_path / "summary.json").read_text())["schema"] == 1
    write_summary(tmp_path, Summary(**{**SUMMARY.as_dict(), "error": None, "steps": 9}))
    again = read_summary(tmp_path)
    assert again is not None
    assert (again.error, again.steps) == (None, 9)


def known() -> dict[str, Any]:
    return SUMMARY.as_dict()


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        json.dumps(known())[:-40],
        "[]",
        "3",
        json.dumps({"status": "completed"}),
        json.dumps(known() | {"colour": "red"}),
        json.dumps(known() | {"schema": 2}),
        b"\xff\xfe{}",
    ],
    ids=["none", "empty", "half", "list", "number", "too-little", "too-much", "later-schema", "binary"],
)
def test_what_is_not_a_whole_summary_of_ours_is_none(tmp_path: Path, content: str | bytes | None) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert read_summary(tmp_path) is None


def test_write_whole_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ("a long first text\n" * 1000, "größe\n", ""):
        write_whole(path, text)
        assert path.read_text() == text
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("old", [None, "the old text"])
@pytest.mark.parametrize("broken", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=["disk", "ctrl-c"])
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str | None, broken: str, error: BaseException
) -> None:
    path = tmp_path / "a.json"
    if old is not None:
        path.write_text(old)

    def fail(*_: object) -> None:
        assert path.exists() == (old is not None), "seen before it was whole"
        raise error

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(type(error)):
        write_whole(path, "the new text")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == ([("a.json", old)] if old is not None else [])


def test_a_text_that_cannot_be_encoded_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "the old text")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "x" * 100_000 + "\udcff")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.json", "the old text")]


def test_the_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any) -> Any:
            calls.append(name)
            return real(*args)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, watched(name))
    write_whole(tmp_path / "a", "text")
    assert calls == ["fsync", "replace"]


def test_lines_read_back_in_order_and_a_later_writer_appends(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    for step in (0, 1):
        writer = LineWriter(path)
        writer.write("step", step=step, text="größe\n\u2028")
        writer.flush()
        assert len(list(read_lines(path))) == step + 1
        writer.close()
    assert list(read_lines(path)) == [{"kind": "step", "step": s, "text": "größe\n\u2028"} for s in (0, 1)]


@pytest.mark.parametrize("cut", [1, 10, 27])
def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "rank_0.jsonl"
    whole = '{"kind": "start"}\n{"kind": "step", "step": 0}\n'
    path.write_text(whole[:-cut])
    kinds = [record["kind"] for record in read_lines(path)]
    assert kinds == (["start", "step"] if cut == 1 else ["start"])


def test_a_later_writer_does_not_lose_its_first_line_to_one_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    path.write_text('{"kind": "start"}\n{"kind": "st')
    writer = LineWriter(path)
    writer.write("end")
    writer.close()
    assert [record["kind"] for record in read_lines(path)] == ["start", "end"]


def test_what_is_no_record_is_left_out_and_no_file_has_none(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    path.write_text('3\n"text"\n[]\n\0\0\0\n{"kind": "end"}\n')
    assert list(read_lines(path)) == [{"kind": "end"}]
    assert list(read_lines(tmp_path / "none.jsonl")) == []


def strictly(text: str) -> Any:
    """As a parser that knows JSON alone reads it."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_written_as_null_and_read_as_no_number(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    values = SUMMARY.as_dict() | {"train_loss": [2.3, nan], "test_loss": inf, "lost_workers": [{"x": (nan, 1)}]}
    write_summary(tmp_path, Summary(**values))
    text = (tmp_path / "summary.json").read_text()
    assert strictly(text)["train_loss"] == [2.3, None]
    again = read_summary(tmp_path)
    assert again is not None
    assert again.train_loss[0] == 2.3
    assert math.isnan(again.train_loss[1])
    assert (again.test_loss, again.lost_workers) == (None, [{"x": [None, 1]}])
    lines = LineWriter(tmp_path / "rank_0.jsonl")
    lines.write("step", loss=nan, spans={"wait": -inf})
    lines.close()
    assert strictly((tmp_path / "rank_0.jsonl").read_text()) == {"kind": "step", "loss": None, "spans": {"wait": None}}


@pytest.mark.parametrize("word", ["NaN", "Infinity", "1e400", "1e19", str(10**20), "9" * 5000, "[" * 5000])
def test_a_number_that_is_not_json_or_absurdly_large_is_no_record(tmp_path: Path, word: str) -> None:
    path = tmp_path / "rank_0.jsonl"
    path.write_text(f'{{"kind": "step", "loss": {word}}}\n{{"kind": "end"}}\n')
    assert [record["kind"] for record in read_lines(path)] == ["end"]
    (tmp_path / "summary.json").write_text(json.dumps(known()).replace("2.3", word))
    assert read_summary(tmp_path) is None


def test_a_pipe_in_a_run_folder_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("summary.json", "rank_0.jsonl"):
        os.mkfifo(tmp_path / name)
    assert read_summary(tmp_path) is None
    assert list(read_lines(tmp_path / "rank_0.jsonl")) == []


def test_a_summary_knows_its_folder_and_the_file_does_not(tmp_path: Path) -> None:
    write_summary(tmp_path, summary := Summary(**known()))
    assert summary.folder == tmp_path
    again = read_summary(tmp_path)
    assert again is not None
    assert again.folder == tmp_path
    assert "folder" not in strictly((tmp_path / "summary.json").read_text())
