"""What of a model decides how long a step takes: the sizes of its parameters, and when their gradients are ready."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.spec import RunSpec
from paceline.strategies.bucket_layout import assign, tail
from paceline.strategies.synchronous import RIDERS


@dataclass(frozen=True)
class Anatomy:
    """`sizes` are the values of each trained parameter, in the model's order; `ready` says after which fraction of the
    compute of a step its gradient is there, and `forward` is the fraction of the forward pass. `state` counts all
    parameters and buffers.
    """

    sizes: tuple[int, ...]
    ready: tuple[float, ...]
    forward: float
    state: int

    def shrunk(self, times: int) -> Anatomy:
        """With tensors that are so many times smaller, as `--shrink` makes them."""
        sizes = tuple(-(-size // times) for size in self.sizes)
        return Anatomy(sizes, self.ready, self.forward, self.state - sum(self.sizes) + sum(sizes))

    def buckets(self, limit: int, itemsize: int = 4, extras: int = RIDERS) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The values of each bucket of gradients, and the fraction of a step after which it can be sent."""
        last_first = list(reversed(self.sizes))
        numbers = assign([("", size, itemsize) for size in last_first], limit)
        lengths, times = [0] * (numbers[-1] + 1), [0.0] * (numbers[-1] + 1)
        for number, size, ready in zip(numbers, last_first, reversed(self.ready), strict=True):
            lengths[number] += size
            times[number] = max(times[number], ready)
        lengths[-1] += tail(len(self.sizes), extras)
        for number in range(1, len(times)):
            times[number] = max(times[number], times[number - 1])
        times[-1] = 1.0  # it also carries numbers that are known when backward has ended
        return tuple(lengths), tuple(times)


def anatomy_of(spec: RunSpec) -> Anatomy:
    """Builds the model without values, and counts its operations; imports torch."""
    import torch

    from paceline.data import table as datasets
    from paceline.data.load import load
    from paceline.emulation.timing import measure
    from paceline.strategies.setup import example, how_to_build

    data = datasets.describe(spec.data) or load(spec.data).info
    make, _ = how_to_build(spec, data)
    with torch.device("meta"):
        model = make()
    timing = measure(model, spec.input_shape(data), example(spec, data, 1).dtype if data.inputs is None else None)
    sizes = tuple(p.numel() for p in model.parameters() if p.requires_grad)
    state = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    return Anatomy(sizes, timing.ready, timing.forward, state)
