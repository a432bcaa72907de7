"""A user's own loop continues in the middle of an epoch, to the same bits, also with a DataLoader that reads ahead."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Checkpoints, DataParallel, PacelineError, Sampler, shard
from paceline.comm.base import Comm
from paceline.comm.single import SingleComm
from paceline.comm.threads import thread_world

SAMPLES, BATCH, STEPS = 54, 8, 20


def train(folder: Path, until: int, comm: Comm, kind: str = "adam", batch: int = BATCH, dropout: float = 0.0) -> Tensor:
    """Train up to this step, and save there; return the weights and the batches' first samples."""
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)), torch.arange(SAMPLES) % 3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3)).double()
    for number, parameter in enumerate(model.parameters()):  # ranks that are threads share one random state
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adam(model.parameters()) if kind == "adam" else torch.optim.SGD(model.parameters(), 0.1, 0.9)
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    sampler = Sampler(SAMPLES, batch, comm.rank, comm.size, seed=5)
    parallel = DataParallel(model, comm)
    checkpoints = Checkpoints(folder, model=model, optimizer=optimizer, scheduler=schedule, sampler=sampler, comm=comm)
    step = checkpoints.restore()
    while step < until:
        number = sampler.first
        for images, labels in DataLoader(data, batch_sampler=sampler, generator=torch.Generator()):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(parallel(images.double()), labels)
            parallel.backward(loss, sampler.share(number))
            optimizer.step()
            schedule.step()
            step, number = step + 1, number + 1
            if step == until:
                break
    checkpoints.save(step)
    checkpoints.close()
    parallel.close()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("at", [1, 6, 7, 13])
def test_a_loop_that_stopped_trains_the_same(kind: str, at: int, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", STEPS, SingleComm(), kind, dropout=0.3)
    train(tmp_path / "parts", at, SingleComm(), kind, dropout=0.3)
    assert torch.equal(train(tmp_path / "parts", STEPS, SingleComm(), kind, dropout=0.3), whole)


def test_ranks_that_are_threads_save_and_restore_together(tmp_path: Path) -> None:
    def on_all(name: str, until: int, size: int) -> list[Tensor]:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(lambda comm: train(tmp_path / name, until, comm), thread_world(size, 20.0)))

    (whole,) = {tuple(each.tolist()) for each in on_all("whole", STEPS, 3)}
    on_all("parts", 9, 3)
    assert {tuple(each.tolist()) for each in on_all("parts", STEPS, 3)} == {whole}
    assert len(on_all("parts", STEPS + 2, 2)) == 2  # and others can continue


def test_another_batch_or_model_is_refused_by_name(tmp_path: Path) -> None:
    train(tmp_path, 3, SingleComm())
    with pytest.raises(PacelineError, match="a global batch of 8, and the sampler has 9"):
        train(tmp_path, 4, SingleComm(), batch=9)
    with pytest.raises(PacelineError, match=r"another model: only one of them has '1\.num_batches_tracked'"):
        Checkpoints(tmp_path, model=nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))).restore()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checkpoints = Checkpoints(tmp_path / "file", model=nn.Linear(2, 2))
    checkpoints.save(1)
    with pytest.raises(PacelineError, match="no checkpoint in"):
        checkpoints.close()


def train_sharded(folder: Path, until: int, comm: Comm) -> list[float]:
    """The same with a sharded loader, which shuffles with its own generator, and without batch-norm."""
    data = TensorDataset(torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)), torch.arange(SAMPLES) % 3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    loader = shard(DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(9)), comm)
    parallel = DataParallel(model, comm)
    checkpoints = Checkpoints(folder, model=parallel, optimizer=optimizer, loader=loader, comm=comm)
    step = checkpoints.restore()
    while step < until:
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(parallel(images.double()), labels).backward()
            optimizer.step()
            step += 1
            if step == until:
                checkpoints.save(step)
                break
    checkpoints.close()
    return [float(value) for value in nn.utils.parameters_to_vector(model.parameters()).detach()]


@pytest.mark.parametrize("at", [3, 7, 10])  # seven batches an epoch
def test_a_sharded_loader_continues_on_another_number_of_ranks(at: int, tmp_path: Path) -> None:
    def on_all(name: str, until: int, size: int) -> list[float]:
        with ThreadPoolExecutor(size) as pool:
            return next(pool.map(lambda comm: train_sharded(tmp_path / name, until, comm), thread_world(size, 20.0)))

    wanted = train_sharded(tmp_path / "whole", STEPS, SingleComm())
    on_all("parts", at, 2)
    assert on_all("parts", STEPS, 3) == pytest.approx(wanted, abs=1e-12)
