"""Prices are read from a file, and wrong ones are refused with what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.advise.prices import read_length, read_money, read_prices
from paceline.errors import UsageError

GOOD = """
currency = "EUR"
source = "a shop"
dated = 2026-11-01
example = true
[[machine]]
name = "small"
per_hour = 0.5
link = "1gbit"
memory = "8GB"
[[machine]]
name = "large"
per_hour = 2
speed = 4.0
most = 2
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "prices.toml"
    path.write_text(text)
    return path


def test_kinds_have_prices_links_memory_and_speeds(tmp_path: Path) -> None:
    prices = read_prices(write(tmp_path, GOOD))
    small, large = prices.kinds
    assert (small.per_hour, small.rate, small.memory, small.speed) == (0.5, 10**9, 8 * 10**9, 1.0)
    assert (large.per_hour, large.rate, large.speed, large.most) == (2.0, None, 4.0, 2)
    assert (prices.pricing.currency, prices.pricing.dated, prices.pricing.example) == ("EUR", "2026-11-01", True)


def test_nodes_of_a_cluster_have_the_price_of_their_name_or_of_the_only_machine(tmp_path: Path) -> None:
    prices = read_prices(write(tmp_path, GOOD))
    assert prices.of_nodes(["large", "small", "small"][:2], "x") == (2.0, 0.5)
    with pytest.raises(UsageError, match="no price for the node n2"):
        prices.of_nodes(["small", "n2"], "x")
    one = read_prices(write(tmp_path, GOOD[: GOOD.rindex("[[machine]]")]))
    assert one.of_nodes(["n1", "n2"], "x") == (0.5, 0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "currency is None; give three letters"),
        ('currency = "euro"', "currency is 'euro'"),
        ('currency = "EUR"', "no machine has a price"),
        ('currency = "EUR"\n[[machine]]\nname = "a"', "it needs a name and a price"),
        ('currency = "EUR"\n[[machine]]\nname = "a"\nper_hour = -1', "per_hour is -1; it takes a number from 0"),
        ('currency = "EUR"\n[[machine]]\nname = "a"\nper_hour = 1\nlink = "fast"', "link is 'fast'"),
        ('currency = "EUR"\n[[machine]]\nname = "a"\nper_hour = 1\nprice = 2', "unknown key 'price'"),
        ('currency = "EUR"' + '\n[[machine]]\nname = "a"\nper_hour = 1' * 2, "a has two prices"),
        ("currency =", "not valid TOML"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_prices(write(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the prices"):
        read_prices(tmp_path / "nothing.toml")


def test_lengths_and_money() -> None:
    assert [read_length(text, "--deadline") for text in ("45s", "90min", "6h", "2 d")] == [45, 5400, 21600, 172800]
    assert [read_money(text, "EUR", "--budget") for text in ("50EUR", "12.5", "3 eur")] == [50, 12.5, 3]
    for text in ("6", "h", "0h", "6 weeks", "-1h"):
        with pytest.raises(UsageError, match="give a length of time"):
            read_length(text, "--deadline")
    with pytest.raises(UsageError, match="the prices are in EUR"):
        read_money("50USD", "EUR", "--budget")
    with pytest.raises(UsageError, match="give an amount, such as 50EUR"):
        read_money("cheap", "EUR", "--budget")
