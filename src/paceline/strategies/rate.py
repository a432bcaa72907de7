"""The learning rate: scaling by workers, warm-up, decay (Goyal et al., 2017; Loshchilov and Hutter, 2017)."""

import math

from paceline.spec import RunSpec


def learning_rate(spec: RunSpec, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """The learning rate of update `step`.

    During warm-up it grows evenly to the scaled rate: from the rate of one worker, or, if it is not scaled, from 0
    (which would be the update before the first). Then it falls, with a cosine or linearly to 0 at the end of training.
    """
    assert spec.lr is not None
    peak = spec.lr * spec.lr_scale
    length, unit = spec.warmup
    warmup = min(round(length * (steps_per_epoch if unit == "epoch" else 1)), total_steps)
    if step < warmup:
        first = spec.lr if spec.lr_scale > 1 else peak / (warmup + 1)
        return first + (peak - first) * step / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    if spec.decay == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    if spec.decay == "linear":
        return peak * (1 - progress)
    if spec.decay == "step":
        assert spec.decay_every is not None
        assert spec.decay_factor is not None
        return float(peak * spec.decay_factor ** (step // max(1, round(spec.decay_every * steps_per_epoch))))
    return peak
