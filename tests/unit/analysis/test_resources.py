"""Nodes and ranks over time, and the bytes of an update, on made-up runs with known answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from made_up import IDLE, write_run
from test_runs import check_read

from paceline.analysis.breakdown import by_rank
from paceline.analysis.resources import node_series, rank_series, roles, traffic
from paceline.analysis.runs import Run
from paceline.analysis.study import read_study
from paceline.report.draw import draw


def served(folder: Path) -> Run:
    """A server and two workers, each on its node."""
    moves = {"a": (8e6, 6e6), "b": (3e6, 4e6), "c": (3e6, 4e6)}
    return check_read(write_run(folder, [1.0] * 10, workers=2, servers=1, hosts=["a", "b", "c"], moves=moves))


def test_roles_are_what_runs_on_a_node(tmp_path: Path) -> None:
    hosts = ["a", "b", "b", "c", "c", "c"]
    run = check_read(write_run(tmp_path / "r", [0.1] * 5, workers=4, servers=2, hosts=hosts))
    assert roles(run) == {"a": "server", "b": "server and worker", "c": "3 workers"}


def test_a_node_over_time(tmp_path: Path) -> None:
    node = node_series(served(tmp_path / "r"))[0]
    assert (node.name, node.role, node.cores) == ("a", "server", 4)
    assert node.seconds[0] == pytest.approx(0.5)  # what was before the first step is left out
    assert node.cores_busy == pytest.approx(1.5)
    during = (node.seconds > 0) & (node.seconds <= 10)
    assert node.bits_in[during] == pytest.approx(64e6, rel=1e-3)
    assert node.bits_out[during] == pytest.approx(48e6, rel=1e-3)
    assert node.packets_in[during] == pytest.approx(8000, rel=1e-3)
    assert node.bits_in[~during] == pytest.approx(0.0)
    assert (np.diff(node.memory_bytes) == 1).all()


def test_waiting_for_a_core_is_not_computing(tmp_path: Path) -> None:
    """As in the breakdown: of 70 % of a step, half was waiting for a core; the update of the weights is 5 %."""
    run = check_read(write_run(tmp_path / "r", [0.1] * 50, workers=2, cores=1, queued=0.5))
    for rank, series in zip(by_rank(run).values(), rank_series(run, 10), strict=True):
        assert (rank.compute, rank.core) == pytest.approx((0.035, 0.035))
        assert series.busy == pytest.approx(np.full(10, 0.35 + 0.05))
        assert series.waiting == pytest.approx(np.full(10, 0.35 + 0.2))


def test_what_other_programs_use_is_beside_what_the_run_uses(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [0.1] * 60, workers=2, cores=4, others=2.0)
    [node] = node_series(check_read(folder))
    assert node.cores_busy == pytest.approx(3.5)
    assert node.cores_of_run == pytest.approx(1.5)
    assert np.isnan(node_series(served(tmp_path / "lab"))[0].cores_of_run).all()
    [chart] = [each for each in draw(read_study([folder])) if each.name == "utilisation"]
    drawn = {trace["name"]: trace["y"][0] for trace in chart.figure["data"]}
    assert (drawn["here (worker)"], drawn["here (worker): this run"]) == (3.5, 1.5)
    assert "Dashed: cores that this run uses; the rest is other programs." in chart.caption


def test_one_machine_counts_its_loopback(tmp_path: Path) -> None:
    run = check_read(write_run(tmp_path / "r", [1.0] * 10, workers=2, moves={"here": (5e6, 5e6)}))
    [node] = node_series(run)
    assert node.role == "2 workers"
    assert node.bits_in[4] == pytest.approx(40e6, rel=1e-3)
    assert traffic(run)[0].bytes_in == pytest.approx(5e6, rel=0.05)


def test_an_update_s_bytes_are_of_the_steps_alone(tmp_path: Path) -> None:
    found = traffic(served(tmp_path / "r"))
    assert [(node.name, node.role) for node in found] == [("a", "server"), ("b", "worker"), ("c", "worker")]
    assert (found[0].bytes_in, found[0].bytes_out) == pytest.approx((8e6, 6e6), rel=0.05)
    assert (found[1].bytes_in, found[1].bytes_out) == pytest.approx((3e6, 4e6), rel=0.05)
    assert (found[0].packets_in, found[0].packets_out) == pytest.approx((8000, 6000), rel=0.05)


def rewrite_samples(folder: Path, change) -> Run:  # type: ignore[no-untyped-def]
    """Each sample of node a, as `change` of its number and itself has it; None leaves it out."""
    path = folder / "node_a.jsonl"
    head, *rest = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [new for i, record in enumerate(rest) if (new := change(i, record)) is not None]
    path.write_text("".join(json.dumps(record) + "\n" for record in [head, *kept]))
    return check_read(folder)


def test_bytes_between_epochs_are_not_an_update_s(tmp_path: Path) -> None:
    """Between two epochs validation takes 4 s and moves 100 MB."""
    served(tmp_path / "r")
    path = tmp_path / "r" / "rank_0.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record["time"] += 4.0 if record["step"] >= 5 else 0.0
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    start = records[0]["time"] - 1.0

    def change(i: int, record: dict) -> dict:  # type: ignore[type-arg]
        now = i * 0.5 - IDLE
        steps = np.interp(now, [0, 5, 9, 14], [0, 5, 5, 10])
        record["time"] = start + now
        record["interfaces"]["eth0"]["rx_bytes"] = int(8e6 * steps + 1e8 * np.interp(now, [5, 9], [0, 1]))
        return record

    run = rewrite_samples(tmp_path / "r", change)
    assert run.nodes["a"].samples[-1].time - start < 14  # the last steps have no samples, and are not counted
    assert traffic(run)[0].bytes_in == pytest.approx(8e6, rel=0.02)


def test_what_could_not_be_read_is_nan(tmp_path: Path) -> None:
    served(tmp_path / "r")

    def change(i: int, record: dict) -> dict:  # type: ignore[type-arg]
        return record | {"cpu": None, "memory_bytes": None, "interfaces": {}}

    run = rewrite_samples(tmp_path / "r", change)
    node = node_series(run)[0]
    for values in (node.cores_busy, node.memory_bytes, node.bits_in, node.packets_out):
        assert np.isnan(values).all()
    assert np.isnan(traffic(run)[0].bytes_in)


def test_a_counter_that_starts_anew_is_not_a_burst(tmp_path: Path) -> None:
    served(tmp_path / "r")

    def change(i: int, record: dict) -> dict:  # type: ignore[type-arg]
        if i > 12:
            record["interfaces"]["eth0"] = {key: value // 10 for key, value in record["interfaces"]["eth0"].items()}
        return record

    run = rewrite_samples(tmp_path / "r", change)
    assert np.isnan(node_series(run)[0].bits_in).sum() == 1
    assert np.nanmin(node_series(run)[0].bits_in) >= 0
    assert np.isnan(traffic(run)[0].bytes_in)


def test_few_samples_are_no_traffic(tmp_path: Path) -> None:
    served(tmp_path / "r")
    one = rewrite_samples(tmp_path / "r", lambda i, record: record if i == 3 else None)
    assert "a" not in {node.name for node in node_series(one)}
    short = check_read(write_run(tmp_path / "s", [0.05] * 20, workers=2, hosts=["a", "b"], moves={"a": (1e6, 1e6)}))
    assert np.isnan(traffic(short)[0].bytes_out)


def test_an_interface_that_is_not_listed_yet_has_carried_nothing(tmp_path: Path) -> None:
    served(tmp_path / "r")

    def change(i: int, record: dict) -> dict:  # type: ignore[type-arg]
        if i <= 2 * IDLE:
            del record["interfaces"]["eth0"]
        return record

    assert traffic(rewrite_samples(tmp_path / "r", change))[0].bytes_in == pytest.approx(8e6, rel=0.05)


def test_ranks_over_time(tmp_path: Path) -> None:
    """Rank 0 computes 70 % of each step and updates for 5 %, rank 1 computes 30 %; the rest they wait or read."""
    run = check_read(write_run(tmp_path / "r", [0.1] * 100, workers=2, compute=[0.7, 0.3]))
    found = rank_series(run, bins=10)
    assert [each.rank for each in found] == [0, 1]
    assert found[0].seconds == pytest.approx(np.arange(1, 11), abs=1e-3)
    assert found[0].busy == pytest.approx(0.75, abs=1e-3)
    assert found[0].waiting == pytest.approx(0.2, abs=1e-3)
    assert found[1].busy == pytest.approx(0.35, abs=1e-3)
    assert found[1].waiting == pytest.approx(0.6, abs=1e-3)
    assert found[0].samples_per_second == pytest.approx(320, rel=1e-3)


def test_parts_of_a_step_have_their_place(tmp_path: Path) -> None:
    """Of one step: reading, computing for seven tenths, waiting for two, the update."""
    [only] = rank_series(check_read(write_run(tmp_path / "r", [10.0])), bins=20)
    assert only.busy == pytest.approx([0] + [1] * 14 + [0] * 4 + [1], abs=1e-4)
    assert only.waiting == pytest.approx([0] * 15 + [1] * 4 + [0], abs=1e-4)


def test_workers_of_servers_have_their_own_images_and_servers_have_no_parts(tmp_path: Path) -> None:
    found = rank_series(served(tmp_path / "r"), bins=10)
    assert [each.rank for each in found] == [1, 2]
    assert found[0].samples_per_second == pytest.approx(32, rel=1e-3)
    assert found[0].waiting == pytest.approx(0.25, abs=1e-3)  # pushing is waiting
    assert len(rank_series(served(tmp_path / "s"))[0].busy) == 100


def add_gpus(folder: Path) -> None:
    """Two GPUs in every sample of node a: one is busy for 80 % of the time, of the other nobody knows."""
    path, lines = folder / "node_a.jsonl", []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "sample":
            record["gpus"] = [{"busy": 0.8, "memory_bytes": 5}, {"busy": None, "memory_bytes": None}]
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n")


def test_gpus_are_read_where_there_are_some(tmp_path: Path) -> None:
    served(tmp_path / "r")
    add_gpus(tmp_path / "r")
    with_gpus, without, _ = node_series(check_read(tmp_path / "r"))
    assert with_gpus.gpus_busy == pytest.approx(0.8)
    assert np.isnan(without.gpus_busy).all()
    study = read_study([tmp_path])
    titles = [axis["title"]["text"] for chart in draw(study) if chart.name == "utilisation"
              for name, axis in chart.figure["layout"].items() if name.startswith("yaxis")]  # fmt: skip
    assert "GPUs busy, %" in titles
