"""Bytes and speeds of links as people write them."""

import pytest

from paceline.errors import UsageError
from paceline.pipeline.sizes import digits, in_bits, in_bytes, parse_bandwidth, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GB", 2 * 10**9),
        ("512MB", 512 * 10**6),
        ("1.5GiB", 3 * 2**29),
        ("1g", 2**30),
        ("4096", 4096),
        (" 3 kB ", 3000),
    ],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "2 G B", "0", "0.2", "nan", "1Gbit", "9" * 30])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"the limit is .*; it takes a size such as 2GB"):
        parse_bytes(text, "the limit")


@pytest.mark.parametrize(
    ("text", "expected"), [("1Gbit", 125e6), ("100mbit/s", 12.5e6), ("2.5 Gbitps", 312.5e6), ("64kbit", 8e3)]
)
def test_speeds_are_read_as_bytes_a_second(text: str, expected: float) -> None:
    assert parse_bandwidth(text) == expected


@pytest.mark.parametrize("text", ["", "1", "1GB", "1Gbps", "1GBps", "0gbit", "-1gbit", "fast"])
def test_what_may_be_bits_or_bytes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"the link is .*; it takes the speed of a link, such as 1Gbit"):
        parse_bandwidth(text, "the link")


def test_sizes_and_speeds_are_shown() -> None:
    shown = {0: "0 B", 999: "999 B", 1000: "1.00 kB", 1_234_000: "1.23 MB", 5 * 10**12: "5,000 GB"}
    assert {value: in_bytes(value) for value in shown} == shown
    assert [in_bits(value) for value in (125e6, 12.5e6, 1e3)] == ["1 Gbit/s", "100 Mbit/s", "8 kbit/s"]


def test_three_digits_count() -> None:
    shown = {0: "0", 0.01234: "0.0123", 4.5678: "4.57", 37.72: "37.7", 9.999: "10.0", 3665.4: "3,665"}
    assert {value: digits(value) for value in shown} == shown
