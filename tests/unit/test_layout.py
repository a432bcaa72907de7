"""How work and cores are divided over ranks; its examples are run as they stand in the docstrings."""

from __future__ import annotations

import doctest

import pytest

from paceline import layout


def test_the_examples_hold() -> None:
    assert doctest.testmod(layout).attempted > 0
    assert doctest.testmod(layout).failed == 0


def test_more_threads_than_cores_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "cores", lambda: 2)
    assert layout.crowded(2, None) is None
    assert layout.crowded(1, 2) is None
    warning = layout.crowded(16, None)
    assert warning is not None
    assert warning.startswith("16 workers on 2 cores take turns: expect no speedup from more than 2")
    assert "2 workers of 2 threads on 2 cores" in str(layout.crowded(2, 2))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert layout.crowded(4, 2, bound=True) is None, "each of them has two cores of its own"
    assert "5 workers of 2 threads on 8 cores" in str(layout.crowded(5, 2, bound=True))
