"""A published table: what its rows contradict, and what its first rows predict."""

from __future__ import annotations

import numpy as np
import pytest
from published_table import Row, contradictions, predict, read_rows


def test_the_rows_are_those_of_the_paper() -> None:
    rows = read_rows()
    assert len(rows) == 9
    assert (rows[0].steps, rows[3].steps) == (469, 59)
    assert rows[1].step == pytest.approx(82.06 / 235)


def test_rows_that_agree_are_not_blamed() -> None:
    assert contradictions([Row(1, 1, 142.0, 715.0), Row(1, 2, 82.0, 415.0), Row(1, 4, 41.5, 212.0)]) == []


def test_totals_and_steps_that_cannot_be_are_found() -> None:
    total, late, faster = contradictions([Row(1, 1, 142.0, 595.0), Row(1, 2, 82.0, 515.0), Row(1, 4, 34.4, 180.0)])
    assert "5 epochs of 142 s are 710.0 s, the total is 595 s" in total
    assert "105.0 s more than 5 epochs" in late
    assert "although it has the same compute and more messages" in faster


def test_a_machine_with_two_states_makes_intervals_wider() -> None:
    rows = read_rows()
    eight = next(row for row in rows if (row.nodes, row.processes) == (1, 8))
    one, two = (np.quantile(predict(rows, eight, states=states), [0.05, 0.95]) for states in (False, True))
    assert one[0] < eight.epoch < one[1]
    assert two[0] < eight.epoch < two[1]
    assert two[1] - two[0] > one[1] - one[0]
