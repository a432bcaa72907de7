"""What TensorBoard's own reader finds in a folder of events."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """By tag: the step, the time and the value of each event."""
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: [(each.step, each.wall_time, each.value) for each in read.Scalars(tag)]
            for tag in read.Tags()["scalars"]}  # fmt: skip
