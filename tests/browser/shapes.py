"""Where texts are on a page, also those that are turned, and whether two of them cover each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Point = Sequence[float]
# Pixels by which letters' boxes may touch: a box has room above and below its letters.
SLACK = 1.5


@dataclass(frozen=True)
class Shape:
    """A text and the corners of its box, in order."""

    text: str
    corners: Sequence[Point]

    def inside(self, left: float, top: float, right: float, bottom: float) -> bool:
        return all(left - SLACK <= x <= right + SLACK and top - SLACK <= y <= bottom + SLACK for x, y in self.corners)


def overlap(one: Shape, other: Shape) -> bool:
    """Whether no line can be drawn between them (separating axes, of convex shapes)."""
    return all(_depth(one, other, axis) > SLACK for axis in (*_normals(one), *_normals(other)))


def _normals(shape: Shape) -> Iterator[tuple[float, float]]:
    for (x, y), (next_x, next_y) in zip(shape.corners, [*shape.corners[1:], shape.corners[0]], strict=True):
        length = ((next_x - x) ** 2 + (next_y - y) ** 2) ** 0.5
        if length:
            yield (y - next_y) / length, (next_x - x) / length


def _depth(one: Shape, other: Shape, axis: tuple[float, float]) -> float:
    first, second = ([x * axis[0] + y * axis[1] for x, y in shape.corners] for shape in (one, other))
    return min(max(first), max(second)) - max(min(first), min(second))
