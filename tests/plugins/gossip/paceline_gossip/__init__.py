"""A package of somebody else: a strategy, a model and a data set for Paceline. Imported by every command: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.data.table import DataInfo
from paceline.models.table import ModelInfo
from paceline.options import option
from paceline.strategies.base import Strategy


@dataclass(frozen=True)
class Options:
    gossip_every: int = option(1, "steps after which each worker averages its weights with a neighbour",
                               label="gossip every", unit="step", least=1)  # fmt: skip


GOSSIP = Strategy(
    "gossip",
    "data parallel; each worker averages its weights with one neighbour now and then",
    "paceline_gossip.engine:prepare",
    Options,
    exact=False,
)
TWO_LAYERS = ModelInfo("two-layers", "paceline_gossip.engine:two_layers", 4 * 8 * 8 * 8 + 2 * 8, 0.0, 8, "for a test",
                       0, 0.0, (1, 8, 8), 2)  # fmt: skip
STRIPES = DataInfo("stripes", (1, 8, 8), 2, 96, 16, "upright or level stripes", load="paceline_gossip.engine:stripes")
