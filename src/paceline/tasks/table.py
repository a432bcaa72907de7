"""All tasks by name, and users' own; no torch."""

from __future__ import annotations

import math

from paceline import own_code
from paceline.errors import UsageError, unknown
from paceline.plugins import Table
from paceline.tasks.base import Task


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


CLASSIFICATION = Task("classification", "one class for each sample; cross-entropy", "paceline.tasks.losses:classify",
                      "accuracy", kinds=("images", "arrays"))  # fmt: skip
LANGUAGE_MODEL = Task("language-model", "the next token at every position; cross-entropy over the tokens that count",
                      "paceline.tasks.losses:predict_tokens", "accuracy", ("perplexity", perplexity),
                      kinds=("tokens", "arrays"), per_target=True)  # fmt: skip
REGRESSION = Task("regression", "numbers; the loss is the mean squared error", "paceline.tasks.losses:regress",
                  "mean absolute error", kinds=("arrays",), higher=False)  # fmt: skip
MOST_CLASSES = 100  # of which predictions are counted by class
TABLE = Table("paceline.tasks", Task, (CLASSIFICATION, LANGUAGE_MODEL, REGRESSION))
# The task that fits a kind of data.
USUAL = {"images": CLASSIFICATION.name, "tokens": LANGUAGE_MODEL.name, "arrays": CLASSIFICATION.name}


def describe(name: str) -> Task:
    """The task of this name, or a user's function as a task."""
    if name in TABLE:
        return TABLE[name]
    if not own_code.is_own(name):
        raise UsageError(f"{unknown('task', name, TABLE)}, or a function of your own: {own_code.FORMS}")
    return Task(name, "your own function", name, "metric")
