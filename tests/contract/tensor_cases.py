"""Split layers beside the layers they replace, as cases that run on each rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import islice, product
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.data.batch import Batch
from paceline.layout import share
from paceline.models.gpt import Gpt
from paceline.strategies.engine import Lockstep, StepTimer
from paceline.strategies.sequential import Sequential
from paceline.strategies.synchronous import Options
from paceline.strategies.tensor.engine import TensorParallel
from paceline.tensor.apply import split_wide
from paceline.tensor.layers import ChannelConv2d, ColumnLinear, RowLinear

Model = TypeVar("Model", bound=nn.Module)
# Uneven over 3 and 4 shards; 4 outputs over 3 and 4 leave some with one.
LINEARS = [(10, 12), (7, 10), (9, 4), (5, 23)]
BATCHES = [(6,), (1,), (), (0,), (2, 3), (2, 1, 2, 2)]
CONVOLUTIONS: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"in_channels": 3, "out_channels": 10, "kernel_size": 3}, (2, 3, 6, 7)),
    ({"in_channels": 3, "out_channels": 4, "kernel_size": 3, "stride": 2, "padding": 1}, (2, 3, 7, 8)),
    ({"in_channels": 1, "out_channels": 7, "kernel_size": (3, 2), "padding": (1, 0), "bias": False}, (3, 1, 5, 5)),
    ({"in_channels": 2, "out_channels": 5, "kernel_size": 3, "dilation": 2}, (2, 2, 7, 7)),
    ({"in_channels": 2, "out_channels": 5, "kernel_size": 1, "stride": (2, 1)}, (1, 2, 5, 5)),
    ({"in_channels": 2, "out_channels": 6, "kernel_size": (4, 3), "padding": "same"}, (2, 2, 6, 6)),
    ({"in_channels": 2, "out_channels": 6, "kernel_size": 3, "padding": "valid"}, (2, 2, 6, 6)),
    ({"in_channels": 2, "out_channels": 6, "kernel_size": 3}, (2, 6, 6)),
    ({"in_channels": 2, "out_channels": 6, "kernel_size": 3}, (0, 2, 6, 6)),
    ({"in_channels": 2, "out_channels": 6, "kernel_size": 3}, (3, 2, 3, 3)),
    *(
        ({"in_channels": 2, "out_channels": 9, "kernel_size": 3, "padding": 1, "padding_mode": mode}, (2, 2, 5, 6))
        for mode in ("reflect", "replicate", "circular")
    ),
]


def fill(model: Model, seed: int = 0) -> Model:
    """The same values on every rank, whatever other threads draw; of a size that keeps outputs near one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / max(1, p[0].numel()) ** 0.5)
    return model.double()


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def results(layer: nn.Module, x: Tensor, to_loss: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The layer's output and all gradients. Its input is no leaf, and its output is changed in place."""
    x = x.detach().requires_grad_()
    out = layer(x * 1.0)
    value = out.detach().clone()
    to_loss(out.mul_(2.0)).backward()
    found = {"output": value, "input": x.grad}
    found |= {f"{name} gradient": p.grad for name, p in layer.named_parameters()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def parts_of(whole: dict[str, Tensor], split_along: dict[str, int], comm: Comm) -> dict[str, Tensor]:
    """What a shard should have of what the whole layer has."""
    out = dict(whole)
    for name, dim in split_along.items():
        if name in out and out[name].dim():
            own = share(out[name].shape[dim], comm.size, comm.rank)
            out[name] = out[name].narrow(dim, own.start, len(own))
    return out


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    assert all(a[name].shape == b[name].shape for name in a), [(n, a[n].shape, b[n].shape) for n in a]
    return max(((a[n] - b[n]).abs().max() / b[n].abs().max().clamp(min=1)).item() if a[n].numel() else 0.0 for n in a)


def linears_match(comm: Comm, every: int) -> float:
    """The largest difference of any value between Linear and its split forms, in every n-th of many settings."""
    worst = 0.0
    for (inputs, outputs), batch, bias in islice(product(LINEARS, BATCHES, (True, False)), 0, None, every):
        plain = fill(nn.Linear(inputs, outputs, bias=bias))
        x, weights = draw(*batch, inputs), draw(*batch, outputs, seed=2)
        whole = results(plain, x, lambda out, w=weights: (out * w).sum())  # type: ignore[misc]
        gradients = {"weight gradient": 0, "bias gradient": 0}

        gathered = results(ColumnLinear(plain, comm), x, lambda out, w=weights: (out * w).sum())  # type: ignore[misc]
        worst = max(worst, difference(gathered, parts_of(whole, gradients, comm)))

        own = share(outputs, comm.size, comm.rank)
        kept = results(
            ColumnLinear(plain, comm, gather=False), x,
            lambda out, w=weights[..., own.start : own.stop]: (out * w).sum(),  # type: ignore[misc]
        )  # fmt: skip
        worst = max(worst, difference(kept, parts_of(whole, gradients | {"output": -1}, comm)))

        mine = share(inputs, comm.size, comm.rank)
        summed = results(
            RowLinear(plain, comm), x[..., mine.start : mine.stop],
            lambda out, w=weights: (out * w).sum(),  # type: ignore[misc]
        )  # fmt: skip
        worst = max(worst, difference(summed, parts_of(whole, {"weight gradient": 1, "input": -1}, comm)))
    return worst


def convolutions_match(comm: Comm, every: int) -> float:
    """The same of Conv2d."""
    worst = 0.0
    layouts = (torch.contiguous_format, torch.channels_last)
    for (options, shape), of_input, of_weights in islice(product(CONVOLUTIONS, layouts, layouts), 0, None, every):
        x = draw(*shape)
        if len(shape) == 4:
            x = x.contiguous(memory_format=of_input)
        plain = fill(nn.Conv2d(**options)).to(memory_format=of_weights)  # type: ignore[call-overload]
        weights = draw(*plain(x).shape, seed=2)
        whole = results(plain, x, lambda out, w=weights: (out * w).sum())  # type: ignore[misc]
        split = results(ChannelConv2d(plain, comm), x, lambda out, w=weights: (out * w).sum())  # type: ignore[misc]
        worst = max(worst, difference(split, parts_of(whole, {"weight gradient": 0, "bias gradient": 0}, comm)))
        if len(shape) == 4 and split["output"][0:1, 0].numel() > 1:  # of one pixel there is no layout to keep
            assert split["output"].stride() == whole["output"].stride(), (options, of_input, of_weights)
    return worst


def bytes_of_a_step(comm: Comm, inputs: int, outputs: int, batch: int) -> dict[str, list[int]]:
    """What each layer sends forward and backward: bytes of messages, and bytes given to sums."""

    def count(make: Callable[[Comm], nn.Module], x: Tensor) -> list[int]:
        metered = MeteredComm(comm)
        out = make(metered)(x)
        forward = [metered.meter.bytes_sent, metered.meter.opaque_bytes]
        out.sum().backward()
        return [*forward, metered.meter.bytes_sent - forward[0], metered.meter.opaque_bytes - forward[1]]

    plain, x = nn.Linear(inputs, outputs), torch.ones(batch, inputs)
    own = share(inputs, comm.size, comm.rank)
    conv, images = nn.Conv2d(inputs, outputs, 3), torch.ones(batch, inputs, 5, 6)
    return {
        "column": count(lambda c: ColumnLinear(plain, c), x.clone().requires_grad_()),
        "column, first": count(lambda c: ColumnLinear(plain, c), x),
        "column, kept": count(lambda c: ColumnLinear(plain, c, gather=False), x.clone().requires_grad_()),
        "row": count(lambda c: RowLinear(plain, c), x[:, own.start : own.stop].clone().requires_grad_()),
        "channels": count(lambda c: ChannelConv2d(conv, c), images.clone().requires_grad_()),
    }


class Small(nn.Module):
    """A narrow and a wide convolution, batch-norm, three wide dense layers, two of them a pair, and a narrow one.

    No bias before batch-norm: where ReLU passes every value its true gradient is zero, and Adam would blow up what
    rounding makes of that.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, stride=2, bias=False)
        self.conv2 = nn.Conv2d(16, 130, 3, bias=False)
        self.norm = nn.BatchNorm2d(130)
        self.dense1, self.dense2 = nn.Linear(130, 127), nn.Linear(127, 130)
        self.dense3, self.dropout, self.out = nn.Linear(130, 130), nn.Dropout(dropout), nn.Linear(130, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv2(self.conv1(x).relu_())).relu_().mean((2, 3))
        x = F.relu(self.dense2(self.dense1(x).tanh()))
        out: Tensor = self.out(self.dropout(self.dense3(x).sigmoid()))
        return out


SPLIT = {
    **{"conv2.weight": 0, "dense1.weight": 0, "dense1.bias": 0, "dense2.weight": 1},
    **{"dense3.weight": 0, "dense3.bias": 0},
}
SAMPLES = 14


def make_optimizer(model: nn.Module, optimizer: str) -> torch.optim.Optimizer:
    if optimizer == "adam":
        return torch.optim.Adam(model.parameters(), 0.01)
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)


def batches(steps: int, part: int = 0, parts: int = 1) -> list[Batch]:
    """The last batch has one sample: all replicas but one have none."""
    found = []
    for step in range(steps):
        count = SAMPLES if step < steps - 1 else 1
        images = draw(count, 3, 9, 9, seed=step)
        labels = torch.randint(0, 5, (count,), generator=torch.Generator().manual_seed(step))
        own = share(count, parts, part)
        found.append(Batch(images[own.start : own.stop], labels[own.start : own.stop], count))
    return found


def divided(
    comm: Comm, shards: int, optimizer: str = "sgd", **options: Any
) -> tuple[TensorParallel, Sequential, dict[str, int]]:
    """A strategy whose model began on the meta device and was given its parts one by one; the same model alone."""
    replica, shard = divmod(comm.rank, shards)
    shards_comm = comm.group(list(range(replica * shards, (replica + 1) * shards)))
    replicas_comm = comm.group(list(range(shard, comm.size, shards)))
    plain = fill(Small(options.pop("dropout", 0.0)))
    with torch.device("meta"):
        model = Small(plain.dropout.p).double()
    split = split_wide(model, shards_comm)
    values = parts_of({n: p.detach() for n, p in plain.named_parameters()}, split, shards_comm)
    for name, value in values.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.Parameter(value.clone()))
    model.norm = copy.deepcopy(plain.norm)
    strategy = TensorParallel(
        comm, model, make_optimizer(model, optimizer), Options(**options), shards_comm, replicas_comm, split
    )
    strategy.setup()
    return strategy, Sequential(comm, plain, make_optimizer(plain, optimizer)), split


def weights_differ(strategy: TensorParallel, alone: Lockstep) -> float:
    whole = {name: p.detach() for name, p in alone.model.named_parameters()} | dict(alone.model.named_buffers())
    own = {name: p.detach() for name, p in strategy.model.named_parameters()} | dict(strategy.model.named_buffers())
    wanted = parts_of(whole, dict(strategy.split), strategy.shards_comm)
    return difference({n: t.double() for n, t in own.items()}, {n: t.double() for n, t in wanted.items()})


def transformer(layers: int) -> Gpt:
    """Six heads; every Linear is wide."""
    return fill(Gpt(layers, 6, 132, 5, 20, 0.0))


def transformer_trains(comm: Comm, steps: int = 4) -> float:
    """The largest difference of any weight between a split transformer and a plain loop over the whole one."""
    plain, model = transformer(2), transformer(2)
    split = split_wide(model, comm)
    assert len(split) == 2 * 6, "the weights of 8 layers, the biases of 4"
    for each in (plain, model):
        optimizer = make_optimizer(each, "sgd")
        for step in range(steps):
            x = torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            F.cross_entropy(each(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
            optimizer.step()
    whole, own = ({name: p.detach() for name, p in each.named_parameters()} for each in (plain, model))
    return difference(own, parts_of(whole, split, comm))


def calls_of_a_transformer(comm: Comm, layers: int) -> list[int]:
    """Sums over shards, forward and backward; and all other messages."""
    metered, model = MeteredComm(comm), transformer(layers)
    split_wide(model, metered)
    before = metered.meter.total().opaque_calls
    out = model(torch.zeros(2, 5, dtype=torch.int64))
    forward = metered.meter.total().opaque_calls - before
    out.sum().backward()
    total = metered.meter.total()
    return [forward, total.opaque_calls - before - forward, total.messages_sent]


def drops_the_same(comm: Comm) -> list[float]:
    """With dropout, shards that draw alike train what one process that draws so trains; ranks are processes."""
    strategy, alone, _ = divided(comm, comm.size, dropout=0.5)
    for each in (strategy, alone):
        torch.manual_seed(7)
        for batch in batches(4):
            each.step(batch, 0.1, 0, StepTimer())
    drawn = torch.rand(1).item()
    torch.manual_seed(7)
    return [weights_differ(strategy, alone), float(drawn != torch.rand(1).item())]


def one_wishes_to_stop(comm: Comm, shards: int, wisher: int) -> list[bool]:
    strategy, _, _ = divided(comm, shards)
    replica, replicas = strategy.replicas_comm.rank, strategy.replicas_comm.size
    found = [
        strategy.step(batch, 0.1, number == 2 and comm.rank == wisher, StepTimer()).stop
        for number, batch in enumerate(batches(4, replica, replicas))
    ]
    strategy.close()
    return found
