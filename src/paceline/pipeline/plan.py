"""A model's profile, the devices of its stages, and the plan that divides it into stages: plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MEMORY = ("base", "weights", "gradients", "optimizer", "activations", "working")


@dataclass(frozen=True)
class Node:
    """A layer, or a function between layers; times and bytes are for one micro-batch unless noted otherwise."""

    name: str
    forward: float  # seconds
    backward: float  # seconds
    update: float  # seconds of an optimizer step, minus what the first micro-batch saves by not adding to a gradient
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    working_bytes: int  # scratch, while it runs
    internal_bytes: int  # kept from forward to backward, besides values
    kept: frozenset[int]  # the storages of values that it keeps from forward to backward


@dataclass(frozen=True)
class Cut:
    """A place between two nodes, and the values that cross it for each micro-batch."""

    forward_bytes: int
    backward_bytes: int
    reason: str | None  # why it cannot be cut here; None: it can
    values: tuple[str, ...]
    storages: frozenset[int]

    @property
    def bytes(self) -> int:
        return self.forward_bytes + self.backward_bytes


@dataclass(frozen=True)
class Copied:
    """A weight that several nodes use: each stage with one of them has a copy, which is not counted in the nodes."""

    nodes: tuple[int, ...]
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    update: float  # seconds of an optimizer step


@dataclass(frozen=True)
class Profile:
    """The cost of each node of a model. cuts[p] is before node p; cuts[0] and the last one are the ends."""

    nodes: tuple[Node, ...]
    cuts: tuple[Cut, ...]
    storage_bytes: tuple[int, ...]  # by the number of a storage
    base_bytes: int  # of a process without a model
    micro_size: int  # samples
    batch_bytes: int = 0  # of a replica's whole prepared batch; the first stage has several
    copies: float = 0.0  # copies of the weights that a rank keeps besides those it trains
    copied: tuple[Copied, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.cuts) == len(self.nodes) + 1
        assert self.cuts[0].reason is None
        assert self.cuts[-1].reason is None

    def valid(self) -> list[int]:
        """The positions of possible cuts, including both ends."""
        return [position for position, cut in enumerate(self.cuts) if cut.reason is None]


@dataclass(frozen=True)
class Device:
    """The device of a stage: its speed relative to the measured one, and its memory in bytes (None: enough)."""

    speed: float = 1.0
    memory: int | None = None


@dataclass(frozen=True)
class Stage:
    """The nodes from start to stop, and their predicted cost."""

    start: int
    stop: int
    layers: tuple[str, ...]
    parameters: int
    seconds: float  # of computing, for a micro-batch
    transfer_seconds: float  # over the cuts on both sides, for a micro-batch
    forward_bytes: int  # over the cut after it; 0 for the last
    memory: dict[str, int]  # by MEMORY

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def total_seconds(self) -> float:
        return self.seconds + self.transfer_seconds


@dataclass(frozen=True)
class StagePlan:
    """A model in stages."""

    stages: tuple[Stage, ...]
    schedule: str
    micros: int
    micro_size: int
    bandwidth: float | None  # bytes per second; None: messages take no time
    how: str  # measured, layers, parameters or given

    @property
    def timed(self) -> bool:
        """Whether layers were run to measure their time; otherwise only sizes are known."""
        return any(stage.seconds > 0 for stage in self.stages)

    @property
    def sized(self) -> bool:
        """Whether the memory of stages is known: layers were run, in a process that has a size itself."""
        return any(stage.memory["base"] > 0 for stage in self.stages)

    @property
    def slowest(self) -> float:
        """Seconds per micro-batch of the slowest stage."""
        return max(stage.total_seconds for stage in self.stages)

    def positions(self) -> tuple[int, ...]:
        """The positions of the cuts: the first node of each stage except the first."""
        return tuple(stage.start for stage in self.stages[1:])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StagePlan:
        stages = tuple(Stage(**stage | {"layers": tuple(stage["layers"])}) for stage in values["stages"])
        return cls(**dict(values) | {"stages": stages})
