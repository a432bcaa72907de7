"""The description of a task, and the sums that it yields; no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from paceline.errors import UsageError


class Sums(NamedTuple):
    """Sums over some samples: of any number of ranks, steps or batches.

    The mean loss is loss / weight, and the metric is metric / weight. The weight is the number of samples, or of other
    targets that count, such as tokens.
    """

    loss: float = 0.0
    weight: float = 0.0
    metric: float = 0.0

    def plus(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss)


NOTHING = Sums()
# What is wrong with a weight of 0.
NOTHING_COUNTS = "no target of the samples counts: their weight is 0"


@dataclass(frozen=True)
class Task:
    """A way to score a model's output.

    `score` is `module:function`: it takes the output and the targets of a batch, and returns the summed loss, its
    weight and the sum of the metric.
    """

    name: str
    summary: str
    score: str
    metric: str | None = None  # what the metric is called: None if there is none; a sum of NaN is none, either
    derived: tuple[str, Callable[[float], float]] | None = None  # a figure of the mean loss: its name, the function
    kinds: tuple[str, ...] = ("images", "tokens", "arrays")  # of data
    per_target: bool = False  # the output has one row for each target of a sample, not one for the sample
    higher: bool = True  # whether a higher metric is better; of the loss and what is derived from it, lower is better

    @property
    def names(self) -> list[str]:
        """The names of its figures."""
        return ["loss", *([self.metric] if self.metric else []), *([self.derived[0]] if self.derived else [])]

    def sign(self, name: str) -> int:
        """What a figure is multiplied by so that higher is better."""
        return 1 if self.higher and name == self.metric else -1

    def figures(self, sums: Sums) -> dict[str, float]:
        """The mean loss, the metric and the derived figure, by name."""
        if not sums.weight:
            raise UsageError(f"{NOTHING_COUNTS}, but at least some must")
        loss = sums.loss / sums.weight
        found = {"loss": loss}
        if self.metric and not math.isnan(sums.metric):
            found[self.metric] = sums.metric / sums.weight
        if self.derived:
            name, function = self.derived
            found[name] = function(loss)
        return found
