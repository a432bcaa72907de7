"""Predictions for a device that nobody here has: its compute time from a published figure, the rest from the probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.emulation.table import TABLE, Device, estimate, in_words
from paceline.errors import UsageError, unknown
from paceline.predict.fit import Fit
from paceline.predict.probes import Probe

# The relative error of a figure on another machine, and of one that was derived from another model or size (standard
# deviations): our assumptions, which no measurement of ours supports.
FIGURE_ERROR, DERIVED_ERROR = 0.05, 0.25


def device_named(name: str) -> Device:
    if name not in TABLE:
        raise unknown("device", name, TABLE)
    return TABLE[name]


def on_device(fit: Fit, probes: Sequence[Probe], device: Device) -> Fit:
    """Each worker computes on such a device of its own. Noise and the costs of messages are those of the probes.

    Published figures include the update, and are used for all batch sizes.
    """
    spec = probes[0].spec
    if not fit.anatomy.macs:
        raise UsageError(
            f"--device {device.name}: model {spec.model} has no convolution or matrix product to count, so its time on "
            "another device is not known; leave it out"
        )
    found = estimate(device, spec.model, fit.anatomy.macs)
    about = f"device {device.name} was not measured: {found.how}"
    if fit.emulated:
        about += f"; noise and messages are those of {in_words(spec.compute)}"
    return replace(
        fit,
        per_sample=found.seconds * spec.accumulate,
        fixed=0.0,
        least=0.0,
        compute_error=DERIVED_ERROR if found.derived else FIGURE_ERROR,
        overhead=0.0,
        emulated=True,  # workers do not compute on the cores of the probes
        overlap=None,
        slowdown=0.0,
        device=about,
    )
