"""When other programs disturb a run, on made-up samples; whether a real machine is quiet is not ours to say."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.disturbance import disturbance
from paceline.run.records import Node, NodeSample


def node(name: str = "here", *, cores: int = 2, lab: bool = False, machine: str | None = None, seconds: float = 20.0,
         **sample: Any) -> Node:  # fmt: skip
    """Ten seconds before training, and then training, of samples that are all the same; the first has no rates."""
    count = int(seconds * 2)
    rest = [NodeSample(time=0.5 * i, memory_bytes=None, **{"cpu": None} | sample) for i in range(1, count)]
    return Node(name, cores, None, 0.5, "unix", lab, [NodeSample(0.0, None, None), *rest], machine)


def why(*nodes: Node, emulated: bool = False) -> str | None:
    return disturbance(nodes, 10.0, 20.0, emulated=emulated)


@pytest.mark.parametrize(
    ("cores", "sample"),
    [
        (2, {"machine_cpu": 1.98, "run_cpu": 1.9, "pressure": 0.9}),  # a run that wants more than there is
        (2, {"machine_cpu": 1.08, "run_cpu": 1.0, "pressure": 0.0, "steal": 0.05}),
        (64, {"machine_cpu": 9.0, "run_cpu": 8.0, "pressure": 0.01}),  # there is room for both
        (64, {"machine_cpu": 9.0, "run_cpu": 8.0}),
        (2, {"cpu": 1.05, "run_cpu": 1.0}),  # of before there were more fields
        (2, {"cpu": 1.9}),  # the run's own processes are not known
        (2, {}),
    ],
)
def test_a_run_that_has_the_machine_to_itself_is_not_disturbed(cores: int, sample: dict[str, Any]) -> None:
    assert why(node(cores=cores, **sample)) is None


@pytest.mark.parametrize(
    ("cores", "sample", "said"),
    [
        (2, {"machine_cpu": 2.0, "run_cpu": 0.4, "pressure": 1.0}, "other processes used 1.6 of 2 cores"),
        (2, {"machine_cpu": 1.3, "run_cpu": 1.0, "pressure": 0.0}, "other processes used 0.3 of 2 cores"),
        (2, {"cpu": 2.0, "run_cpu": 0.4}, "other processes used 1.6 of 2 cores"),
        (1, {"machine_cpu": 1.0, "run_cpu": 0.5}, "other processes used 0.5 of 1 core"),
        (64, {"machine_cpu": 63.9, "run_cpu": 63.4}, "other processes used 0.5 of 64 cores"),  # all wait for one
        (64, {"machine_cpu": 60.0, "run_cpu": 59.5, "pressure": 0.2}, "other processes used 0.5 of 64 cores"),
        (64, {"machine_cpu": 38.0, "run_cpu": 8.0, "pressure": 0.0}, "other processes used 30.0 of 64 cores"),
        (2, {"machine_cpu": 1.4, "run_cpu": 1.4, "steal": 0.6}, "the hypervisor withheld 0.6 of 2 cores"),
    ],
)  # fmt: skip
def test_a_run_is_disturbed_by_who_takes_its_cores(cores: int, sample: dict[str, Any], said: str) -> None:
    assert why(node(cores=cores, **sample)) == said


def test_what_went_on_before_training_does_not_count() -> None:
    busy: dict[str, Any] = {"machine_cpu": 2.0, "run_cpu": 0.4}
    assert disturbance([node(**busy)], 30.0, 40.0) is None
    assert disturbance([node(**busy)], 18.4, 19.0) is None, "half a second of samples is too little to tell"
    assert disturbance([node(**busy)], 18.0, 30.0) is not None


def test_emulated_compute_is_disturbed_only_when_somebody_waits_for_a_core() -> None:
    assert why(node(machine_cpu=1.1, run_cpu=0.1, pressure=0.02), emulated=True) is None
    assert why(node(machine_cpu=2.0, run_cpu=0.1, pressure=0.9), emulated=True) == "other processes used 1.9 of 2 cores"


def test_the_nodes_of_a_lab_are_one_machine() -> None:
    def lab(name: str, cpu: float) -> Node:
        return node(name, lab=True, machine="m", cpu=cpu, machine_cpu=2.0)

    assert why(lab("a", 1.2), lab("b", 0.7)) is None
    assert why(lab("a", 0.3), lab("b", 0.2)) == "other processes used 1.5 of 2 cores"
    old = [node(name, lab=True, cpu=0.3) for name in "ab"]
    assert why(*old) is None, "they know only their own processes"


def test_of_several_machines_the_busy_ones_are_named() -> None:
    quiet: dict[str, Any] = {"machine_cpu": 2.0, "run_cpu": 1.9}
    busy = quiet | {"run_cpu": 1.0}
    assert why(node("a", machine="1", **quiet), node("b", machine="2", **busy)) == (
        "on b, other processes used 1.0 of 2 cores"
    )
    said = why(*(node(name, machine=name, **busy) for name in "abcde"))
    assert said is not None
    assert said.endswith("on c, other processes used 1.0 of 2 cores; and 2 more nodes were busy")
