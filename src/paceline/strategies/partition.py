"""Strategies whose workers each hold a part of the model, so that several workers form one replica; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError
from paceline.options import flag
from paceline.strategies import options
from paceline.strategies.base import Strategy

if TYPE_CHECKING:
    from paceline.spec import RunSpec


@dataclass(frozen=True)
class Partition(Strategy):
    by: str = ""  # the option with the number of workers per replica

    def parts(self, values: Mapping[str, Any]) -> int:
        """The number of workers per replica; by default all workers."""
        parts: int = values[self.by] or values["workers"]
        return parts

    def replica_size(self, runs: Sequence[Mapping[str, Any]], workers: int) -> dict[str, int]:
        """As many as in the largest run with replicas; all workers if there is none."""
        several = [(values["workers"], self.parts(values)) for values in runs if self.parts(values) < values["workers"]]
        return {self.by: max(several)[1] if several else workers}

    def check(self, spec: RunSpec) -> None:
        assert spec.workers is not None
        options.check_unchecked(spec)
        parts = self.parts(vars(spec))
        if spec.workers % parts:
            raise UsageError(
                f"--workers {spec.workers} with {flag(self.by)} {parts}: a replica has {parts} workers; "
                f"give a multiple of {parts} workers"
            )

    def workers(self, spec: RunSpec) -> str:
        replicas, parts = spec.grid.replicas, self.parts(vars(spec))
        return (
            f"{super().workers(spec)} ({replicas} replica{'s' if replicas > 1 else ''} of {parts} {self.part}s): "
            f"{replicas}"
        )
