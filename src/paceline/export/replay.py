"""Gives trackers the values of a run from its folder, whether it has ended or not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from paceline.export.trackers import Tracker, hyperparameters
from paceline.export.values import TRACKED, NodeValues, Point, RankValues
from paceline.run.clocks import aligned, shifted
from paceline.run.folder import node_files, node_head, node_offsets, rank_file, ranks_in, read_ranks, read_spec
from paceline.run.lines import stream_lines
from paceline.run.records import Clock, NodeSample, Start


def replay(folder: Path, tracker: Callable[[Path], Tracker], steps: range | None = None) -> int:
    """Give all values of a run to trackers, of which `tracker` makes one for each rank's and each node's file.

    Returns how many values there were. Raises ValueError if a line of the records cannot be.
    """
    options, count = hyperparameters(read_spec(folder)), 0
    for rank in ranks_in(folder):
        path, values = rank_file(folder, rank), RankValues()
        with closing(tracker(path)) as made:
            made.hyperparameters(options)
            for line in aligned(stream_lines(path, Start, Clock, *TRACKED, steps=steps)):
                count += _log(made, values.of(line))
    alone, offsets = len({row.host for row in read_ranks(folder)}) < 2, node_offsets(folder)
    for path in node_files(folder):
        head, of_node = node_head(path), NodeValues(alone=alone)
        offset = offsets.get(head.name, 0.0) if head else 0.0
        with closing(tracker(path)) as made:
            for sample in stream_lines(path, NodeSample):
                count += _log(made, of_node.of(shifted(sample, offset)))
    return count


def _log(tracker: Tracker, point: Point | None) -> int:
    """How many values there were."""
    if point is None:
        return 0
    tracker.log(point.step, point.values, point.time)
    return len(point.values)
