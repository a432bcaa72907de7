"""A model without storage, whose parts get their first values later, each where it is wanted.

The constructor runs on tensors of torch's meta device, which have a size and no values, and what it does to them is
written down. It takes them for tensors on the CPU, since some functions of torch.nn.init do nothing on the meta
device. Random numbers are drawn and not kept. Where it looks at values, as `x.item()` and trunc_normal_ do, these are
made for it then, and take their memory until it has seen them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from paceline import own_code
from paceline.errors import UsageError
from paceline.models.draws import RANDOM
from paceline.models.recording import AsOnCpu, Recorder
from paceline.models.replay import Ref, Tape


class Deferred:
    """`model` is on the meta device, and `values` makes real tensors of parts of it."""

    def __init__(self, model: nn.Module, tape: Tape, tensors: dict[str, Ref]) -> None:
        self.model, self._tape, self._tensors = model, tape, tensors

    @property
    def names(self) -> Collection[str]:
        """What `values` can be asked for."""
        return self._tensors.keys()

    def values(self, wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """First values of parameters and buffers, by any of their names; also of tensors that are plain attributes.

        They come one by one, in an order that is the same everywhere, and belong to the caller: besides, only the
        memory of the one at work on is used. torch's random state stays as it is.
        """
        asked = set(wanted)
        assert asked <= self._tensors.keys(), f"the model has no tensors {sorted(asked - self._tensors.keys())}"
        return self._tape.values({name: ref for name, ref in self._tensors.items() if name in asked})


def defer(make: Callable[[], nn.Module], seed: int) -> Deferred:
    """Build without storage the model that `torch.manual_seed(seed); make()` builds."""
    recorder = Recorder()
    why = "strategies pipeline and tensor first build a model without storage, on torch's meta device"
    with RANDOM, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            with recorder, AsOnCpu(recorder):
                model = make()
        except UsageError as error:
            if error.__cause__ is None:  # a name or an option that is wrong in any case
                raise
            raise UsageError(f"{error}; {why}") from error
        except Exception as error:
            raise UsageError(f"the model cannot be built: {own_code.reason(error)}; {why}") from error
    return Deferred(model, recorder.tape, _tensors(model, recorder))


def _tensors(model: nn.Module, recorder: Recorder) -> dict[str, Ref]:
    """All tensors that modules have, by all of their names; real ones, as from a file, are put on the meta device."""
    found: dict[str, Ref] = {}
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers, vars(module)):
            for name, tensor in [item for item in table.items() if isinstance(item[1], Tensor)]:
                here = tensor
                if not tensor.is_meta:
                    _, here = moved.setdefault(id(tensor), (tensor, recorder.stand_in(tensor)))
                    table[name] = here
                found[f"{path}.{name}" if path else name] = recorder.ref(here)
    return found
