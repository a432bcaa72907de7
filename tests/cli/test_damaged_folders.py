"""Whatever is in a run folder, report and compare use it or leave it out with a reason; one bad folder stops nothing.

Every value in every kind of line and file is changed in many ways, one at a time. A changed run that is accepted is
reported on and compared, together with good ones.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import pytest
from made_up_experiments import MadeUp, write
from made_up_pipeline import Stages

from paceline.analysis.compare import compare
from paceline.analysis.runs import Run, read_run
from paceline.analysis.scaling import group
from paceline.analysis.study import read_study
from paceline.cli.main import main
from paceline.cli.nodes import table
from paceline.comm.seat import Seat
from paceline.comm.single import SingleComm
from paceline.emulation.measured import seconds_per_sample
from paceline.errors import UsageError
from paceline.launch.folder import make_folder, open_run
from paceline.launch.rank import Rank
from paceline.run.folder import write_bench
from paceline.run.records import Bench
from paceline.spec import resolve

T = TypeVar("T")
GONE = "this value is taken out"
DEEP = "this value is nested 2,000 times"
OTHERS: list[Any] = [GONE, None, "", "x", True, [], {}, [[]], {"x": []}, [None], 0, -1, 0.5, 7, float("nan"),
                     float("inf"), 1e308, -1e308, 5e-324, 10**30, 2**62, 10_000, "\x1b[31m\ud800", DEEP]  # fmt: skip
BATCH = 24  # changed runs that are reported on together
# Of thousands of changes, one in so many is tried; PACELINE_FUZZ=1 (with --timeout 0) tries them all, in minutes.
# A prime number: every other value is tried in some places.
STRIDE = int(os.environ.get("PACELINE_FUZZ", "41"))


def every(changes: Iterator[T]) -> Iterator[T]:
    return islice(changes, 0, None, STRIDE)


def batched(values: list[T], size: int) -> Iterator[list[T]]:
    return (values[i : i + size] for i in range(0, len(values), size))


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of a nested one is; of a list, where the first and the last are."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        if not isinstance(value, list) or key in (0, len(value) - 1):
            yield from paths(each, (*path, key))


def changed(value: Any, path: tuple[Any, ...], other: Any) -> str:
    """The value as JSON, with another one at that place."""
    value, last = {"": copy.deepcopy(value)}, ("", *path)
    inner: Any = value
    for key in last[:-1]:
        inner = inner[key]
    if other == GONE:
        del inner[last[-1]]
    else:
        inner[last[-1]] = other
    return json.dumps(value.get("")).replace(f'"{DEEP}"', "[" * 2000 + "]" * 2000)


def in_toml(text: str) -> Iterator[str]:
    rows = [line for line in text.splitlines() if not line.startswith("#")]
    for number, line in enumerate(rows):
        key = line.split(" = ")[0]
        words = [
            json.dumps(other) for other in OTHERS if other not in (GONE, None, {}, {"x": []}, DEEP) and other != [None]
        ]
        words = [word.replace("Infinity", "inf").replace("NaN", "nan") for word in words if "ud800" not in word]
        for new in [None, *(f"{key} = {word}" for word in words), f"{key} = {'[' * 2000}{']' * 2000}", f"{key} ="]:
            yield "\n".join([*rows[:number], *([] if new is None else [new]), *rows[number + 1 :]]) + "\n"


def in_lines(text: str) -> Iterator[str]:
    """The second line of each kind is changed, or the first if there is one only: the first step is left out anyway."""
    lines = text.splitlines()
    kinds: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        kinds.setdefault(json.loads(line)["kind"], []).append(number)
    for numbers in kinds.values():
        number = numbers[len(numbers) // 2]
        record = json.loads(lines[number])
        for path in paths(record):
            for other in OTHERS if path else ():
                yield "\n".join([*lines[:number], changed(record, path, other), *lines[number + 1 :]]) + "\n"


def damages(file: Path) -> Iterator[bytes | None]:
    """The file with one thing in it changed; None is without it."""
    content = file.read_bytes()
    yield from (
        None,
        b"",
        content[: len(content) // 2],
        b"\xff\xfe" + content,
        content.replace(b'"', b"\xff", 3),
        b"[" * 5000,
    )
    text = content.decode()
    if file.suffix == ".json":
        value = json.loads(text)
        yield from (changed(value, path, other).encode() for path in paths(value) for other in OTHERS)
    else:
        found = in_toml(text) if file.suffix == ".toml" else in_lines(text)
        yield from (each.encode() for each in found)


def train(folder: Path) -> Path:
    """A real run of one process."""
    given = {"model": "mlp", "data": "synthetic:1x8x8,train=96,test=16", "batch_size": 4, "log_every": 0,
             "epochs": 1, "validation": 0.2, "output_dir": str(folder.parent), "name": folder.name}  # fmt: skip
    resolved = resolve(("test", given))
    made = make_folder(resolved.spec).absolute()
    open_run(made, resolved)
    assert Rank(resolved, Seat(0, 1, 0, 1, "paceline"), made, None).run(SingleComm()) == 0
    return made


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good runs of every kind."""
    folder = tmp_path_factory.mktemp("good")
    halves = Stages((0.001, 0.0012), send=0.0001, average=0.001, planned=0.8)
    for name, one in {
        "one": MadeUp(steps=30, epochs=1),
        "nodes": MadeUp(strategy="ring", workers=2, nodes=2, steps=30, epochs=1),
        "servers": MadeUp(strategy="ps-async", workers=2, servers=1, steps=30, epochs=1),
        "stages": MadeUp(strategy="pipeline", workers=2, stages=halves, steps=30, epochs=1),
    }.items():
        write(folder / name, one)
    train(folder / "real")
    return folder


def test_good_runs_are_not_left_out(good: Path) -> None:
    assert len(read_study([good]).runs) == 5


def changes(good: Path) -> Iterator[tuple[str, bytes | None]]:
    """The files of a run folder, each with one thing in it changed."""
    for file in sorted(path for path in good.iterdir() if path.suffix in (".json", ".jsonl", ".toml")):
        for content in damages(file):
            yield file.name, content


def change(folder: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)


def accepted(good: Path, folder: Path) -> list[tuple[str, bytes | None]]:
    """The changes with which a run still passes as a good one; many only change a name, or what is not read."""
    shutil.copytree(good, folder)
    found = []
    for name, content in every(changes(good)):
        change(folder, name, content)
        run = read_run(folder)
        with suppress(UsageError):
            seconds_per_sample(folder, "mlp", None)
        if isinstance(run, Run):
            compare(group([run])[0], group([run])[0])
            table(folder)
            found.append((name, content))
        else:
            assert run.why
        (folder / name).write_bytes((good / name).read_bytes())
    return found


def report(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a report on the folder prints, or why there is none."""
    code = main(["report", str(folder), "-o", str(folder.with_suffix(".html"))])
    said = "".join(capsys.readouterr())
    assert code == (2 if "no completed run to report on" in said else 0)
    assert all(letter.isprintable() or letter == "\n" for letter in said), "nothing controls the terminal"
    return said


@pytest.mark.parametrize("kind", ["one", "nodes", "servers", "stages", "real"])
def test_a_changed_run_is_used_or_left_out(
    good: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = accepted(good / kind, tmp_path / "run")
    assert found, "some changes make no difference"
    for number, batch in enumerate(batched(found, BATCH)):
        folder = tmp_path / f"pages-{number}"
        shutil.copytree(good / kind, folder / "good")
        for place, (name, content) in enumerate(batch):
            shutil.copytree(good / kind, folder / f"changed-{place}")
            change(folder / f"changed-{place}", name, content)
        assert f"{folder / 'good'}: " not in report(folder, capsys), "it is not left out"
        for place, (_, content) in enumerate(batch):
            if content and rb"\u001b" in content:  # of a run alone, the verdict says more
                report(folder / f"changed-{place}", capsys)


def test_a_changed_experiment_is_reported_on_or_taken_for_a_folder_of_runs(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "experiment"
    shutil.copytree(good / "one", folder / "good")
    paper = ({"match": {"workers": 1}, "epoch_seconds": 82.06, "test_accuracy": 0.98, "note": "Table 2"},)
    write_bench(folder, Bench("x", "X", "About.", "a paper", ("No GPU.",), False, 1, ("weak",), paper, ("good", "two"),
                              {"two": "rank 1 died"}, ("no GPU",), {"version": "0.1.0", "cores": 16}))  # fmt: skip
    whole = (folder / "bench.json").read_bytes()
    for content in every(damages(folder / "bench.json")):
        change(folder, "bench.json", content)
        said = report(folder, capsys)
        assert "good: " not in said or "good: not one of the runs that the experiment has now" in said
        (folder / "bench.json").write_bytes(whole)


def test_one_bad_folder_does_not_stop_the_report(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(good, runs)
    for name, content in {"deep": b"[" * 10**5, "bytes": b"\xff" * 99, "table": b"{}"}.items():
        shutil.copytree(good / "one", runs / name)
        (runs / name / "summary.json").write_bytes(content)
    os.mkfifo(runs / "table" / "rank_9.jsonl")
    assert main(["report", str(runs), "-o", str(tmp_path / "a.html")]) == 0
    said = capsys.readouterr().out
    assert f"left out: {runs / 'deep'}: no summary that can be read: it is nested too deeply" in said
    assert "5 runs in 5 settings, 3 left out" in said
