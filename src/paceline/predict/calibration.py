"""How wide intervals must be for 90 % of runs to be inside, by split conformal prediction.

Predicted intervals know what a fit leaves open, but not what the model leaves out. A calibration compares predictions
with runs that were made for it, and says by which factor intervals are widened from then on, on a logarithmic scale.
These runs, those that predictions are made from, and those that are scored must be disjoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from math import ceil, inf, log
from pathlib import Path
from typing import Annotated

from paceline.errors import UsageError
from paceline.predict.probes import Probe
from paceline.predict.ranges import LEVEL, Range
from paceline.run.folder import rank_file
from paceline.strict_json import Bounds, build

MOST_FACTOR = 1000.0
FEWEST_RUNS = 9  # with fewer, no factor has the level


@dataclass(frozen=True)
class Calibration:
    """`runs` are fingerprints of the runs that the factor follows from, and of the probes they were predicted from."""

    factor: Annotated[float, Bounds(0, MOST_FACTOR)]
    runs: tuple[str, ...] = ()


UNCALIBRATED = Calibration(1.0)
# What predictions use without --calibration: intervals of the runs that were held out need not be wider, see
# docs/prediction.md.
SHIPPED = Calibration(1.0)


def fingerprint(probe: Probe) -> str:
    """The same for copies of a run folder, and for no other run."""
    return hashlib.sha256(rank_file(probe.run.folder, 0).read_bytes()).hexdigest()[:16]


def distance(measured: float, predicted: Range) -> float:
    """How far from the prediction a run is: 1 at an end of its interval."""
    end = predicted.high if measured > predicted.value else predicted.low
    return log(measured / predicted.value) / log(end / predicted.value) if end != predicted.value else inf


def calibrate(distances: Sequence[float], used: Collection[str] = ()) -> Calibration:
    """The factor with which another run is inside with 90 % probability: a quantile of the distances, which are those
    from intervals without any calibration.
    """
    if len(distances) < FEWEST_RUNS:
        raise UsageError(
            f"{len(distances)} runs to calibrate with: at least {FEWEST_RUNS} are needed to know where 90 % of them are"
        )
    rank = min(len(distances), ceil((len(distances) + 1) * LEVEL))
    factor = sorted(distances)[rank - 1]
    if factor > MOST_FACTOR:
        raise UsageError(f"intervals would have to be {factor:g} times as wide: predictions of these runs say nothing")
    return Calibration(factor, tuple(sorted(used)))


def check_disjoint(probes: Sequence[Probe], calibration: Collection[str], scored: Sequence[Probe]) -> None:
    """Raises UsageError if a run is in two of the three."""
    own = {fingerprint(probe) for probe in probes}
    for run in scored:
        if fingerprint(run) in own:
            raise UsageError(
                f"{run.run.folder} is a probe, and cannot be scored: score runs that predictions are not made from"
            )
    for run in (*probes, *scored):
        if fingerprint(run) in calibration:
            raise UsageError(
                f"{run.run.folder} was used to calibrate the intervals, so it can be neither a probe nor scored: use "
                "other runs, or leave --calibration out"
            )


def read_calibration(path: Path) -> Calibration:
    try:
        return build(Calibration, json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise UsageError(f"--calibration {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(
            f"--calibration {path}: not a file of `paceline predict --score … --calibrate`: {error}"
        ) from None


def calibration_text(calibration: Calibration) -> str:
    return json.dumps(asdict(calibration)) + "\n"
