"""Splits the steps of any training loop into spans, by hooks on the model and on torch's optimizers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.loop.nested import tensors_in
from paceline.loop.shares import share_of
from paceline.run.core_clock import CoreClock
from paceline.strategies.engine import StepTimer

REST = ""  # what belongs to no span


class Spans:
    """The spans of the steps that the thread which creates this makes with a model.

    - input: from the end of a step to the beginning of the next, unless the model was called in between
    - forward: from a call of the model until backward begins, so that the loss is part of it
    - backward: until the autograd engine has computed all gradients
    - wait: what DDP, FSDP or paceline.DataParallel do at the end of backward, which is to wait for the other ranks
    - optimizer: an optimizer's step()
    - those that the loop marks itself; hooks are ignored inside of them
    """

    def __init__(self, model: nn.Module, clock: CoreClock) -> None:
        self._clock, self._thread = clock, threading.get_ident()
        self._timer, self._began, self._phase = StepTimer(clock=clock), time.perf_counter(), REST
        self._inside = self._marked = self._elsewhere = False
        self.own = self.total = 0  # samples that the model was given in this step: of this rank, and of all, if known
        self.lr: float | None = None
        self._hooks = [
            model.register_forward_pre_hook(self._on_forward, with_kwargs=True),
            # First, so that what FSDP and others want to be told of the same backward comes after it.
            model.register_forward_hook(self._on_output, prepend=True),
            register_optimizer_step_pre_hook(self._on_update),
            register_optimizer_step_post_hook(self._on_updated),
        ]

    def begin(self) -> None:
        """A step begins; the time since the last one was spent on its input."""
        if self._elsewhere:
            self._start_timer()
        else:
            self._timer.mark("input")
        self._inside, self._elsewhere, self._phase = True, False, REST
        self.own, self.total, self.lr = 0, 0, None

    def end(self) -> tuple[float, dict[str, float], dict[str, float]]:
        """A step has ended: its seconds, its spans, and how long of each the thread had no core."""
        self._enter(REST)
        timer, seconds = self._timer, self._timer.last - self._began
        self._inside = False
        self._timer, self._began = StepTimer(last=timer.last, clock=self._clock), timer.last
        timer.parts.pop(REST, None)
        timer.queued.pop(REST, None)
        return seconds, timer.parts, timer.queued

    def recorded(self) -> None:
        """The step that has ended is written down; that was not a part of the next one's input."""
        self._timer.mark(REST)

    def leave(self) -> None:
        """A step was ended by an error, or something else than input was done between steps."""
        self._inside, self._elsewhere = False, True

    @contextmanager
    def mark(self, name: str) -> Iterator[None]:
        """A span that hooks cannot see, in a step or between two."""
        before, marked = self._phase, self._marked
        self._timer.mark(before if self._inside else "input")
        self._phase, self._marked = name, True
        try:
            yield
        finally:
            self._enter(before)
            self._marked = marked

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _start_timer(self) -> None:
        self._clock.lap()
        self._timer = StepTimer(clock=self._clock)
        self._began = self._timer.last

    def _enter(self, phase: str) -> None:
        self._timer.mark(self._phase)
        self._phase = phase

    def _on_forward(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._inside:
            self._elsewhere = True
            return
        if torch.is_grad_enabled():
            share = share_of((args, kwargs))
            self.own += share.count if share else _first_dimension((args, kwargs))
            self.total += share.total if share else 0
        if not self._marked:
            self._enter("forward")

    def _on_output(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not self._inside or self._marked:
            return
        learning = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        for tensor in learning:
            tensor.register_hook(self._on_gradient)
        if not learning:
            self._enter(REST)

    def _on_gradient(self, _gradient: Tensor) -> None:
        """Backward has reached the model's output; there may be several."""
        if self._inside and not self._marked and self._phase != "backward":
            self._enter("backward")
            queue_callback(self._on_computed)

    def _on_computed(self) -> None:
        """All gradients are computed. Others have asked to be called after this, and this asks to be called last."""
        if self._phase == "backward":
            self._enter("wait")
            queue_callback(self._on_averaged)

    def _on_averaged(self) -> None:
        if self._phase == "wait":
            self._enter(REST)

    def _on_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._inside and not self._marked and threading.get_ident() == self._thread:
            self._enter("optimizer")
            if self.lr is None:
                self.lr = float(optimizer.param_groups[0]["lr"])

    def _on_updated(self, *_: Any) -> None:
        if self._phase == "optimizer" and threading.get_ident() == self._thread:
            self._enter(REST)


def queue_callback(callback: Any) -> None:
    """Have the autograd engine call this at the end of the backward that is running; DDP and FSDP use it, too."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _first_dimension(arguments: Any) -> int:
    return next((len(tensor) for tensor in tensors_in(arguments) if tensor.dim()), 0)
