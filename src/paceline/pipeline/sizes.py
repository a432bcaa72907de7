"""Parses and formats sizes in bytes and speeds of links; no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.errors import UsageError

# As in a lab file.
BYTES = {
    **dict.fromkeys(("", "b"), 1),
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    **dict.fromkeys(("kib", "k"), 2**10),
    **dict.fromkeys(("mib", "m"), 2**20),
    **dict.fromkeys(("gib", "g"), 2**30),
    **dict.fromkeys(("tib", "t"), 2**40),
}
BITS = {
    unit + end: 1000**power
    for power, unit in enumerate(("bit", "kbit", "mbit", "gbit", "tbit"))
    for end in ("", "/s", "ps")
}
MOST = 10**18


def parse_bytes(text: str, what: str = "a size") -> int:
    """The bytes of `2GB`, `512MB`, `1.5GiB`, or of a plain number; `what` is the subject of the error message."""
    value = _quantity(text, BYTES)
    if value is None or not 1 <= value <= MOST:
        raise UsageError(f"{what} is {text!r}; it takes a size such as 2GB, 512MB or 1.5GiB, or a number of bytes")
    return round(value)


def parse_bandwidth(text: str, what: str = "a bandwidth") -> float:
    """The bytes per second of `1gbit`, `100Mbit/s` or `2.5Gbit/s`; not of `1Gbps`, which some use for bytes."""
    value = _quantity(text, BITS)
    if value is None or not 1000 <= value <= MOST:
        raise UsageError(f"{what} is {text!r}; it takes the speed of a link, such as 1Gbit, 100Mbit or 2.5Gbit/s")
    return value / 8


def in_bytes(value: float) -> str:
    """Bytes as text, in decimal units."""
    for unit, length in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= length:
            return f"{digits(value / length)} {unit}"
    return f"{value:.0f} B"


def in_bits(bytes_a_second: float) -> str:
    """The speed of a link as text."""
    rate = bytes_a_second * 8
    for unit, length in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if rate >= length:
            return f"{rate / length:.4g} {unit}"
    return f"{rate / 1000:.4g} kbit/s"


def digits(value: float) -> str:
    """Three significant digits without an exponent: 0.0123, 4.56, 37.7, 3,665."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - int(f'{abs(value):.2e}'.split('e')[1]))}f}"


def _quantity(text: str, units: Mapping[str, int]) -> float | None:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z/]*)\s*", text)
    unit = units.get(found[2].lower()) if found else None
    return float(found[1]) * unit if found and unit else None
