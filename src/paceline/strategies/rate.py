"""The learning rate: scaling by workers, warm-up, decay (Goyal et al., 2017; Loshchilov and Hutter, 2017)."""

import math

from paceline.spec import RunSpec


def learning_rate(spec: RunSpec, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """The learning rate of update `step`.

    It starts at the rate of one worker and grows to the scaled rate during warm-up, so one worker has no warm-up; then
    it follows a cosine to zero at the end of training.
    """
    assert spec.lr is not None
    scale = spec.lr_scale
    warmup = min(round(spec.warmup_epochs * steps_per_epoch), total_steps) if scale > 1 else 0
    if step < warmup:
        return spec.lr * (1 + (scale - 1) * step / warmup)
    if spec.decay == "none":
        return spec.lr * scale
    progress = (step - warmup) / max(1, total_steps - warmup)
    return spec.lr * scale * 0.5 * (1 + math.cos(math.pi * progress))
