"""The `paceline` command itself: what it says without torch, and how it says no."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from refusal import SHELL, refusal

import paceline
from paceline.cli import main

COMMAND = str(Path(sys.executable).parent / "paceline")
SMALL = ["train", "--model", "mlp", "--data", "synthetic:train=8,test=4", "--batch-size", "4", "--steps", "1"]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], cwd=folder, env=SHELL, capture_output=True, text=True, timeout=60, check=False
    )


def test_what_needs_neither_torch_nor_templates_does_not_import_them(tmp_path: Path) -> None:
    code = """
import contextlib, io, sys
from paceline.cli import main
for line in sys.stdin.read().splitlines():
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main(line.split())
        except SystemExit as exit:
            code = exit.code
    print(code, bool({"torch", "jinja2"} & set(sys.modules)), len(out.getvalue()) > 0, line)
"""
    lines = ["--help", "train --help", "cut --help", "data --help", "models", "data list", "doctor", "slurm -- train",
             "train --workers 0", "cut --stages 2 --memory 1XB", "trian"]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], input="\n".join(lines), cwd=tmp_path, env=SHELL,
                          capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
    codes = [0] * 8 + [2] * 3
    assert done.stdout.splitlines() == [f"{c} False True {line}" for c, line in zip(codes, lines, strict=True)]


def test_help_and_version_are_printed(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(verb in done.stdout for verb in ("train", "cut", "data", "models", "slurm", "doctor"))
    done = run(tmp_path, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"paceline {paceline.__version__}\n", "")


def test_a_verb_that_does_not_exist_is_answered_with_the_nearest(tmp_path: Path) -> None:
    done = run(tmp_path, "trian", "--epochs", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "paceline: unknown command 'trian'; did you mean 'train'?" in done.stderr
    assert "doctor" in done.stderr
    assert "VERB" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--modle", "mlp"], ["--modle", "did you mean '--model'?"]),
        (["--batchsize=3"], ["--batchsize", "did you mean '--batch-size'?"]),
        (["--epoch", "1"], ["--epoch", "did you mean '--epochs'?"]),
        (["--learning-rate", "1"], ["--learning-rate", "it is called '--lr' here"]),
        (["--no-tets"], ["--no-tets", "did you mean '--no-test'?"]),
        (["--num-workers", "4"], ["--num-workers 4: every rank loads its samples in a thread"]),
    ],
    ids=lambda part: part[0] if isinstance(part, list) else "",
)
def test_a_misspelt_flag_is_answered_with_the_nearest(tmp_path: Path, arguments: list[str], parts: list[str]) -> None:
    message = refusal(tmp_path, "train", *arguments)
    assert [part for part in parts if part not in message] == []


def test_a_flag_that_is_like_none_gets_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--nodes", "--compile", "--shuffle", "--pin-memory"):
        with pytest.raises(SystemExit):
            main(["train", flag, "1"])
        assert f"unrecognized arguments: {flag} 1\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--workers two", ["--workers is 'two'", "whole number"]),
        ("--staleness 2 --workers 2", ["--staleness", "use --strategy ps-bounded"]),
        ("--model none.py:build", ["there is no file", "none.py"]),
        ("--json --workers 0", ["--workers is 0", "at least 1"]),
        ("--lr -1", ["--lr is -1.0", "at least 0"]),
        ("--momentum nan", ["--momentum is nan", "from 0 to 1"]),
        ("--model mlp --hidden 256,x", ["--hidden is '256,x'", "such as 256,64"]),
        ("--model lenet", ["unknown model 'lenet'", "alexnet", "package.module:function"]),
        ("--model resnet18 --image-size 4", ["at least 9x9", "4x4", "--image-size 9"]),
        ("--model no_such_package.net:build", ["no_such_package", "working folder"]),
        ("--data no_such_package:load", ["no_such_package", "working folder"]),
        ("--data images:none", ["none does not exist", "a folder of images"]),
        ("--data arrays:none.npz", ["none.npz does not exist", "a file of arrays"]),
        ("--data arrays:none.npz --data-dir .", ["--data-dir", "leave"]),
        ("--data mnist --data-dir .", ["mnist: ", "none of its files", "train-images-idx3-ubyte", "its folder mnist"]),
        ("--data-dir .", ["mnist-mini is not read from files", "leave --data-dir out"]),
        ("--strategy rign --workers 2", ["unknown strategy 'rign'", "did you mean 'ring'?"]),
        ("--data mnits", ["unknown data set 'mnits'", "did you mean 'mnist'?"]),
        ("--data synthetic:1x8x8", ["at least 22x22", "8x8"]),
        ("--batch-size 6000 --workers 2", ["6000 x 2 workers = 12000", "10000"]),
        ("--weights none.safetensors", ["--weights none.safetensors", "no such file"]),
        ("--name a/b", ["--name 'a/b'"]),
        ("--config none.toml", ["none.toml", "No such file"]),
        ("--workers", ["--workers", "expected one argument"]),
        ("ring", ["ring"]),
    ],
)
def test_a_bad_value_is_refused_in_one_message_and_leaves_nothing(tmp_path: Path, line: str, parts: list[str]) -> None:
    message = refusal(tmp_path, "train", *line.split())
    assert [part for part in parts if part not in message] == []


def test_a_config_file_with_an_unknown_key_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("workers = 2\nbatchsize = 3\n")
    message = refusal(tmp_path, "train", "--config", "run.toml")
    assert "config file run.toml" in message
    assert "'batchsize'; did you mean 'batch_size'?" in message


def test_a_name_is_used_once(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, "--name", "first", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "completed"
    files = {path: path.read_bytes() for path in (tmp_path / "runs" / "first").rglob("*") if path.is_file()}
    assert {"summary.json", "model.safetensors", "spec.toml"} <= {path.name for path in files}
    message = refusal(tmp_path, *SMALL, "--name", "first", "--json")
    assert "runs/first" in message
    assert "--name" in message
    assert {path: path.read_bytes() for path in files} == files


def test_a_folder_of_somebody_else_is_not_taken_for_the_run(tmp_path: Path) -> None:
    (tmp_path / "runs" / "photos").mkdir(parents=True)
    (tmp_path / "runs" / "photos" / "model.safetensors").write_text("mine")
    assert "runs/photos" in refusal(tmp_path, *SMALL, "--name", "photos")


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/none"])
def test_an_output_folder_that_cannot_be_made_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    message = refusal(tmp_path, "train", "--output-dir", place, "--name", "x")
    assert f"cannot make the run folder {place}/x: " in message
