"""DataParallel as people expect it of PyTorch's: a module like the model, plain backward, many kinds of models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from worlds import ThreadWorld

from paceline.comm.base import Comm
from paceline.errors import DivergedError, UsageError
from paceline.loop.data_parallel import DataParallel
from paceline.loop.reduce import all_reduce

SIZE = 2
INPUTS = torch.randn(SIZE, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Mixed(nn.Module):
    """Layers of three dtypes, the first and the last of which share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.short = nn.Linear(4, 4).double(), nn.Linear(4, 4).bfloat16()
        self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4).double()
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.short(self.first(x).bfloat16()).float()).double())
        return out


torch.manual_seed(0)
MIXED = Mixed()
NET = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def on_all(case: Callable[[Comm], Any], size: int = SIZE) -> list[Any]:
    return ThreadWorld(size).run(case)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_parameters_may_have_several_dtypes(overlap: str) -> None:
    alone = copy.deepcopy(MIXED)
    for x in INPUTS:  # as the sum over ranks is made: of gradients that are rounded on each rank
        (alone(x).square().mean() / SIZE).backward()

    def case(comm: Comm) -> list[bool]:
        parallel = DataParallel(copy.deepcopy(MIXED), comm, "ring", overlap=overlap, bucket_mb=0.0001)
        found = []
        for _ in range(2):  # the second time in the memory of the first
            parallel.zero_grad()
            parallel(INPUTS[comm.rank]).square().mean().backward()
            for p, q in zip(parallel.parameters(), alone.parameters(), strict=True):
                assert p.grad is not None
                assert q.grad is not None
                assert p.grad.dtype == p.dtype
                found.append(torch.allclose(p.grad, q.grad, rtol=0.02 if p.dtype == torch.bfloat16 else 1e-5))
        return found

    assert all(all(found) for found in on_all(case))


def test_it_has_the_names_modes_and_attributes_of_the_model() -> None:
    class Own(nn.Sequential):
        def describe(self) -> str:
            return "mine"

    def case(comm: Comm) -> None:
        model = Own(nn.Linear(4, 4), nn.BatchNorm1d(4))
        parallel = DataParallel(model, comm)
        assert isinstance(parallel, nn.Module)
        assert list(parallel.state_dict()) == list(model.state_dict())
        assert [n for n, _ in parallel.named_parameters()] == [n for n, _ in model.named_parameters()]
        assert [n for n, _ in parallel.named_buffers()] == [n for n, _ in model.named_buffers()]
        assert list(parallel.parameters()) == list(model.parameters())
        parallel.load_state_dict(copy.deepcopy(model.state_dict()))
        parallel.eval()
        assert not model[1].training
        assert parallel.describe() == "mine"
        with pytest.raises(AttributeError, match="nothing"):
            _ = parallel.nothing

    on_all(case)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_may_be_computed_again(reentrant: bool) -> None:
    def loss_of(model: nn.Sequential, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in (model[0], model[1], model[2], model[0]):
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x.square().mean()

    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    alone = copy.deepcopy(net)
    loss_of(alone, INPUTS.flatten(0, 1)).backward()

    def case(comm: Comm) -> list[list[float]]:
        model = copy.deepcopy(net)
        DataParallel(model, comm, "ring", bucket_mb=0.0001)
        loss_of(model, INPUTS[comm.rank]).backward()
        return [p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None]

    for found in on_all(case):
        for mine, p in zip(found, alone.parameters(), strict=True):
            assert p.grad is not None
            assert mine == pytest.approx(p.grad.flatten().tolist(), abs=1e-12)


def test_only_layers_that_were_just_unfrozen_are_trained() -> None:
    """No parameter that had a gradient before has one now."""

    def train(model: nn.Module, x: Tensor) -> list[list[float]]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for trained in ("2", "0", "0"):
            for name, p in model.named_parameters():
                p.requires_grad_(name.startswith(trained))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [[float(v) for v in p.detach().flatten()] for p in model.parameters()]

    wanted = train(copy.deepcopy(NET), INPUTS.flatten(0, 1))
    for found in on_all(lambda comm: train(DataParallel(copy.deepcopy(NET), comm), INPUTS[comm.rank])):
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-12)


def test_a_rank_whose_gradient_is_not_finite_is_named_on_all() -> None:
    def case(comm: Comm) -> str:
        parallel = DataParallel(copy.deepcopy(NET), comm)
        parallel(INPUTS[comm.rank]).square().mean().backward()
        scale = torch.tensor(float("nan") if comm.rank == 1 else 1.0)
        with pytest.raises(DivergedError) as caught:
            (parallel(INPUTS[comm.rank]).square().mean() * scale).backward()
        assert caught.value.rank == 1
        return str(caught.value)

    (message,) = set(on_all(case))
    assert "a gradient is not finite" in message
    assert "rank 1" in message


def test_infinite_gradients_are_left_to_a_scaler_if_asked() -> None:
    def case(comm: Comm) -> bool:
        parallel = DataParallel(copy.deepcopy(NET), comm, check_finite=False)
        (parallel(INPUTS[comm.rank]).square().mean() * float("inf")).backward()
        return all(p.grad is not None and not p.grad.isfinite().any() for p in parallel.parameters())

    assert on_all(case) == [True] * SIZE


def test_statistics_that_did_not_change_stay_exactly_as_they_are() -> None:
    def case(comm: Comm) -> list[list[float]]:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
        parallel, x = DataParallel(model, comm), torch.randn(5, 4, dtype=torch.float64)
        parallel(x).sum().backward()
        before = [float(v) for buffer in model.buffers() for v in buffer.flatten()]
        parallel.eval()
        for _ in range(3):
            parallel(x).sum().backward()
        return [before, [float(v) for buffer in model.buffers() for v in buffer.flatten()]]

    found = on_all(case, 3)
    assert found[0] == found[1] == found[2]
    assert found[0][0] == found[0][1]


def test_a_backward_that_an_error_ended_is_noticed() -> None:
    def case(comm: Comm) -> None:
        parallel = DataParallel(copy.deepcopy(NET), comm)

        def fail(_gradient: Tensor) -> None:
            raise ValueError("mine")

        parallel.get_parameter("0.weight").register_hook(fail)
        with pytest.raises(ValueError, match="mine"):
            parallel(INPUTS[comm.rank]).sum().backward()
        with pytest.raises(UsageError, match="an earlier backward was ended by an error"):
            parallel(INPUTS[comm.rank])

    on_all(case)


def test_numbers_are_reduced_in_any_structure() -> None:
    def case(comm: Comm) -> None:
        rank = comm.rank
        assert all_reduce(rank + 1, comm=comm) == 6
        assert all_reduce(0.5 + rank, "mean", comm) == 1.5
        assert all_reduce({"low": rank, "high": [float(rank)]}, "max", comm) == {"low": 2, "high": [2.0]}
        assert all_reduce((rank, -rank), "min", comm) == (0, -2)
        assert all_reduce(0 if rank == 1 else 0.25, comm=comm) == 0.5
        assert all_reduce(5 if rank == 1 else 0.25, "min", comm) == 0.25
        assert repr(all_reduce(np.int64(rank), "max", comm)) == "2"
        tensor = torch.full((2, 2), float(rank), dtype=torch.bfloat16)
        total = all_reduce(tensor, comm=comm)
        assert total.dtype == torch.bfloat16
        assert total.tolist() == [[3.0, 3.0]] * 2
        assert tensor.tolist() == [[rank, rank]] * 2
        assert all_reduce(torch.tensor([rank]), "mean", comm).tolist() == [1.0]
        with pytest.raises(UsageError, match="did you mean 'sum'"):
            all_reduce(1, "sums", comm)
        with pytest.raises(UsageError, match="all_reduce of a str: pass numbers"):
            all_reduce("text", comm=comm)

    on_all(case, 3)
