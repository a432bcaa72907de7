"""DataParallel beside what scripts do to parameters and gradients: as in plain PyTorch, or refused on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import ThreadWorld

from paceline.comm.base import Comm
from paceline.data.sampler import Sampler
from paceline.errors import ReplicaError, UsageError
from paceline.loop.data_parallel import DataParallel

SIZE = 2
INPUTS = torch.randn(SIZE, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

Backward = Callable[..., None]


torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def make_model(frozen: Iterable[str] = ()) -> nn.Sequential:
    model = copy.deepcopy(MODEL)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    return model


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().mean()


def compare(
    script: Callable[[nn.Sequential, Tensor, Backward], list[list[float]]], overlap: str, frozen: Iterable[str] = ()
) -> None:
    """What the script returns on every rank is what it returns in one process with the whole batch."""

    def alone(loss: Tensor, **more: Any) -> None:
        loss.backward(**more)

    def case(comm: Comm, explicit: bool) -> list[list[float]]:
        model = make_model(frozen)
        parallel = DataParallel(model, comm, "ring", overlap=overlap, bucket_mb=0.0001)
        found = script(model, INPUTS[comm.rank], parallel.backward if explicit else alone)
        parallel.close()
        return found

    wanted = script(make_model(frozen), INPUTS.flatten(0, 1), alone)
    for explicit in (True, False):
        for found in ThreadWorld(SIZE).run(case, explicit=explicit):
            for mine, theirs in zip(found, wanted, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-12)


@pytest.fixture(params=["on", "off"])
def overlap(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def train(model: nn.Sequential, x: Tensor, backward: Backward, steps: int = 2, *, set_to_none: bool = True) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none)
        backward(loss_of(model, x))
        optimizer.step()


def weights(model: nn.Module) -> list[list[float]]:
    return [[float(v) for v in p.detach().flatten()] for p in model.parameters()]


def test_parameters_are_frozen_and_unfrozen_during_training(overlap: str) -> None:
    def script(model: nn.Sequential, x: Tensor, backward: Backward) -> list[list[float]]:
        train(model, x, backward)
        model[0].requires_grad_(True)
        train(model, x, backward)
        model[4].requires_grad_(False)
        loss_of(model, x).backward()  # accumulated, and then averaged with the others
        train(model, x, backward)
        return weights(model)

    compare(script, overlap, frozen=["0", "2"])


def test_parameters_change_their_dtype_during_training(overlap: str) -> None:
    def script(model: nn.Sequential, x: Tensor, backward: Backward) -> list[list[float]]:
        train(model, x, backward)
        model.float()
        train(model, x.float(), backward)
        return [[float(f"{v:.4f}") for v in row] for row in weights(model.double())]

    compare(script, overlap)


def double_in_place(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def assign_double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 2


@pytest.mark.parametrize("hook", [double_in_place, assign_double])
def test_users_hooks_see_and_change_gradients_before_they_are_averaged(
    hook: Callable[[Tensor], None], overlap: str
) -> None:
    """Whenever the hook was registered, and however late it is: the averaging does not begin without it."""

    def script(model: nn.Sequential, x: Tensor, backward: Backward) -> list[list[float]]:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
        train(model, x, backward, 5)
        train(model, x, backward, 3, set_to_none=False)
        backward(loss_of(model, x))  # added to the gradient of the last step
        return weights(model) + [p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None]

    compare(script, overlap)


def test_a_kept_gradient_behaves_as_in_plain_pytorch(overlap: str) -> None:
    def script(model: nn.Sequential, x: Tensor, backward: Backward) -> list[list[float]]:
        first, last = model[0].weight, model[4].bias
        assert isinstance(first, nn.Parameter)
        assert isinstance(last, nn.Parameter)
        backward(loss_of(model, x))
        assert first.grad is not None
        assert last.grad is not None
        kept, part, array = first.grad, last.grad.view(-1)[1:], last.grad.numpy()
        model.zero_grad()
        backward(loss_of(model, 2 * x))  # all three stay what they were
        seen = [kept.flatten().tolist(), part.tolist(), np.asarray(array).tolist()]
        kept = first.grad
        backward(loss_of(model, 3 * x))  # added in place: the reference follows
        model.zero_grad(set_to_none=False)
        backward(loss_of(model, 4 * x))
        seen += [kept.flatten().tolist(), first.grad.flatten().tolist()]
        model.zero_grad()
        loss_of(model, x).backward()
        kept = first.grad
        backward(loss_of(model, x))  # what a plain backward left is added to in place, too
        return [*seen, kept.flatten().tolist(), first.grad.flatten().tolist()]

    compare(script, overlap)


def test_memory_is_used_again_as_long_as_nobody_keeps_a_gradient(overlap: str) -> None:
    def case(comm: Comm) -> list[list[int]]:
        model = make_model()
        parallel = DataParallel(model, comm, "ring", overlap=overlap, bucket_mb=0.0001)
        places = []
        for _ in range(3):
            train(model, INPUTS[comm.rank], parallel.backward)
            places.append([storage.data_ptr() for storage in parallel.averager.buckets.storages])
        parallel.close()
        return places

    for places in ThreadWorld(SIZE).run(case):
        assert places[0] == places[1] == places[2]


def test_retain_graph_keeps_the_graph_for_a_second_backward(overlap: str) -> None:
    def script(model: nn.Sequential, x: Tensor, backward: Backward) -> list[list[float]]:
        loss = loss_of(model, x)
        backward(loss, retain_graph=True)
        backward(loss)
        return [p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None]

    compare(script, overlap)


# Refused: each mistake is made by rank 1 alone, and raised by all.


def step(parallel: DataParallel, rank: int, **more: Any) -> None:
    parallel.backward(loss_of(parallel.module, INPUTS[rank]), **more)


def unfreeze(parallel: DataParallel, rank: int) -> None:
    parallel.module.get_submodule("0").requires_grad_(rank == 1)
    step(parallel, rank)


def replace(parallel: DataParallel, rank: int) -> None:
    if rank == 1:
        assert isinstance(parallel.module, nn.Sequential)
        parallel.module[4] = nn.Linear(5, 2).double()
    step(parallel, rank)


def replace_parameter(parallel: DataParallel, rank: int) -> None:
    if rank == 1:
        layer = parallel.module.get_submodule("4")
        layer.weight = nn.Parameter(torch.zeros(2, 5, dtype=torch.float64))
    step(parallel, rank)


def vector(parallel: DataParallel, rank: int) -> None:
    loss = parallel(INPUTS[rank]).square().mean(1 if rank == 1 else (0, 1))
    parallel.backward(loss)


def constant(parallel: DataParallel, rank: int) -> None:
    loss = loss_of(parallel.module, INPUTS[rank])
    parallel.backward(loss.detach() if rank == 1 else loss)


def step_inside(parallel: DataParallel, rank: int) -> None:
    weight = parallel.module.get_parameter("2.weight")
    optimizer = torch.optim.SGD([weight], 0.1)
    if rank == 1:
        weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    step(parallel, rank)


def take_away(parallel: DataParallel, rank: int) -> None:
    weight = parallel.module.get_parameter("2.weight")

    def hook(parameter: Tensor) -> None:
        parameter.grad = None

    if rank == 1:
        weight.register_post_accumulate_grad_hook(hook)
    step(parallel, rank)


def with_graph(parallel: DataParallel, rank: int) -> None:
    if rank == 1:
        with parallel.no_sync():
            loss_of(parallel.module, INPUTS[rank]).backward(create_graph=True)
    step(parallel, rank)


def twice(parallel: DataParallel, rank: int) -> None:
    layer = parallel.module.get_submodule("2")
    x = torch.tanh(parallel.module.get_submodule("0")(INPUTS[rank])).requires_grad_()
    for _ in range(2):
        x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True) if rank == 1 else layer(x)
    parallel.backward(x.square().mean())


MISTAKES: list[tuple[Callable[[DataParallel, int], None], str]] = [
    (unfreeze, r"rank 1: .* this rank has parameter '0.weight' .*trained\), rank 0 has parameter '0.weight'"),
    (replace, "rank 1: parameter '4.weight' was added or replaced"),
    (replace_parameter, "rank 1: parameter '4.weight' was added or replaced"),
    (vector, r"rank 1: the loss must be one number, not a tensor of shape \(3,\)"),
    (constant, "rank 1: the loss does not depend on any trained parameter"),
    (step_inside, "rank 1: parameter '2.weight' was changed during backward"),
    (take_away, "rank 1: the gradient of parameter '2.weight' was removed during backward"),
    (lambda parallel, rank: step(parallel, rank, create_graph=rank == 1), "rank 1: create_graph=True"),
    (with_graph, r"rank 1: the gradient of parameter '4.bias' has a graph of its own \(create_graph=True\)"),
    (twice, "rank 1: parameter '2.* got its gradient twice"),
    (lambda parallel, rank: step(parallel, rank, share=0.5 + 0.25 * rank), "shares add up to 1.25, not to 1"),
]


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_a_mistake_of_one_rank_is_raised_by_all(
    mistake: Callable[[DataParallel, int], None], message: str, overlap: str
) -> None:
    def case(comm: Comm) -> str:
        model = make_model(["0"])
        parallel = DataParallel(model, comm, overlap=overlap, bucket_mb=0.0001)
        step(parallel, comm.rank)
        model.zero_grad()
        with pytest.raises(UsageError, match=message) as caught:
            mistake(parallel, comm.rank)
        parallel.close()
        return str(caught.value)

    assert len(set(ThreadWorld(SIZE).run(case))) == 1


def test_a_hook_that_steps_through_data_is_found_by_comparing_replicas() -> None:
    def step_through_data(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.1)

    def case(comm: Comm) -> None:
        parallel = DataParallel(make_model(), comm)
        parallel.module.get_parameter("2.weight").register_post_accumulate_grad_hook(step_through_data)
        step(parallel, comm.rank)
        with pytest.raises(ReplicaError, match="replicas differ after step 1: rank 1 has different weights"):
            parallel.check_replicas(1)
        parallel.close()

    ThreadWorld(SIZE).run(case)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rank: nn.Linear(5, 12) if rank else nn.Linear(12, 5), r"rank has parameter 'weight' .*shape \(12, 5\)"),
        (lambda rank: make_model(["0"] if rank else []), r"parameter '0.weight' \(float64, shape \(5, 4\)\), rank 0"),
        (lambda rank: nn.Linear(2, 2, bias=not rank), "this rank has nothing, rank 0 has parameter 'bias'"),
        (lambda rank: nn.LazyLinear(2) if rank else nn.Linear(2, 2), "rank has parameter 'weight' without a shape"),
        (lambda rank: nn.LazyLinear(2), "parameter 'weight' without a shape: run a batch through the model first"),
        (lambda rank: nn.Linear(2, 2).requires_grad_(False), "trained parameters must be on one device, not none"),
    ],
)  # fmt: skip
def test_models_that_differ_are_refused_by_all(make: Callable[[int], nn.Module], message: str) -> None:
    def case(comm: Comm) -> None:
        with pytest.raises(UsageError, match=message):
            DataParallel(make(comm.rank), comm)

    ThreadWorld(SIZE).run(case)


def test_ranks_with_different_settings_are_refused_by_all() -> None:
    def case(comm: Comm) -> None:
        with pytest.raises(UsageError, match=r"this rank has averaging='ring', .* rank 0 has averaging='gather'"):
            DataParallel(nn.Linear(2, 2), comm, "ring" if comm.rank else "gather")

    ThreadWorld(SIZE).run(case)


def test_sparse_gradients_are_refused() -> None:
    def case(comm: Comm) -> None:
        model = DataParallel(nn.Embedding(4, 2, sparse=True), comm)
        with pytest.raises(UsageError, match="gradient of parameter 'weight' is sparse"):
            model(torch.tensor([1])).sum().backward()

    ThreadWorld(2).run(case)


def test_synchronised_batchnorm_does_not_count_the_sample_of_a_rank_without_a_share() -> None:
    """A data loader gives such a rank one sample: it must not go through the layer, and that is checked."""
    x = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def trained(comm: Comm) -> list[float]:
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)).double()
        model[1].load_state_dict({"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
        parallel = DataParallel(model, comm, sync_batchnorm=True)
        sampler = Sampler(5, 3, comm.rank, comm.size)
        for step, (batch,) in enumerate(DataLoader(TensorDataset(x), batch_sampler=sampler)):
            model.zero_grad()
            parallel.backward(loss_of(model, batch[: sampler.count(step)]), sampler.share(step))
        values = [p.grad for p in model.parameters() if p.grad is not None] + list(model.buffers())
        found = [float(v) for value in values for v in value.flatten()]
        if comm.size > 1:
            loss = loss_of(model, x[:1])
            with pytest.raises(UsageError, match=r"rank 0: .*share 0, but its samples were counted"):
                parallel.backward(loss, sampler.share(1))
        return found

    ((alone),) = ThreadWorld(1).run(trained)
    for found in ThreadWorld(3).run(trained):
        assert found == pytest.approx(alone, abs=1e-12)
