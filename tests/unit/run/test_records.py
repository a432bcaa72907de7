"""Files that are whole or not there, and records that outlive a crash."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from raw_lines import raw_lines

from paceline.launch.folder import begin_summary
from paceline.layout import Grid
from paceline.run.atomic import write_whole
from paceline.run.folder import read_bench, read_summary, write_bench, write_summary
from paceline.run.lines import LineWriter, read_lines, read_sound_lines
from paceline.run.records import (
    COMPLETED,
    MINOR,
    Bench,
    End,
    Epoch,
    Error,
    FinalTest,
    Signal,
    Start,
    Summary,
    Validation,
)
from paceline.spec import resolve

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
    write_summary(tmp_path, replace(SUMMARY, error=None, steps=9))
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
        json.dumps(known() | {"minor": MINOR + 1, "workers": "two"}),
        b"\xff\xfe{}",
    ],
    ids=["none", "empty", "half", "list", "number", "too-little", "too-much", "later-schema", "later-minor", "binary"],
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
@pytest.mark.parametrize("broken", ["fsync", "replace"])
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
    assert calls == ["fsync", "replace", "fsync"], "the file, its name, the folder that has the name"


def test_lines_read_back_in_order_and_a_later_writer_appends(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    written = [Error("größe\n\u2028", time, after=(2, 3), peer=peer) for time, peer in ((0.5, None), (1.5, 0))]
    for number, line in enumerate(written, 1):
        writer = LineWriter(path)
        writer.write(line)
        writer.flush()
        assert len(list(raw_lines(path))) == number
        writer.close()
    assert list(read_lines(path, Error)) == written
    assert list(raw_lines(path))[1] == {
        "kind": "error",
        "error": "größe\n\u2028",
        "time": 1.5,
        "after": [2, 3],
        "exit_code": 1,
        "peer": 0,
    }


def test_a_reader_takes_the_kinds_that_it_asks_for_and_leaves_out_what_a_later_version_adds(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    start = '{"kind": "start", "rank": 0, "time": 1, "schema": 1, "minor": 7, "new": []}'
    path.write_text(f'{{"kind": "of-tomorrow", "step": -1}}\n{start}\n')
    assert list(read_lines(path, Start, End)) == [Start(0, 1.0, minor=7)]
    assert list(read_lines(path, End)) == []


def test_a_line_with_a_value_that_cannot_be_is_an_error_that_names_the_file_or_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    path.write_text('{"kind": "end", "time": "noon"}\n{"kind": "end", "time": 2.0}\n')
    with pytest.raises(ValueError, match=r"rank_0\.jsonl: time is 'noon', and a number"):
        list(read_lines(path, End))
    assert list(read_sound_lines(path, End)) == [End(2.0)]


@pytest.mark.parametrize("cut", [1, 10, 27])
def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "rank_0.jsonl"
    whole = '{"kind": "end", "time": 1}\n{"kind": "signal", "signal": 15, "time": 2}\n'
    path.write_text(whole[:-cut])
    kinds = [line.kind for line in read_lines(path, End, Signal)]
    assert kinds == (["end", "signal"] if cut == 1 else ["end"])


def test_a_later_writer_does_not_lose_its_first_line_to_one_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    path.write_text('{"kind": "signal", "signal": 15, "time": 2}\n{"kind": "st')
    writer = LineWriter(path)
    writer.write(End(3.0))
    writer.close()
    assert [line.kind for line in read_lines(path, End, Signal)] == ["signal", "end"]


def test_what_is_no_record_is_left_out_and_no_file_has_none(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    path.write_text('3\n"text"\n[]\n\0\0\0\n{"kind": "end", "time": 1}\n')
    assert list(read_lines(path, End)) == [End(1.0)]
    assert list(read_lines(tmp_path / "none.jsonl", End)) == []


def strictly(text: str) -> Any:
    """As a parser that knows JSON alone reads it."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_written_as_null_and_read_as_no_number(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    odd = replace(SUMMARY, train_loss=[2.3, nan], test_loss=inf, figures={"ring": {"x": [(nan, 1)]}})
    write_summary(tmp_path, odd)
    text = (tmp_path / "summary.json").read_text()
    assert strictly(text)["train_loss"] == [2.3, None]
    again = read_summary(tmp_path)
    assert again is not None
    assert again.train_loss[0] == 2.3
    assert math.isnan(again.train_loss[1])
    assert (again.test_loss, again.own_figures) == (None, {"x": [[None, 1]]})
    lines = LineWriter(tmp_path / "rank_0.jsonl")
    lines.write(Epoch(0, 1.0, 8, loss=nan, accuracy=-inf))
    lines.close()
    found = strictly((tmp_path / "rank_0.jsonl").read_text())
    assert found == {"kind": "epoch", "epoch": 0, "seconds": 1.0, "samples": 8, "loss": None, "accuracy": None}


@pytest.mark.parametrize("word", ["NaN", "Infinity", "1e400", "1e19", str(10**20), "9" * 5000, "[" * 5000])
def test_a_number_that_is_not_json_or_absurdly_large_is_no_record(tmp_path: Path, word: str) -> None:
    path = tmp_path / "rank_0.jsonl"
    path.write_text(f'{{"kind": "signal", "signal": 2, "time": {word}}}\n{{"kind": "end", "time": 1}}\n')
    assert [line.kind for line in read_lines(path, Signal, End)] == ["end"]
    (tmp_path / "summary.json").write_text(json.dumps(known()).replace("2.3", word))
    assert read_summary(tmp_path) is None


def test_a_pipe_in_a_run_folder_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("summary.json", "rank_0.jsonl"):
        os.mkfifo(tmp_path / name)
    assert read_summary(tmp_path) is None
    assert list(read_lines(tmp_path / "rank_0.jsonl", End)) == []


def test_a_summary_knows_its_folder_and_the_file_does_not(tmp_path: Path) -> None:
    write_summary(tmp_path, summary := replace(SUMMARY))
    assert summary.folder == tmp_path
    again = read_summary(tmp_path)
    assert again is not None
    assert again.folder == tmp_path
    assert "folder" not in strictly((tmp_path / "summary.json").read_text())


def test_a_task_without_an_accuracy_has_a_loss_and_metrics(tmp_path: Path) -> None:
    epoch = Epoch(0, 1.0, 64, 2.0, metrics={"perplexity": 7.4})
    validation = Validation(0, 800.0, metrics={"perplexity": math.inf})
    test = FinalTest(0, 1.5, samples=9, metrics={"perplexity": 4.5})
    path = tmp_path / "rank_0.jsonl"
    with closing(LineWriter(path)) as lines:
        for line in (epoch, validation, test):
            lines.write(line)
    assert list(read_lines(path, Epoch)) == [epoch]
    assert list(read_lines(path, FinalTest)) == [test]
    [again] = read_lines(path, Validation)
    assert (again.loss, again.accuracy) == (800.0, None)
    assert math.isnan(again.metrics["perplexity"])  # it is too large for JSON
    summary = replace(SUMMARY, task="language-model")
    summary.add_epochs([epoch])
    summary.add_validations([validation])
    summary.add_test(test)
    write_summary(tmp_path, summary)
    found = read_summary(tmp_path)
    assert found is not None
    assert (found.task, found.train_accuracy, found.validation_accuracy) == ("language-model", [], [])
    assert (found.train_metrics, found.test_metrics) == ([epoch.metrics], test.metrics)
    assert (found.validation_loss, found.test_loss, found.test_accuracy) == ([800.0], 1.5, None)


def test_fields_of_a_later_minor_version_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(known() | {"minor": MINOR + 1, "energy": {"joules": [1.5]}}))
    summary = read_summary(tmp_path)
    assert summary is not None
    assert summary.strategy == "ring"
    summary.steps = 9
    write_summary(tmp_path, summary)
    again = strictly(path.read_text())
    assert (again["energy"], again["minor"], again["steps"]) == ({"joules": [1.5]}, MINOR + 1, 9)


def test_summaries_of_minor_version_0_still_open(tmp_path: Path) -> None:
    """They had the figures of every strategy as fields, and some options of the spec."""
    old = {"schema": 1, "status": "completed", "strategy": "ps-sync", "workers": 4, "transport": "zmq", "model": "mlp",
           "data": "mnist-mini", "batch_size": 8, "global_batch": 32, "epochs": 1, "seed": 0, "servers": 1,
           "stages": 1, "tensor": 1, "microbatches": 1, "schedule": None, "averaging": None, "recompute": False,
           "staleness": {"0": 12}, "staleness_max": 0, "staleness_mean": 0.0, "gradients": [0, 3, 3, 3, 3],
           "lost_workers": [], "returns": [], "dropped_messages": {}, "security": "ipc",
           "wait_seconds": [0.0] * 5}  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(old))
    summary = read_summary(tmp_path)
    assert summary is not None
    assert summary.grid == Grid(4)
    assert summary.own_figures["gradients"] == [0, 3, 3, 3, 3]
    pipeline = old | {"strategy": "pipeline", "stages": 2, "servers": 0, "transport": "gloo"}
    (tmp_path / "summary.json").write_text(json.dumps(pipeline))
    summary = read_summary(tmp_path)
    assert summary is not None
    assert summary.grid == Grid(2, 2)
    (tmp_path / "summary.json").write_text(json.dumps(pipeline | {"stages": 3}))
    assert read_summary(tmp_path) is None


@pytest.mark.parametrize("version", [{}, {"minor": 1}, {"minor": 3}])
def test_samples_per_second_of_earlier_versions_were_called_images_per_second(
    tmp_path: Path, version: dict[str, int]
) -> None:
    names = ("samples_per_second", "tokens_per_second", "minor", "grid", "figures")
    old = {name: value for name, value in known().items() if name not in names}
    (tmp_path / "summary.json").write_text(json.dumps(old | version | {"images_per_second": 1234.5}))
    summary = read_summary(tmp_path)
    assert summary is not None
    assert (summary.samples_per_second, summary.tokens_per_second) == (1234.5, None)
    assert "images_per_second" not in summary.as_dict()
    (tmp_path / "summary.json").write_text(json.dumps(known() | {"images_per_second": 1234.5}))
    assert read_summary(tmp_path) is None  # this version has no such field
    paper = ({"match": {"workers": 2}, "images_per_second": 100.0},)
    write_bench(tmp_path, Bench("", "", "", "", (), False, 1, (), paper, (), {}, (), {}))
    found = read_bench(tmp_path)
    assert found is not None
    assert found.paper == ({"match": {"workers": 2}, "samples_per_second": 100.0},)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_a_file_has_the_mode_of_any_new_file_whoever_wrote_it(tmp_path: Path, mask: int) -> None:
    """safetensors makes private files."""
    code = (f"import os, pathlib, torch; os.umask({mask}); from paceline.run.atomic import write_whole; "
            "from paceline.checkpoint.file_format import save; write_whole(pathlib.Path('a'), 'a'); "
            "save({'w': torch.zeros(1)}, pathlib.Path('b')); open('c', 'w').close()")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert {(path.name, path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {
        (name, 0o666 & ~mask) for name in "abc"
    }


def test_a_run_records_its_task_from_its_start() -> None:
    spoken = {"data": "shakespeare", "model": "gpt", "task": "language-model"}
    assert begin_summary(resolve(("flag", spoken)).spec).task == "language-model"
    assert begin_summary(resolve().spec).task == "classification"
