"""The bar of a training whose rank 0 cannot print."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from raw_lines import RawWriter

import paceline
from paceline.launch.notebook import StepBar, bar_stream, has_descriptor, in_notebook


def test_a_stream_without_a_descriptor_gets_a_bar_and_others_what_rank_0_prints(tmp_path: Path) -> None:
    text = io.StringIO()
    assert bar_stream(text) is text
    assert not has_descriptor(text)
    with (tmp_path / "file").open("w") as file:
        assert has_descriptor(file)
        assert bar_stream(file) is None
    assert bar_stream(None) is None, "a script that does not ask for progress is not shown any"


def test_a_notebook_gets_a_bar_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its standard output has a descriptor, but that of the terminal in which the kernel was started."""
    module = ModuleType("IPython")
    monkeypatch.setitem(sys.modules, "IPython", module)
    for shell, notebook in ((None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=object()), True)):
        monkeypatch.setattr(module, "get_ipython", lambda shell=shell: shell, raising=False)
        assert in_notebook() is notebook
        assert bar_stream(None) is (sys.stdout if notebook else None)


def write_steps(path: Path, first: int, last: int, loss: float) -> None:
    lines = RawWriter(path)
    lines.write("planned", steps=40, epochs=1)
    for step in range(first, last):
        lines.write("step", step=step, epoch=0, time=1.0, seconds=0.5, samples=64, spans={}, loss=loss)
    lines.close()


def test_the_bar_shows_the_steps_of_the_file_also_of_a_run_that_is_continued(tmp_path: Path) -> None:
    text = io.StringIO()
    write_steps(tmp_path / "rank_0.jsonl", 0, 10, 0.5)
    with StepBar(tmp_path, text):
        write_steps(tmp_path / "rank_0.jsonl", 8, 30, 0.25)
    shown = text.getvalue().split("\r")[-1]
    assert "75%" in shown
    assert "30/40" in shown
    assert "loss=0.2500, samples/s=128" in shown


def test_a_run_that_did_not_begin_ends_the_bar(tmp_path: Path) -> None:
    text = io.StringIO()
    with StepBar(tmp_path / "none", text):
        pass
    assert text.getvalue().endswith("\n")


def test_a_training_shows_a_bar_on_any_stream_and_returns_its_summary(tmp_path: Path) -> None:
    text = io.StringIO()
    spec = paceline.RunSpec(model="mlp", data="synthetic:train=300,test=40", batch_size=10, epochs=1, threads=1,
                            output_dir=str(tmp_path), name="run")  # fmt: skip
    found = paceline.train(spec, show=text)
    assert isinstance(found, paceline.Summary)
    assert (found.steps, found.folder) == (30, tmp_path / "run")
    assert "30/30" in text.getvalue()
    assert "Start of epoch" not in text.getvalue(), "rank 0's own lines are in its log"
    assert str(tmp_path / "run") in found._repr_html_()
