"""Training loss and metric of an epoch, for records and for the console; empty with emulated compute."""

from __future__ import annotations

from paceline.spec import RunSpec
from paceline.tasks.base import Sums

SHORT = {"accuracy": "acc"}


class Learned:
    """Sums over the samples of an epoch so far."""

    def __init__(self, spec: RunSpec) -> None:
        self._emulated, self._task = spec.emulated, spec.objective
        self.sums = Sums()

    def add(self, sums: Sums) -> None:
        self.sums = self.sums.plus(sums)

    def figures(self) -> dict[str, float]:
        """The mean loss, and the task's other figures."""
        return {} if self._emulated or not self.sums.weight else self._task.figures(self.sums)

    def bar(self) -> dict[str, str]:
        """Loss and metric for the progress bar."""
        return {SHORT.get(name, name): shown(name, value, "%") for name, value in self.figures().items()}

    def line(self) -> str:
        """The line at the end of an epoch."""
        if self._emulated:
            return "Emulated compute: nothing was trained"
        return in_words("Training", self.figures(), " over epoch") if self.sums.weight else "This rank had no samples"


def shown(name: str, value: float, unit: str = "") -> str:
    return f"{value:.2%}" if name == "accuracy" and unit else f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"


def in_words(what: str, figures: dict[str, float], when: str = "") -> str:
    """Such as "Training acc over epoch: 0.9871, training loss: 0.0412"."""
    order = [*(name for name in figures if name != "loss"), "loss"]
    first, *others = [f"{SHORT.get(name, name)}: {shown(name, figures[name])}" for name in order]
    name, _, value = first.partition(": ")
    return ", ".join([f"{what} {name}{when}: {value}", *(f"{what.lower()} {each}" for each in others)])
