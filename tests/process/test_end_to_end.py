"""From a real training by the launcher through its folder to the report's numbers, for each family of strategies.

The expected numbers are computed here, from the raw lines.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import jsonschema
import pytest
from event_files import scalars
from raw_lines import raw_lines
from trace_check import check_trace, slices

from paceline.analysis.runs import Run, read_run
from paceline.cli.main import main
from paceline.cli.schema import published
from paceline.errors import UsageError
from paceline.predict.fit import PRIOR, Fit, case_of, typical_step
from paceline.predict.noise import Noise
from paceline.predict.probes import checked_probe, probe_of, shape_of

DOCS = Path(__file__).parents[2] / "docs" / "schemas"
STEPS, BATCH = 24, 32
FAMILIES = {
    "sequential": ["--strategy", "sequential"],
    "synchronous": ["--strategy", "ring", "--workers", "2"],
    "sharded": ["--strategy", "sharded", "--workers", "2"],
    "local": ["--strategy", "local-sgd", "--workers", "2", "--sync-every", "4"],
    "servers": ["--strategy", "ps-async", "--workers", "2"],
    "pipeline": ["--strategy", "pipeline", "--workers", "2", "--microbatches", "4"],
    "tensor": ["--strategy", "tensor", "--workers", "2"],
}
PASSES = ("forward", "recompute", "backward")


@dataclass
class Trained:
    """A run: its raw files, and the rows of the report's tables."""

    folder: Path
    summary: dict[str, Any]
    lines: list[list[dict[str, Any]]]  # by rank
    tables: Path

    def steps(self, rank: int) -> list[dict[str, Any]]:
        return sorted((line for line in self.lines[rank] if line["kind"] == "step"), key=lambda line: line["step"])

    def rows(self, table: str) -> list[dict[str, str]]:
        with (self.tables / f"{table}.csv").open() as file:
            return list(csv.DictReader(file))


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    output = tmp_path_factory.mktemp(request.param)
    command = [sys.executable, "-m", "paceline", "train", "--model", "mlp", "--data", "mnist-mini", "--threads", "1",
               "--steps", str(STEPS), "--batch-size", str(BATCH), "--output-dir", str(output), "--name", "run",
               "--tensorboard", *FAMILIES[request.param]]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    folder, tables = output / "run", output / "csv"
    assert main(["report", str(folder), "--output", str(output / "report.html"), "--csv", str(tables)]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    ranks = summary["servers"] + summary["workers"]
    return Trained(folder, summary, [list(raw_lines(folder / f"rank_{rank}.jsonl")) for rank in range(ranks)], tables)


def test_every_file_is_as_its_published_schema_says(trained: Trained) -> None:
    for name in ("summary", "env", "owner", *(["plan"] if "pipeline" in trained.summary["strategy"] else [])):
        check(json.loads((trained.folder / f"{name}.json").read_text()), name)
    for lines in trained.lines:
        for line in lines:
            check(line, "rank")
    (node,) = trained.folder.glob("node_*.jsonl")
    kinds = Counter(line["kind"] for line in raw_lines(node) if check(line, "node"))
    assert (kinds["node"], kinds["end"]) == (1, 1)
    assert kinds["sample"] >= 2


def test_a_run_is_read_and_simulated_for_predictions(trained: Trained) -> None:
    """Its compute is that of the lines, and the simulation of its steps takes at least that."""
    run = read_run(trained.folder)
    assert isinstance(run, Run)
    if not run.method.simulation:
        with pytest.raises(UsageError, match="steps of sharded cannot be predicted"):
            checked_probe(run)
        return
    probe, last = probe_of(run), trained.steps(len(trained.lines) - 1)
    own = [sum(step["spans"][name] for name in ("forward", "backward")) for step in last]
    count = len(probe.compute)
    assert probe.compute.shape == (count, trained.summary["workers"])
    assert count >= 1
    assert list(probe.compute[:, -1]) == pytest.approx(own[len(own) - count :])
    if not probe.tells_compute:  # shards exchange values in between: how long one worker computes is known otherwise
        known = Fit(shape_of(probe), 1.0, 0.0, 0.0, Noise(), 0.0, {}, {}, {}, emulated=False)
        assert typical_step(case_of(known, probe, PRIOR, 2)) >= probe.samples / trained.summary["workers"]
        return
    known = Fit(shape_of(probe), 0.0, 0.0, 0.0, Noise(), 0.0, {}, {}, {}, emulated=False)
    workers = trained.summary["workers"] if run.method.updates_by_worker or run.method.part else 1
    assert typical_step(case_of(known, probe, PRIOR, 2)) >= 0.999 * probe.compute_seconds / workers


def test_only_replicas_that_average_gradients_record_their_norms_in_every_tenth_step(trained: Trained) -> None:
    wanted = [0, 10, 20] if trained.summary["strategy"] in ("ring", "sharded") else []
    for rank in range(len(trained.lines)):
        for name in ("norm", "own_norm"):
            assert [step["step"] for step in trained.steps(rank) if step.get(name, 0.0) > 0] == wanted


def check(value: Any, schema: str) -> bool:
    jsonschema.validate(value, json.loads((DOCS / f"{schema}.schema.json").read_text()))
    return True


def test_the_results_are_those_of_the_lines(trained: Trained) -> None:
    (row,) = trained.rows("results")
    summary, steps = trained.summary, trained.steps(0)
    assert len(steps) == summary["steps"] == STEPS
    # Steps that are timed together: asynchronous updates come in bursts, and only every 4th step of local SGD sends.
    count = {"ps-async": summary["workers"], "local-sgd": 4}.get(summary["strategy"], 1)
    each = [sum(s["seconds"] for s in steps[i : i + count]) / sum(s["samples"] for s in steps[i : i + count])
            for i in range(0, STEPS, count)]  # fmt: skip
    # The median after warm-up, which is at most half of the steps.
    speeds = [1 / median(each[skip:]) for skip in range(len(each) // 2 + 1)]
    assert any(float(row["samples_per_second"]) == pytest.approx(speed, rel=1e-9) for speed in speeds)
    (planned,) = (line for line in trained.lines[0] if line["kind"] == "planned")
    assert (planned["steps"], planned["epochs"]) == (STEPS, steps[-1]["epoch"] + 1)
    (test,) = (line for line in trained.lines[0] if line["kind"] == "test")
    assert float(row["test_loss"]) == test["loss"] == summary["test_loss"]
    assert float(row["test_accuracy"]) == test["accuracy"]
    assert float(row["total_seconds"]) == summary["total_seconds"]
    assert float(row["peak_memory_bytes"]) == max(summary["peak_rss_bytes"])
    assert (row["strategy"], int(row["workers"]), int(row["servers"])) == (
        summary["strategy"],
        summary["workers"],
        summary["servers"],
    )
    ends = [line["time"] for lines in trained.lines for line in lines if line["kind"] == "end"]
    assert len(ends) == len(trained.lines), "every rank came to its end"


def test_the_parts_of_a_step_are_those_of_the_lines(trained: Trained) -> None:
    """They add up to the step; where the time went is the mean over workers of a mean over steps."""
    for row in trained.rows("breakdown-by-rank" if len(trained.lines) > 1 else "breakdown"):
        steps = trained.steps(int(row.get("rank", 0)))
        parts = [float(value) for name, value in row.items() if name.endswith("_seconds") and name != "step_seconds"]
        whole = float(row["step_seconds"])
        assert sum(parts) == pytest.approx(whole, rel=1e-6)
        inputs = [[s["spans"].get("input", 0.0) for s in steps[skip:]] for skip in range(len(steps))]
        assert any(float(row["input_seconds"]) == pytest.approx(fmean(each), rel=1e-6, abs=1e-12) for each in inputs)


def test_a_strategys_own_figures_are_those_of_the_lines(trained: Trained) -> None:
    summary, own = trained.summary, trained.summary["figures"].get(trained.summary["strategy"], {})
    if summary["strategy"] == "ps-async":
        made = [trained.steps(rank) for rank in range(1, 3)]
        assert own["gradients"] == [0, *map(len, made)]
        missed = Counter(str(step["figures"]["staleness"]) for steps in made for step in steps)
        assert own["staleness"] == dict(missed)
        assert sum(missed.values()) == STEPS
        assert own["staleness_max"] == max(map(int, missed))
        assert own["staleness_mean"] == pytest.approx(sum(int(m) * n for m, n in missed.items()) / STEPS)
    elif summary["strategy"] == "pipeline":
        assert summary["grid"] == {"replicas": 1, "stages": 2, "shards": 1}
        rows = trained.rows("pipeline-step")
        idle = {step: one_idle(trained, step) for step in range(20)}
        measured = float(rows[0]["idle"])
        # Of the steps after warm-up whose events were recorded, the median.
        medians = [median(list(idle.values())[skip:]) for skip in range(1, 20)]
        # Times of the Unix clock are exact to a fraction of a microsecond, and a step takes a millisecond.
        assert any(measured == pytest.approx(each, abs=2e-3) for each in medians), (measured, medians)
        step = int(rows[0]["step"])
        events = [event for lines in trained.lines for event in timeline(lines, step)["events"]]
        assert Counter((row["what"], int(row["micro_batch"])) for row in rows) == Counter((e[0], e[1]) for e in events)
        assert sum(float(row["seconds"]) for row in rows) == pytest.approx(sum(e[3] for e in events))
    elif summary["strategy"] == "local-sgd":
        sent = [step["step"] % 4 == 3 for step in trained.steps(0)]
        assert sum(sent) == STEPS // 4
        assert summary["bytes_sent"][0] > 0
    else:
        assert own == {}
        assert (sum(summary["bytes_sent"]) > 0) == (summary["workers"] > 1)


def timeline(lines: list[dict[str, Any]], step: int) -> dict[str, Any]:
    return next(line for line in lines if line["kind"] == "timeline" and line["step"] == step)


def one_idle(trained: Trained, step: int) -> float:
    """Which part of a step, from the first pass to the last, the two stages did not compute."""
    passes = [(found["time"] + event[2], event[3]) for lines in trained.lines
              for found in [timeline(lines, step)] for event in found["events"] if event[0] in PASSES]  # fmt: skip
    span = max(start + seconds for start, seconds in passes) - min(start for start, _ in passes)
    return float(1 - sum(seconds for _, seconds in passes) / (2 * span))


def expected(lines: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard must show of a rank, from its raw lines: by tag, the steps and values."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        if line["kind"] == "step":
            values = {"train/loss": line.get("loss"), "train/learning_rate": line.get("lr"),
                      "seconds/step": line["seconds"], "speed/samples_per_second": line["samples"] / line["seconds"],
                      **{f"seconds/{part}": seconds for part, seconds in line["spans"].items()}}  # fmt: skip
        elif line["kind"] == "test":
            values = {"test/loss": line["loss"], "test/accuracy": line["accuracy"]}
        else:
            continue
        for tag, value in values.items():
            if value is not None:
                found.setdefault(tag, []).append((line["step"], value))
    return found


def check_events(folder: Path, lines: list[dict[str, Any]]) -> None:
    shown = scalars(folder)
    for tag, points in expected(lines).items():
        assert [step for step, *_ in shown[tag]] == [step for step, _ in points], tag
        assert [value for *_, value in shown[tag]] == pytest.approx([value for _, value in points], rel=1e-6), tag


def test_tensorboard_shows_what_the_records_have_as_it_trained_and_afterwards(trained: Trained, tmp_path: Path) -> None:
    live = trained.folder / "tensorboard"
    assert [path.name for path in live.iterdir()] == ["rank_0"]
    check_events(live / "rank_0", trained.lines[0])
    assert main(["export", str(trained.folder), "--tensorboard", str(tmp_path / "later")]) == 0
    for rank, lines in enumerate(trained.lines):
        check_events(tmp_path / "later" / f"rank_{rank}", lines)
    assert scalars(tmp_path / "later" / "rank_0") == scalars(live / "rank_0"), "to the last value and time"
    (node,) = (tmp_path / "later").glob("node_*")
    assert {"cores_busy", "memory_bytes", "bits_in_per_second"} <= scalars(node).keys()


def test_a_trace_has_every_step_of_every_rank(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    assert main(["export", str(trained.folder), "--trace", str(path)]) == 0
    events = check_trace(path)
    begin = min(line["time"] for lines in trained.lines for line in lines if line["kind"] == "start")
    for rank, lines in enumerate(trained.lines):
        steps = [line for line in lines if line["kind"] == "step"]
        drawn = [each for each in slices(events, rank) if each["name"].startswith("step ")]
        assert [each["args"]["step"] for each in drawn] == [line["step"] for line in steps]
        ends = [each["ts"] + each["dur"] for each in drawn]
        since = [1e6 * (line["time"] - begin) for line in steps]
        assert [end - ends[0] for end in ends] == pytest.approx([time - since[0] for time in since], abs=20)
        micro = {each["name"] for each in slices(events, rank, 2)}
        assert ({f"forward {i}" for i in range(4)} <= micro) == any(line["kind"] == "timeline" for line in lines)
    assert {event["name"] for event in events if event["ph"] == "C"} == {"CPU cores", "memory (GB)", "network (Mbit/s)"}


def test_the_published_schemas_are_those_of_the_program() -> None:
    found = {path.name.removesuffix(".schema.json"): json.loads(path.read_text()) for path in DOCS.iterdir()}
    assert found == published(), "run: paceline schema --output-dir docs/schemas"
    for schema in found.values():
        jsonschema.Draft202012Validator.check_schema(schema)
