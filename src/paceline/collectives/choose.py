"""The all-reduce algorithms by name."""

from paceline.collectives.gather import GATHER
from paceline.collectives.native import NATIVE
from paceline.collectives.plan import Averaging
from paceline.collectives.reduce_bcast import REDUCE_BCAST
from paceline.collectives.ring import RING

TABLE: dict[str, Averaging] = {a.name: a for a in (NATIVE, RING, REDUCE_BCAST, GATHER)}
