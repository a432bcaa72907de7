"""Settings that differ in workers alone, their names, and which difference counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from made_up import steady, write_run
from test_runs import check_read

from paceline.analysis.lines import all_lines, faster, is_faster
from paceline.analysis.scaling import Group, group


def one(folder: Path, mean: float = 0.1, count: int = 3, steps: int = 20, **options: Any) -> Group:
    runs = [check_read(write_run(folder / str(i), steady(mean, steps, i, 0.005), seed=i, **options))
            for i in range(count)]  # fmt: skip
    [found] = group(runs)
    return found


def test_weak_and_strong_lines(tmp_path: Path) -> None:
    groups = [one(tmp_path / f"w{n}", workers=n, batch=8) for n in (2, 4)]
    groups += [one(tmp_path / f"s{n}", workers=n, batch=64 // n) for n in (2, 4)]
    found = all_lines(groups)
    assert [(line.kind, list(line.groups)) for line in found] == [("weak", [2, 4]), ("strong", [2, 4])]
    assert [line.label(found) for line in found] == ["ring, batch 8", "ring, global batch 64"]


def test_a_name_says_as_much_as_is_needed(tmp_path: Path) -> None:
    groups = [
        one(tmp_path / "ring", workers=2),
        one(tmp_path / "one", workers=2, servers=1),
        one(tmp_path / "two", workers=2, servers=2),
        one(tmp_path / "other", workers=2, spec={"model": "cnn"}),
    ]
    found = all_lines(groups)
    assert [line.label(found) for line in found] == ["mlp, ring", "mlp, ps-sync, 1 server", "mlp, ps-sync, 2 servers",
                                                    "cnn, ring"]  # fmt: skip


def test_the_same_workers_on_more_nodes_are_another_line(tmp_path: Path) -> None:
    groups = [one(tmp_path / f"{n}-{nodes}", workers=n, hosts=[f"h{i % nodes}" for i in range(n)],
                  lab={"nodes": [{"up": 1, "down": 1}] * nodes})
              for nodes in (1, 2) for n in (2, 4)]  # fmt: skip
    found = all_lines(groups)
    assert [list(line.groups) for line in found] == [[2, 4], [2, 4]]
    assert [line.label(found) for line in found] == ["ring, 1 node", "ring, 2 nodes"]


def test_the_length_of_a_run_does_not_matter(tmp_path: Path) -> None:
    groups = [one(tmp_path / f"{n}", workers=n, steps=10 * n, spec={"steps": 10 * n}) for n in (2, 4)]
    assert [list(line.groups) for line in all_lines(groups)] == [[2, 4]]


def test_which_differences_count(tmp_path: Path) -> None:
    slow, twice, near = (one(tmp_path / str(mean), mean) for mean in (0.2, 0.1, 0.198))
    assert is_faster(faster(twice, slow), twice, slow) is True
    assert is_faster(faster(slow, twice), slow, twice) is False
    assert is_faster(faster(near, slow), near, slow) is None  # a hundredth may be real, and decides nothing
    few, other = one(tmp_path / "few", 0.1, count=1), one(tmp_path / "other", 0.106, count=1)
    assert is_faster(faster(few, other), few, other) is None
    short = one(tmp_path / "short", 0.01, steps=3)
    assert is_faster(faster(short, slow), short, slow) is None
