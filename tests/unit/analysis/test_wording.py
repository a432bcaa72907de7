"""Numbers and lists in words."""

from __future__ import annotations

import pytest

from paceline.analysis.statistics import Interval
from paceline.analysis.wording import count, link, listing, number, percents, seconds, size, some, within


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0"), (0.01234, "0.0123"), (0.771, "0.771"), (4.567, "4.57"), (9.999, "10.0"), (37.66, "37.7"),
     (99.96, "100"), (3664.9, "3,665"), (-0.5, "-0.500"), (float("nan"), "unknown"), (float("inf"), "unknown")],
)  # fmt: skip
def test_numbers_have_three_digits(value: float, said: str) -> None:
    assert number(value) == said


def test_units_are_those_that_people_use() -> None:
    assert [seconds(value) for value in (0.0123, 1.5, 119, 120, 8000)] == ["12.3 ms", "1.50 s", "119 s", "2.00 min",
                                                                         "2.22 h"]  # fmt: skip
    assert [size(value) for value in (12, 2500, 5.52e6, 3.25e9)] == ["12 B", "2.50 kB", "5.52 MB", "3.25 GB"]
    assert [link(value) for value in (2e7, 1e9, 2.5e9)] == ["20 Mbit/s", "1 Gbit/s", "2.5 Gbit/s"]


def test_lists_are_read_aloud_and_stay_short() -> None:
    assert [listing(list(words)) for words in ("", "a", "ab", "abc")] == ["", "a", "a and b", "a, b and c"]
    assert listing(["ring, 2", "ps, 4"]) == "ring, 2; and ps, 4"
    assert some(list("abcde")) == "a, b, c and 2 more"
    assert some(list("abcd")) == "a, b, c and d"  # one more is no longer than its name
    assert [count(1, "run"), count(2, "run"), count(1500, "run")] == ["1 run", "2 runs", "1,500 runs"]


def test_an_interval_is_given_where_it_says_more() -> None:
    assert within(Interval(3665, 3600, 3720)) == "3,665 (3,600 to 3,720)"
    assert within(Interval(3665, 3665, 3665)) == "3,665"
    assert percents(Interval(0.81, 0.78, 0.84)) == "81 % (78 to 84)"
    assert percents(Interval(0.81, 0.811, 0.812)) == "81 %"
