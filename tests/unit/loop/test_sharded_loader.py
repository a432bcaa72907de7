"""A sharded DataLoader: together, ranks see what one process sees, and train what one process trains."""

from __future__ import annotations

import copy
import io
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
from torch.utils.data import Sampler as TorchSampler
from worlds import ThreadWorld

from paceline.comm.base import Comm
from paceline.comm.single import SingleComm
from paceline.errors import UsageError
from paceline.loop.data_parallel import DataParallel
from paceline.loop.shard import CHUNK, shard
from paceline.loop.shares import Share, latest, share_of, took

SAMPLES = 23
INPUTS = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(0, 3, (SAMPLES,), generator=torch.Generator().manual_seed(2))


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(INPUTS[i], TARGETS[i]) for i in range(self.samples)])


class Whole(Dataset[tuple[Tensor, Tensor]]):
    """Gives whole batches."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return math.ceil(SAMPLES / self.batch)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        part = slice(number * self.batch, (number + 1) * self.batch)
        return INPUTS[part], TARGETS[part]


class Own(TorchSampler[int]):
    """A sampler of the user's: some samples twice, some never, drawn with Python's random numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(3).choices(range(SAMPLES), k=15))

    def __len__(self) -> int:
        return 15


def make_loader(kind: str, batch: int, **more: Any) -> DataLoader[Any]:
    numbered = TensorDataset(torch.arange(SAMPLES), INPUTS, TARGETS)
    generator = torch.Generator().manual_seed(5)
    if kind == "iterable":
        return DataLoader(Stream(), batch, **more)
    if kind == "whole batches":
        return DataLoader(Whole(batch), None, shuffle=True, generator=generator, **more)
    if kind == "own sampler":
        return DataLoader(numbered, batch, sampler=Own(), generator=generator, **more)
    return DataLoader(numbered, batch, shuffle=kind == "shuffled", generator=generator, **more)


def rows(batch: Any) -> list[list[float]]:
    return [float(x) for x in batch[-2].sum(1)], batch[-1].tolist()  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["shuffled", "in order", "own sampler", "iterable", "whole batches"])
@pytest.mark.parametrize(("size", "batch"), [(2, 8), (3, 7), (4, 5)])  # last batches of 7, 2 and 3 samples
def test_the_parts_of_all_ranks_are_the_batches_of_one_process(kind: str, size: int, batch: int) -> None:
    wanted = [
        [rows(each) for each in loader] for loader in [make_loader(kind, batch)] for _ in range(2)
    ]  # two epochs of one loader

    def case(comm: Comm) -> list[list[Any]]:
        loader = shard(make_loader(kind, batch), comm)
        epochs = []
        for _ in range(2):
            seen: list[Any] = []
            for each in loader:
                part = latest()
                assert part is not None
                assert len(each[-1]) == max(1, part.count)
                seen.append([rows(each) if part.count else ([], []), part.total])
            epochs.append(seen)
        return epochs

    found = ThreadWorld(size).run(case)
    for epoch in range(2):
        assert {len(ranks[epoch]) for ranks in found} == {len(wanted[epoch])}
        for number, (inputs, targets) in enumerate(wanted[epoch]):
            parts = [ranks[epoch][number] for ranks in found]
            assert [x for part, _ in parts for x in part[0]] == inputs
            assert [x for part, _ in parts for x in part[1]] == targets
            assert {total for _, total in parts} == {len(targets)}


def test_a_batch_that_all_ranks_have_drawn_is_divided() -> None:
    def case(comm: Comm) -> tuple[list[float], dict[str, Any], int]:
        batch: tuple[Tensor, dict[str, Any]] = (INPUTS[:7], {"targets": TARGETS[:7], "names": list("abcdefg")})
        inputs, more = shard(batch, comm)
        part = latest()
        assert part is not None
        return inputs.sum(1).tolist(), {name: list(value) for name, value in dict(more).items()}, part.count

    found = ThreadWorld(3).run(case)
    assert [x for inputs, _, _ in found for x in inputs] == INPUTS[:7].sum(1).tolist()
    assert [x for _, more, _ in found for x in more["names"]] == list("abcdefg")
    assert [int(x) for _, more, _ in found for x in more["targets"]] == TARGETS[:7].tolist()
    assert [count for _, _, count in found] == [2, 2, 3]


def test_without_gradients_a_rank_without_samples_ends_a_batch_earlier() -> None:
    def case(comm: Comm) -> list[int]:
        with torch.no_grad():
            return [int(n) for batch in shard(make_loader("in order", 7), comm) for n in batch[0]]

    found = ThreadWorld(3).run(case)  # the last batch has 2 samples
    assert sorted(n for numbers in found for n in numbers) == list(range(SAMPLES))


class Net(nn.Module):
    """Returns its loss with the outputs, as language models do, or outputs alone."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6) if norm else nn.Tanh(), nn.Linear(6, 3)).double()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        out = self.layers(x)
        return out if targets is None else {"logits": out, "loss": F.cross_entropy(out, targets)}


def train(model: nn.Module, loader: Any, how: str) -> list[list[float]]:
    """Two epochs by SGD with momentum, clipped; accumulated over two batches if asked for."""
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    for _ in range(2):
        pending = False
        for number, batch in enumerate(loader):
            inputs, targets = batch[-2], batch[-1]
            wait = how == "accumulated" and number % 2 == 0
            with model.no_sync() if wait and isinstance(model, DataParallel) else torch.enable_grad():
                output = model(inputs, targets) if how == "own loss" else model(inputs)
                loss = output["loss"] if how == "own loss" else F.cross_entropy(output, targets)
                loss.backward()
            pending = wait
            if not wait:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        if pending:  # what is left of an epoch with an odd number of batches is dropped
            optimizer.zero_grad()
    return [[float(x) for x in value.flatten()] for value in model.state_dict().values()]


@pytest.mark.parametrize("how", ["plain", "own loss", "accumulated", "batch-norm"])
@pytest.mark.parametrize(("size", "batch"), [(2, 8), (3, 7), (4, 5)])
def test_ranks_train_the_model_of_one_process(how: str, size: int, batch: int) -> None:
    norm = how == "batch-norm"
    net = Net(norm)
    wanted = train(copy.deepcopy(net), make_loader("shuffled", batch), how)

    def case(comm: Comm) -> list[list[float]]:
        model = DataParallel(copy.deepcopy(net), comm, sync_batchnorm=norm)
        return train(model, shard(make_loader("shuffled", batch), comm), how)

    for found in ThreadWorld(size).run(case):
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("kind", ["shuffled", "iterable"])
@pytest.mark.parametrize("stop", [1, 3])  # three batches an epoch: in the middle, and after the last one
def test_a_loader_continues_where_it_was(kind: str, stop: int) -> None:
    def case(comm: Comm) -> list[list[Any]]:
        whole, cut = shard(make_loader(kind, 8), comm), shard(make_loader(kind, 8), comm)
        wanted = [rows(batch) for _ in range(3) for batch in whole]
        found = []
        for number, batch in enumerate(cut):
            found.append(rows(batch))
            if number + 1 == stop:
                state = cut.state_dict()
                break
        again = shard(make_loader(kind, 8), comm)
        again.load_state_dict(state)
        found += [rows(batch) for _ in range(again.epoch, 3) for batch in again]
        return [found, wanted]

    for found, wanted in ThreadWorld(2).run(case):
        assert found == wanted


class Numbers(Dataset[int]):
    """More batches than rank 0 tells at a time."""

    def __len__(self) -> int:
        return 2 * CHUNK + 5

    def __getitem__(self, number: int) -> int:
        return number


def test_an_epoch_may_have_more_batches_than_are_told_at_a_time() -> None:
    def case(comm: Comm) -> list[int]:
        with torch.no_grad():
            return [int(n) for batch in shard(DataLoader(Numbers(), 2), comm) for n in batch]

    found = ThreadWorld(2).run(case)
    assert sorted(found[0] + found[1]) == list(range(2 * CHUNK + 5))


def test_workers_load_the_parts() -> None:
    def case(comm: Comm) -> list[int]:
        loader = shard(make_loader("in order", 8, num_workers=1, persistent_workers=True), comm)
        return [int(n) for _ in range(2) for batch in loader for n in batch[0]]

    found = ThreadWorld(2).run(case)
    assert sorted(found[0] + found[1]) == sorted(2 * list(range(SAMPLES)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rank: Numbers(), "divides a torch.utils.data.DataLoader or a batch of tensors, not a Numbers"),
        (
            lambda rank: DataLoader(Numbers(), sampler=DistributedSampler(Numbers(), 2, rank)),
            "has a DistributedSampler",
        ),
        (lambda rank: DataLoader(Numbers(), 1, num_workers=1, in_order=False), "in_order=False"),
        (
            lambda rank: DataLoader(TensorDataset(INPUTS[: 9 + rank]), 3),
            "rank 1 has 10 samples .* rank 0 has 9",
        ),
        (lambda rank: DataLoader(Numbers(), 2 + rank), "rank 1 has .* batches of 3, rank 0 has .* batches of 2"),
    ],
)
def test_loaders_that_cannot_be_divided_are_refused_by_all(make: Any, message: str) -> None:
    def case(comm: Comm) -> None:
        with pytest.raises(UsageError, match=message):
            shard(make(comm.rank), comm)

    ThreadWorld(2).run(case)


def test_streams_of_other_samples_are_refused_by_all() -> None:
    class Shifted(Stream):
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter([(INPUTS[i] + self.rank * (i > 7), TARGETS[i]) for i in range(16)])

    def case(comm: Comm) -> None:
        loader = shard(DataLoader(Shifted(comm.rank), 8), comm)
        with pytest.raises(UsageError, match="of batch 1, rank 1 has other samples, rank 0 has 8 samples"):
            _ = list(loader)

    ThreadWorld(2).run(case)


def test_what_has_no_row_for_each_sample_is_not_cut() -> None:
    def case(comm: Comm) -> None:
        with pytest.raises(UsageError, match="parts of 3 and 8 samples"):
            shard((INPUTS[:8], TARGETS[:8], torch.ones(3)), comm)
        with pytest.raises(UsageError, match="holds a int"):
            shard((INPUTS[:8], 3), comm)
        found: dict[str, Any] = shard({"x": INPUTS[:8].numpy(), "y": TARGETS[:8], "names": list("abcdefgh")}, comm)
        assert [len(value) for value in found.values()] == [4, 4, 4]
        inputs, tokens = shard((INPUTS[:8].numpy(), [[1, 2]] * 8), comm)
        assert (inputs.shape, len(tokens)) == ((4, 4), 4)

    ThreadWorld(2).run(case)


@pytest.mark.parametrize("leave", [False, True])
def test_a_loader_that_ends_or_is_left_gives_way_to_the_one_around_it(leave: bool) -> None:
    def case(comm: Comm) -> None:
        training, validation = shard(make_loader("in order", 7), comm), shard(make_loader("in order", 5), comm)
        for _ in training:
            before = latest()
            for _ in validation:  # with gradients
                if leave:
                    break
            with torch.no_grad():
                _ = list(validation)
                shard((INPUTS[:2], TARGETS[:2]), comm)
            assert latest() is before
        assert latest() is None
        assert (training.epoch, validation.epoch) == (1, 2 * len(training))

    ThreadWorld(3).run(case)


def test_batches_of_two_loaders_keep_their_own_weights() -> None:
    net = Twice()

    def gradients(model: nn.Module, first: Any, second: Any) -> list[list[float]]:
        for one, other in zip(first, second, strict=False):
            model(one[1]).square().mean().backward()
            model(other[1]).square().sum(1).mean().backward()
        return [p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None]

    wanted = gradients(copy.deepcopy(net), make_loader("in order", 7), make_loader("in order", 5))

    def case(comm: Comm) -> list[list[float]]:
        loaders = [shard(make_loader("in order", size), comm) for size in (7, 5)]
        found = gradients(DataParallel(copy.deepcopy(net), comm), *loaders)
        assert latest() is None
        return found

    for found in ThreadWorld(3).run(case):
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-12)


def test_random_numbers_after_a_resume_are_those_of_the_uninterrupted_loop() -> None:
    """One rank at a time: ranks that are threads share torch's random state."""

    def numbers(kind: str, stop: int) -> list[float]:
        torch.manual_seed(4)
        loader = shard(make_loader(kind, 8), SingleComm())
        found = []
        for number, _ in enumerate(loader):
            found.append(float(torch.rand(())))
            if number == stop:
                state, random_state = loader.state_dict(), torch.get_rng_state()
                break
        else:
            return found
        again = shard(make_loader(kind, 8), SingleComm())
        again.load_state_dict(state)
        torch.manual_seed(99)
        torch.set_rng_state(random_state)
        return [*found, *(float(torch.rand(())) for _ in again)]

    for kind in ("shuffled", "iterable"):
        assert numbers(kind, 0) == numbers(kind, 99)


@pytest.mark.parametrize(("counts", "message"), [
    ((16, 8), "of batch 1, rank 1 has nothing, rank 0 has 8 samples"),
    ((16, 14), "of batch 1, rank 1 has 6 samples, rank 0 has 8 samples"),
])  # fmt: skip
def test_streams_that_end_at_different_steps_are_refused_by_all(counts: tuple[int, int], message: str) -> None:
    def case(comm: Comm) -> None:
        loader = shard(DataLoader(Stream(counts[comm.rank]), 8), comm)
        with pytest.raises(UsageError, match=message):
            _ = list(loader)

    ThreadWorld(2).run(case)


def test_a_loader_that_has_ended_does_not_weight_the_batches_of_another() -> None:
    """An evaluation ends with an uneven batch; the training after it has a loader of its own."""

    def case(comm: Comm) -> None:
        for _ in shard(make_loader("in order", 8), comm):
            assert latest() is not None
        assert latest() is None

    ThreadWorld(2).run(case)


class Twice(nn.Module):
    """Goes through its layer twice, by calling itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.tanh())
        return out

    def loss(self, x: Tensor) -> Tensor:
        return self.forward(x).square().mean()


def through_two(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = second(first(x))
    return out.square().mean()


def through_itself(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = first(first(x)).square().mean() + second(x).square().mean()
    return out


def in_place(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    out, again = first(x), second(x)
    out *= 0.5
    again[:, :2] = 0.0
    loss: Tensor = out.square().mean() + again.square().mean()
    return loss


@pytest.mark.parametrize("loss_of", [through_two, through_itself, in_place])
def test_models_in_a_row_are_weighted_once(loss_of: Any) -> None:
    nets = [Twice(), Twice()]

    def gradients(models: list[Any], loader: Any) -> list[list[float]]:
        for batch in loader:
            loss_of(*models, batch[1]).backward()
        return [p.grad.flatten().tolist() for model in models for p in model.parameters()]

    wanted = gradients(copy.deepcopy(nets), make_loader("in order", 7))

    def case(comm: Comm) -> list[list[float]]:
        models = [DataParallel(copy.deepcopy(net), comm) for net in nets]
        return gradients(models, shard(make_loader("in order", 7), comm))

    for found in ThreadWorld(3).run(case):
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-12)


def test_a_loss_by_a_method_of_the_model_is_refused_where_it_would_be_weighted_wrongly() -> None:
    net = Twice()

    def case(comm: Comm) -> None:
        model = DataParallel(copy.deepcopy(net), comm)
        batch = next(iter(shard(make_loader("in order", 7), comm)))
        took(Share(len(batch[1]), 7), batch)  # the loader has been left
        with pytest.raises(UsageError, match="the loss was not computed by calling the model"):
            model.loss(batch[1]).backward()

    ThreadWorld(3).run(case)  # 7 samples are uneven for 3 ranks


def test_a_gradient_of_the_input_is_not_weighted() -> None:
    net = Twice()

    def slope(model: nn.Module, x: Tensor) -> list[float]:
        x = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(model(x).sum(), x)
        return [float(value) for value in found.sum(1)]

    wanted = slope(net, INPUTS[:7])

    def case(comm: Comm) -> list[float]:
        model = DataParallel(copy.deepcopy(net), comm)
        return slope(model, shard(INPUTS[:7], comm))

    assert [x for found in ThreadWorld(3).run(case) for x in found] == pytest.approx(wanted, abs=1e-12)


class Answer:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def test_an_output_that_cannot_be_weighted_is_refused() -> None:
    class Odd(Twice):
        def forward(self, x: Tensor) -> Any:
            return Answer(super().forward(x))

    def case(comm: Comm) -> None:
        model = DataParallel(Odd(), comm)
        with pytest.raises(UsageError, match="Answer has tensors that cannot be weighted"):
            model(shard(INPUTS[:7], comm))

    ThreadWorld(3).run(case)


def test_what_is_made_from_a_batch_is_weighted_by_it() -> None:
    """Of two loaders at a time, by the one with as many samples."""

    def case(comm: Comm) -> None:
        for (_, one, _), (_, other, _) in zip(
            shard(make_loader("in order", 7), comm), shard(make_loader("in order", 5), comm), strict=False
        ):
            if len(one) != len(other):
                assert share_of(one * 2) == share_of(one)
                assert share_of((other.float(),)) == share_of(other)
            assert torch.load(io.BytesIO(saved(one)), weights_only=True).equal(one)

    ThreadWorld(3).run(case)


def saved(tensor: Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def test_copies_of_the_model_are_plain() -> None:
    def case(comm: Comm) -> None:
        plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model = DataParallel(plain, comm)
        average = torch.optim.swa_utils.AveragedModel(model)
        model(torch.ones(2, 4)).sum().backward()
        average.update_parameters(model)
        took(Share(1, 3), ())
        torch.save(plain, io.BytesIO())
        copied: nn.Module = copy.deepcopy(model)
        assert type(copied) is type(plain)
        (copied(torch.ones(2, 4)).square().sum() * (1 + comm.rank)).backward()
        alone = copy.deepcopy(copied)
        alone.zero_grad()
        (alone(torch.ones(2, 4)).square().sum() * (1 + comm.rank)).backward()
        for p, q in zip(copied.parameters(), alone.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert p.grad.equal(q.grad), "neither weighted nor averaged"
        synchronised = DataParallel(nn.Sequential(nn.BatchNorm1d(4)), comm, sync_batchnorm=True)
        layers = [each.get_submodule("0") for each in (synchronised.module, copy.deepcopy(synchronised.module))]
        assert layers[0].comm is layers[1].comm

    ThreadWorld(2).run(case)
