"""What runs tell about how many updates other batches need: the noise of their gradients, and their losses."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.advise.advice import Learning
from paceline.advise.noise_scale import NoiseScale, Unknown, of_runs
from paceline.advise.steps_needed import StepsLaw, branch_points, fit_steps
from paceline.analysis.runs import Run

# Of the training's samples: the noise scale grows, so that its first steps say little about the rest. Runs that are
# meant to have this part may miss a few samples of it.
LEAST_PART, NEARLY = 0.1, 0.95


def learned(runs: Sequence[Run], samples: float | None) -> tuple[StepsLaw | None, Learning]:
    """The law of steps and batches for a training of so many samples; None if it is not known, with the reason."""
    trained = [run for run in runs if not run.emulated]
    if not trained:
        return None, Learning("compute was emulated, and nothing was trained")
    if samples is None:
        return None, Learning("the length of the training is not known")
    long = [run for run in trained if _samples(run) >= NEARLY * LEAST_PART * samples]
    if not long:
        part = 100 * max(map(_samples, trained)) / samples
        return None, Learning(
            f"the longest run has seen {part:.2g} % of the training; {100 * LEAST_PART:.0f} % are needed"
        )
    scale = of_runs(long)
    least = min(run.summary.global_batch for run in long)
    law = fit_steps(branch_points(long), scale, samples / least)
    if isinstance(law, Unknown):
        return None, Learning(law.why)
    return law, Learning("", law.critical_batch, scale.batch if isinstance(scale, NoiseScale) else None)


def _samples(run: Run) -> int:
    return sum(step.samples for step in run.steps[0])
