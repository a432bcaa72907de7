"""Training loss and accuracy of an epoch, for records and for the console; empty with emulated compute."""

from __future__ import annotations

from paceline.spec import RunSpec


class Learned:
    """Sums over the samples of an epoch so far."""

    def __init__(self, spec: RunSpec) -> None:
        self._emulated = spec.emulated
        self.loss, self.correct, self.count = 0.0, 0.0, 0

    def add(self, loss: float, correct: float, count: int) -> None:
        self.loss, self.correct, self.count = self.loss + loss, self.correct + correct, self.count + count

    def means(self) -> dict[str, float]:
        """The mean loss, and the accuracy."""
        if self._emulated or not self.count:
            return {}
        return {"loss": self.loss / self.count, "accuracy": self.correct / self.count}

    def bar(self) -> dict[str, str]:
        """Loss and accuracy for the progress bar."""
        means = self.means()
        return {"loss": f"{means['loss']:.4f}", "acc": f"{means['accuracy']:.2%}"} if means else {}

    def line(self) -> str:
        """The line at the end of an epoch."""
        means = self.means()
        if self._emulated:
            return "Emulated compute: nothing was trained"
        if not means:
            return "This rank had no samples"
        return f"Training acc over epoch: {means['accuracy']:.4f}, training loss: {means['loss']:.4f}"
