"""A predicted value with its interval."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.predict.steps import Array

LEVEL = 0.9


@dataclass(frozen=True)
class Range:
    """A value, and where it lies with 90 % probability."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, drawn: Array, factor: float = 1.0) -> Range:
        """The first of the draws is the value. The interval is widened by a factor, on a logarithmic scale."""
        value = float(drawn[0])
        low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        if value <= 0:
            return cls(value, float(low), float(high))
        return cls(value, value * min(1.0, low / value) ** factor, value * max(1.0, high / value) ** factor)
