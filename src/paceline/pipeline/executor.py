"""Runs a schedule on one rank: computes its stage, exchanges activations and gradients with neighbouring stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from paceline.comm.base import Comm, Work
from paceline.data.batch import Batch
from paceline.pipeline.graph import Form, Graph
from paceline.pipeline.schedule import AHEAD, Instruction, Op
from paceline.tasks.base import Sums
from paceline.tasks.scoring import Scorer

ACTIVATIONS, GRADIENTS = 1, 2  # tags

Mark = Callable[[str, int], None]  # what has just been done, and for which micro-batch


@dataclass
class Micro:
    """A micro-batch between its forward and its backward pass."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    random: Tensor | None = None  # the generator's state before forward, if it will be recomputed
    sends: list[Work] = field(default_factory=list)


@dataclass(frozen=True)
class Neighbours:
    """The ranks before and after this one in its pipeline; None at the ends."""

    before: int | None
    after: int | None


class Executor:
    """One stage of a model: the nodes from start to stop of the graph, whose weights have values."""

    training: nn.Module
    evaluation: nn.Module

    def __init__(
        self,
        graph: Graph,
        start: int,
        stop: int,
        comm: Comm,
        neighbours: Neighbours,
        scorer: Scorer,
        *,
        recompute: bool,
    ) -> None:
        self.graph, self.comm, self.neighbours, self.scorer, self.recompute = graph, comm, neighbours, scorer, recompute
        self.taken, self.given = graph.crossing(start), graph.crossing(stop)
        # The inputs of all micro-batches are views of one tensor: changing some in place would change the others.
        self._copies = neighbours.before is None and graph.changes_input()
        self.training, self.evaluation = (graph.stage(start, stop, training=on) for on in (True, False))

    def run(self, program: Sequence[Instruction], batches: Sequence[Batch], share: float, mark: Mark) -> Sums:
        """Run a step up to the update: adds the gradients of share × loss of all micro-batches to .grad.

        The first stage uses their inputs, the last one their targets and returns the sums; all need the sizes.
        """
        self._sums, self._share, self._mark = Sums(), share, mark
        self._batches = batches
        self._micros: dict[int, Micro] = {}
        self._gradients: dict[int, list[Tensor]] = {}
        self._leaving: deque[list[Work]] = deque()
        coming = (i for i in program if i.op in (Op.RECV_ACTIVATION, Op.RECV_GRADIENT))
        posted: deque[tuple[list[Tensor], list[Work]]] = deque()
        carry_out: dict[Op, Callable[[int], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.SEND_ACTIVATION: self._send_activations,
            Op.SEND_GRADIENT: self._send_gradients,
        }
        for instruction in program:
            while len(posted) < AHEAD and (receive := next(coming, None)):
                posted.append(self._post(receive))
            if instruction.op in carry_out:
                carry_out[instruction.op](instruction.micro)
            elif instruction.op != Op.STEP:
                tensors, works = posted.popleft()
                finish(works)
                self._mark("wait", instruction.micro)
                if instruction.op == Op.RECV_GRADIENT:
                    self._gradients[instruction.micro] = tensors
                else:
                    self._micros[instruction.micro] = Micro(tensors, [])
        while self._leaving:
            finish(self._leaving.popleft())
        self._batches = ()
        self._mark("send", -1)
        return self._sums

    def evaluate(self, batches: Iterable[Batch]) -> Sums:
        """The sums over all batches on the last stage; zeros on the others."""
        sums, sends = Sums(), deque[list[Work]]()
        for batch in batches:
            inputs = self.graph.arguments(batch.inputs)
            if self.neighbours.before is not None:
                inputs, works = self._receive(self.taken, batch.count, self.neighbours.before, ACTIVATIONS)
                finish(works)
            outputs = self._run(self.evaluation, inputs)
            if self.neighbours.after is None:
                sums = sums.plus(self.scorer.score(outputs[0], batch.targets).sums)
                continue
            sends.append(self._send(self.given, outputs, batch.count, self.neighbours.after, ACTIVATIONS))
            if len(sends) > 1:  # while one is being sent the next is computed
                finish(sends.popleft())
        for works in sends:
            finish(works)
        return sums

    def _run(self, stage: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
        with self.scorer.autocast():
            outputs = stage(*inputs)
        # What crosses a cut has the type that it has without autocast: neighbours know it from the graph.
        return [out.float() if out.dtype == torch.bfloat16 else out for out in outputs]

    def _forms(self, names: list[str], size: int) -> list[Form]:
        forms = self.graph.walk(size, training=torch.is_grad_enabled()).forms
        return [forms[name] for name in names]

    def _post(self, instruction: Instruction) -> tuple[list[Tensor], list[Work]]:
        size = self._batches[instruction.micro].count
        before, after = self.neighbours.before, self.neighbours.after
        if instruction.op == Op.RECV_ACTIVATION:
            assert before is not None
            return self._receive(self.taken, size, before, ACTIVATIONS)
        assert after is not None
        return self._receive(_with_gradient(self.given, self._forms(self.given, size)), size, after, GRADIENTS)

    def _receive(self, names: list[str], size: int, source: int, tag: int) -> tuple[list[Tensor], list[Work]]:
        forms = self._forms(names, size)
        tensors = [form.empty() for form in forms]
        works = [self.comm.irecv(f.flat(t), source, tag) for f, t in zip(forms, tensors, strict=True) if f.numel]
        return tensors, works

    def _send(self, names: list[str], tensors: Sequence[Tensor], size: int, to: int, tag: int) -> list[Work]:
        forms = self._forms(names, size)
        return [self.comm.isend(f.flat(t), to, tag) for f, t in zip(forms, tensors, strict=True) if f.numel]

    def _forward(self, number: int) -> None:
        if self.neighbours.before is None:
            self._micros[number] = Micro(self.graph.arguments(self._batches[number].inputs), [])
        micro = self._micros[number]
        forms = self._forms(self.taken, self._batches[number].count)
        for tensor, form in zip(micro.inputs, forms, strict=True):
            tensor.requires_grad_(form.grad)
        if self.recompute:
            micro.random = torch.get_rng_state()
            with torch.no_grad():
                micro.outputs = self._run(self.training, self._inputs(micro))
        else:
            micro.outputs = self._run(self.training, self._inputs(micro))
        if self.neighbours.after is None:
            self._add_loss(number, micro)
        self._mark("forward", number)

    def _inputs(self, micro: Micro) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() if self._copies else tensor for tensor in micro.inputs)

    def _add_loss(self, number: int, micro: Micro) -> None:
        """Make the loss the stage's output."""
        score = self.scorer.score(micro.outputs[0], self._batches[number].targets)
        self._sums, micro.outputs = self._sums.plus(score.sums), [score.loss]

    def _again(self, number: int, micro: Micro) -> None:
        """Repeat the forward pass and keep it for backward, with the same dropout and without updating statistics."""
        assert micro.random is not None
        now, copies = torch.get_rng_state(), {name: buffer.clone() for name, buffer in self.training.named_buffers()}
        torch.set_rng_state(micro.random)
        micro.outputs = self._run(lambda *inputs: functional_call(self.training, copies, inputs), self._inputs(micro))
        torch.set_rng_state(now)
        if self.neighbours.after is None:
            micro.outputs = [self.scorer.score(micro.outputs[0], self._batches[number].targets).loss]
        self._mark("recompute", number)

    def _backward(self, number: int) -> None:
        micro = self._micros[number]
        finish(micro.sends)  # they have arrived, because the gradient has come back
        if self.recompute:
            self._again(number, micro)
        if self.neighbours.after is None:
            outputs, gradients = micro.outputs, [torch.full_like(micro.outputs[0], self._share)]
        else:
            forms = self._forms(self.given, self._batches[number].count)
            outputs = [out for out, form in zip(micro.outputs, forms, strict=True) if form.grad]
            gradients = self._gradients.pop(number)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        micro.outputs = []
        if self.neighbours.before is None:
            del self._micros[number]
        self._mark("backward", number)

    def _send_activations(self, number: int) -> None:
        micro, size = self._micros[number], self._batches[number].count
        assert self.neighbours.after is not None
        micro.sends = self._send(self.given, micro.outputs, size, self.neighbours.after, ACTIVATIONS)
        if self.recompute:
            micro.outputs = []  # the sends keep their tensors alive
        self._mark("send", number)

    def _send_gradients(self, number: int) -> None:
        micro, size = self._micros.pop(number), self._batches[number].count
        assert self.neighbours.before is not None
        forms = self._forms(self.taken, size)
        pairs = zip(micro.inputs, forms, strict=True)
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t, form in pairs if form.grad]
        names = _with_gradient(self.taken, forms)
        self._leaving.append(self._send(names, gradients, size, self.neighbours.before, GRADIENTS))
        if len(self._leaving) > 1:  # while one is being sent the next is computed
            finish(self._leaving.popleft())
        self._mark("send", number)


def _with_gradient(names: list[str], forms: list[Form]) -> list[str]:
    return [name for name, form in zip(names, forms, strict=True) if form.grad]


def finish(works: list[Work]) -> None:
    for work in works:
        work.wait()
