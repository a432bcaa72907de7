"""DataParallel in a user's own script: what gradients are after backward, whatever the script does with them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worlds import ThreadWorld

from paceline.comm.base import Comm
from paceline.comm.single import SingleComm
from paceline.errors import ReplicaError, UsageError
from paceline.loop.data_parallel import DataParallel

SIZE = 3
INPUTS = torch.randn(SIZE, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A layer used twice, one used only when asked for, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tied, self.out = nn.Linear(5, 5), nn.Linear(5, 2)
        self.sometimes, self.frozen = nn.Linear(5, 5), nn.Linear(5, 5).requires_grad_(False)
        self.double()

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        x = self.frozen(self.tied(self.tied(x).tanh()))
        if extra:
            x = x + self.sometimes(x)
        out: Tensor = self.out(x)
        return out


MODEL = Net()


def gradients(model: nn.Module) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]


def loss_of(model: nn.Module, x: Tensor, **more: bool) -> Tensor:
    out: Tensor = model(x, **more)
    return out.square().mean()


def expect(script: Callable[[nn.Module], None]) -> list[list[float] | None]:
    """The gradients of one process that does `script`."""
    model = copy.deepcopy(MODEL)
    script(model)
    return gradients(model)


def check_on_all(
    script: Callable[[DataParallel, nn.Module, int], None], wanted: list[list[float] | None], overlap: str
) -> None:
    def case(comm: Comm) -> list[list[float] | None]:
        model = copy.deepcopy(MODEL)
        parallel = DataParallel(model, comm, "ring", overlap=overlap, bucket_mb=0.0001)
        script(parallel, model, comm.rank)
        parallel.close()
        return gradients(model)

    for found in ThreadWorld(SIZE).run(case):
        for mine, theirs in zip(found, wanted, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert mine == pytest.approx(theirs, abs=1e-12)


@pytest.fixture(params=["on", "off"])
def overlap(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def whole(model: nn.Module, **more: bool) -> Tensor:
    return loss_of(model, INPUTS.flatten(0, 1), **more)


def test_gradients_are_those_of_the_whole_batch(overlap: str) -> None:
    wanted = expect(lambda model: whole(model).backward())
    check_on_all(lambda parallel, model, rank: loss_of(model, INPUTS[rank]).backward(), wanted, overlap)


def test_zero_grad_to_none_and_to_zero_both_start_anew(overlap: str) -> None:
    def script(parallel: DataParallel, model: nn.Module, rank: int) -> None:
        for to_none in (True, False, True):
            loss_of(model, INPUTS[rank] * 3).backward()
            model.zero_grad(set_to_none=to_none)
        loss_of(model, INPUTS[rank]).backward()

    check_on_all(script, expect(lambda model: whole(model).backward()), overlap)


def test_two_averaged_backwards_add_up(overlap: str) -> None:
    def alone(model: nn.Module) -> None:
        whole(model).backward()
        whole(model, extra=True).backward()

    def script(parallel: DataParallel, model: nn.Module, rank: int) -> None:
        loss_of(model, INPUTS[rank]).backward()
        loss_of(model, INPUTS[rank], extra=True).backward()

    check_on_all(script, expect(alone), overlap)


def test_no_sync_accumulates_without_communication(overlap: str) -> None:
    def alone(model: nn.Module) -> None:
        whole(model, extra=True).backward()
        whole(model).backward()

    def script(parallel: DataParallel, model: nn.Module, rank: int) -> None:
        with parallel.no_sync():
            loss_of(model, INPUTS[rank], extra=True).backward()
        loss_of(model, INPUTS[rank]).backward()

    check_on_all(script, expect(alone), overlap)


def test_a_parameter_nobody_used_has_no_gradient(overlap: str) -> None:
    def script(parallel: DataParallel, model: nn.Module, rank: int) -> None:
        loss_of(model, INPUTS[rank], extra=True).backward()
        model.zero_grad()
        loss_of(model, INPUTS[rank]).backward()

    wanted = expect(lambda model: whole(model).backward())
    assert None in wanted
    check_on_all(script, wanted, overlap)


def test_a_parameter_that_one_rank_used_has_its_part_on_all(overlap: str) -> None:
    def alone(model: nn.Module) -> None:
        for rank in range(SIZE):
            (loss_of(model, INPUTS[rank], extra=rank == 1) / SIZE).backward()

    def script(parallel: DataParallel, model: nn.Module, rank: int) -> None:
        loss_of(model, INPUTS[rank], extra=rank == 1).backward()

    check_on_all(script, expect(alone), overlap)


def test_shares_weight_parts_of_unequal_size_and_a_rank_may_have_none(overlap: str) -> None:
    counts = [3, 1, 0]

    def script(parallel: DataParallel, model: nn.Module, rank: int) -> None:
        mine = INPUTS[0, :3] if rank == 0 else INPUTS[1, :1] if rank == 1 else INPUTS[2, :0]
        loss = loss_of(model, mine)  # of no samples: not a number
        parallel.backward(loss, counts[rank] / sum(counts))

    wanted = expect(lambda model: loss_of(model, torch.cat([INPUTS[0, :3], INPUTS[1, :1]])).backward())
    check_on_all(script, wanted, overlap)


def test_a_rank_without_a_loss_has_no_share(overlap: str) -> None:
    def script(parallel: DataParallel, model: nn.Module, rank: int) -> None:
        with pytest.raises(UsageError, match=r"shares add up to 0.666667, not to 1"):
            parallel.backward(None if rank == 2 else loss_of(model, INPUTS[rank]))
        model.zero_grad()
        if rank == 2:
            parallel.backward(None)
        else:
            parallel.backward(loss_of(model, INPUTS[rank]), 0.5)

    wanted = expect(lambda model: loss_of(model, INPUTS[:2].flatten(0, 1)).backward())
    check_on_all(script, wanted, overlap)


def test_no_sync_between_averaged_backwards_is_right_for_any_shares(overlap: str) -> None:
    shares = [0.5, 0.5, 0.0]

    def script(parallel: DataParallel, model: nn.Module, rank: int) -> None:
        parallel.backward(loss_of(model, INPUTS[rank]), shares[rank])
        with parallel.no_sync():
            parallel.backward(loss_of(model, INPUTS[rank]), shares[rank])
        parallel.backward(loss_of(model, INPUTS[rank]), shares[rank])

    def alone(model: nn.Module) -> None:
        for _ in range(3):
            loss_of(model, INPUTS[:2].flatten(0, 1)).backward()

    check_on_all(script, expect(alone), overlap)


def test_a_transposed_parameter_is_updated_by_a_fused_optimizer_as_alone() -> None:
    weight = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def trained(comm: Comm) -> list[float]:
        model = nn.Linear(4, 3, bias=False).double()
        model.weight = nn.Parameter(weight.clone().t())
        optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
        parallel = DataParallel(model, comm)
        for _ in range(3):
            optimizer.zero_grad()
            parallel(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        return [float(x) for x in model.weight.detach().flatten()]

    plain = nn.Parameter(weight.clone().t().contiguous())
    for _ in range(3):
        (gradient,) = torch.autograd.grad((torch.ones(2, 4, dtype=torch.float64) @ plain.t()).square().sum(), plain)
        plain = nn.Parameter(plain.detach() - 0.1 * gradient)
    for found in ThreadWorld(2).run(trained):
        assert found == pytest.approx(plain.flatten().tolist(), abs=1e-12)


def test_gradients_are_views_with_the_parameters_strides() -> None:
    def case(comm: Comm) -> list[bool]:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2))
        model(torch.zeros(1, 3, 6, 6))
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        parallel = DataParallel(model, comm)
        model(torch.randn(2, 3, 6, 6)).sum().backward()
        memory = parallel.averager.buckets.buckets[0].flat.untyped_storage().data_ptr()
        return [
            p.grad is not None and p.grad.stride() == p.stride() and p.grad.untyped_storage().data_ptr() == memory
            for p in model.parameters()
        ]

    assert all(all(found) for found in ThreadWorld(2).run(case))


def test_ranks_start_from_rank_0s_weights_and_buffers() -> None:
    def case(comm: Comm) -> list[float]:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(comm.rank + 5)
        DataParallel(model, comm)
        return [float(x) for tensor in model.state_dict().values() for x in tensor.flatten()]

    assert all(set(found) == {5.0} for found in ThreadWorld(3).run(case))


def test_a_replica_that_differs_is_named_on_every_rank() -> None:
    def case(comm: Comm) -> tuple[int, str]:
        model = nn.Linear(4, 4)
        parallel = DataParallel(model, comm)
        parallel.check_replicas(6)
        if comm.rank == 2:
            with torch.no_grad():
                model.weight[3, 3] += 1e-7
        with pytest.raises(ReplicaError) as caught:
            parallel.check_replicas(7)
        return caught.value.rank, str(caught.value)

    for rank, message in ThreadWorld(4).run(case):
        assert rank == 2
        assert "after step 7" in message
        assert "rank 2 has different weights than the others" in message


def test_an_unknown_averaging_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match="did you mean 'ring'"):
        DataParallel(nn.Linear(1, 1), SingleComm(), "rings")
    with pytest.raises(UsageError, match="unknown overlap 'maybe'"):
        DataParallel(nn.Linear(1, 1), SingleComm(), overlap="maybe")


@pytest.mark.parametrize("counts", [[4, 4, 4], [5, 2, 1], [3, 0, 2]])
def test_synchronised_batchnorm_is_batchnorm_of_the_whole_batch(counts: list[int]) -> None:
    torch.manual_seed(3)
    x = torch.randn(sum(counts), 2, 3, 3, dtype=torch.float64) * 3 + 50
    target = torch.randint(0, 2, (sum(counts),))

    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(2, 4, 2, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)).double()
    alone = copy.deepcopy(model)
    F.cross_entropy(alone(x), target).backward()

    def case(comm: Comm) -> list[list[float]]:
        net = copy.deepcopy(model)
        parallel = DataParallel(net, comm, sync_batchnorm=True)
        start = sum(counts[: comm.rank])
        mine = slice(start, start + counts[comm.rank])
        loss = F.cross_entropy(net(x[mine]), target[mine])  # of no samples: not a number
        parallel.backward(loss, counts[comm.rank] / sum(counts))
        net.eval()
        values = [p.grad for p in net.parameters()] + list(net.buffers()) + [net(x)]
        return [v.double().flatten().tolist() for v in values if v is not None]

    alone.eval()
    wanted = [p.grad for p in alone.parameters()] + list(alone.buffers()) + [alone(x)]
    for found in ThreadWorld(3).run(case):
        for a, b in zip(found, wanted, strict=True):
            assert b is not None
            assert a == pytest.approx(b.double().flatten().tolist(), abs=1e-10)


def test_a_model_that_is_itself_a_batchnorm_layer_is_synchronised() -> None:
    x = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(6)) * 3 + 5
    alone = nn.BatchNorm1d(2).double()
    wanted = alone(x)
    wanted.square().mean().backward()

    def case(comm: Comm) -> tuple[bool, list[float]]:
        model = nn.BatchNorm1d(2).double()
        parallel = DataParallel(model, comm, sync_batchnorm=True)
        out = model(x[2 * comm.rank : 2 * comm.rank + 2])
        parallel.backward(out.square().mean())
        assert model.weight.grad is not None
        assert model.running_mean is not None
        return parallel.module is model, torch.cat([out.flatten(), model.weight.grad, model.running_mean]).tolist()

    for rank, (same, found) in enumerate(ThreadWorld(3).run(case)):
        assert same
        assert alone.weight.grad is not None
        assert alone.running_mean is not None
        part = wanted[2 * rank : 2 * rank + 2].flatten()
        assert found == pytest.approx(torch.cat([part, alone.weight.grad, alone.running_mean]).tolist(), abs=1e-12)


def test_batchnorm_statistics_are_averaged_for_evaluation() -> None:
    def case(comm: Comm) -> list[float]:
        model = nn.BatchNorm1d(1)
        parallel = DataParallel(model, comm)
        parallel(torch.tensor([[0.0], [2.0]]) + comm.rank * 10).sum().backward()
        assert model.running_mean is not None
        return [model.running_mean.item()]

    # Means of 1, 11 and 21, a tenth of each, averaged.
    assert ThreadWorld(3).run(case) == [[pytest.approx(1.1)]] * 3


def test_overlap_is_chosen_by_measurement_and_the_same_on_all_ranks() -> None:
    def case(comm: Comm) -> list[bool | None]:
        model = nn.Linear(10, 10)
        parallel = DataParallel(model, comm)
        before = parallel.averager.overlap.chosen
        for _ in range(25):
            model(torch.randn(2, 10)).sum().backward()
        parallel.close()
        return [before, parallel.averager.overlap.chosen]

    found = ThreadWorld(3).run(case)
    assert all(before is None for before, _ in found)
    assert {after for _, after in found} in ({True}, {False})
