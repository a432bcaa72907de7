"""Detects values that are not finite in gradients and weights, and finds the step and the rank that caused them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from itertools import islice

from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from paceline.comm.base import Comm
from paceline.comm.words import share_text
from paceline.errors import DivergedError

SKIP = "skip"
MOST_SKIPPED = 10  # updates in a row


def not_finite(tensors: Mapping[str, Tensor], besides: Collection[str] = ()) -> list[str]:
    """The names of tensors with a value that is not finite, except those in `besides`."""
    return [name for name, tensor in tensors.items() if name not in besides and not is_finite(tensor)]


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; makes no copy, unless the sum overflows."""
    return math.isfinite(tensor.sum()) or bool(tensor.isfinite().all())


def all_finite(gradients: list[Tensor]) -> bool:
    """Whether all values are finite: by one norm over all of them, and one by one only if that overflows."""
    if not gradients or math.isfinite(get_total_norm(gradients)):
        return True
    return all(is_finite(gradient) for gradient in gradients)


class Watch:
    """Records the first step in which this rank's own gradient, before averaging, was not finite.

    In every step it checks the gradient of the first parameter, where backward ends, because errors in later layers
    propagate to it. Checking all gradients costs more, and is done before the model is evaluated or saved.
    """

    def __init__(self, model: nn.Module, most: int | None = None) -> None:
        """With `most`, only as many parameters can be checked."""
        self.constants = not_finite(dict(model.named_buffers()))  # such as a mask of infinities
        self._all, self._sum = False, 0.0
        self.since: int | None = None
        for number, parameter in enumerate(islice((p for p in model.parameters() if p.requires_grad), most)):
            parameter.register_hook(lambda gradient, first=not number: self._see(gradient, first))

    def begin(self, *, everything: bool) -> None:
        self._all, self._sum = everything, 0.0

    def _see(self, gradient: Tensor, first: bool) -> None:
        if first or self._all:
            self._sum += float(gradient.detach().sum())

    def end(self, step: int) -> None:
        if self.since is None and not math.isfinite(self._sum):
            self.since = step

    def check(self, state: Mapping[str, Tensor], comm: Comm, step: int, what: str | None = None) -> None:
        """Raise DivergedError on all ranks if a value in any rank's state is not finite, or if `what` is given."""
        mine = not_finite(state, self.constants)[:1]
        rows = [json.loads(row) for row in share_text(json.dumps([*mine, self.since]), comm)]
        tensor = next((row[0] for row in rows if len(row) > 1), None)
        if tensor or what:
            since = {comm.name(rank): row[-1] for rank, row in enumerate(rows)}
            raise DivergedError.found(what or "the model is not finite", step, since, tensor)
