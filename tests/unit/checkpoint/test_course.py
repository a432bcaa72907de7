"""Every sample is used once an epoch, wherever a training is continued and with whatever batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.data.course import Course, Position


@given(st.integers(1, 60), st.lists(st.tuples(st.integers(1, 70), st.integers(0, 25)), min_size=1, max_size=5))
def test_the_positions_of_every_epoch_are_used_once_and_in_order(samples: int, legs: list[tuple[int, int]]) -> None:
    position, used = Position(), list[tuple[int, int]]()
    for batch, steps in legs:
        course = Course(samples, batch, position)
        for step in range(position.step, position.step + steps):
            used += [(course.epoch(step), place) for place in course.span(step)]
        position = course.after(position.step + steps)
    assert used == [(i // samples, i % samples) for i in range(len(used))]
    assert (position.epoch * samples + position.used) == len(used)


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 30), st.integers(0, 3))
def test_an_epoch_ends_where_the_next_begins(samples: int, batch: int, steps: int, epoch: int) -> None:
    course = Course(samples, batch, Course(samples, 7).after(steps))
    end = course.end(course.start.epoch + epoch)
    assert course.after(end).used == samples
    assert course.epoch(end) == course.start.epoch + epoch + 1
    assert course.span(end).start == 0
    assert course.number(end) == 0
