"""Training loops of users, under torchrun; the tests of own loops start this.

recorded_loops.py OUT kinds        one loop with each way to distribute a model
recorded_loops.py OUT fault HOW    a loop with checkpoints; rank 1 raises an error, is killed, or nothing happens
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

import paceline

SAMPLES, BATCH, EPOCHS, STEPS = 72, 16, 2, 15
FAULTS = {"raise": 7, "kill": 12, "nothing": STEPS}  # and the step


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def make_data() -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 8, generator=random), torch.randint(4, (SAMPLES,), generator=random)
    )  # fmt: skip


def train_plainly(model: nn.Module, loader: Any) -> list[Tensor]:
    """An ordinary loop; returns the last weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def train(folder: Path, model: nn.Module, loader: Any, **options: Any) -> list[Tensor]:
    """The same, recorded; it counts epochs from 1."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.record(folder, model, epochs=EPOCHS, **options) as run:
        for epoch in range(1, EPOCHS + 1):
            for inputs, targets in loader:
                with run.step(epoch=epoch) as step:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(inputs), targets)
                    loss.backward()
                    optimizer.step()
                    step.log(loss=loss, share=len(inputs) / BATCH)
            with torch.no_grad():
                run.validation(loss=F.cross_entropy(model(inputs), targets))
    return [parameter.detach().clone() for parameter in model.parameters()]


def kinds(out: Path) -> None:
    """With paceline.DataParallel, DDP (also with a hook of the user), and FSDP2."""
    data = make_data()
    assert paceline.connect() is paceline.connect(), "a second rendezvous would wait for the addresses of the first"
    ours = paceline.shard(DataLoader(data, batch_size=BATCH))
    train(out / "ours", paceline.DataParallel(make_model()), ours, settings={"lr": 0.1, "gamma": 0.7})
    dist.init_process_group("gloo")
    half = DataLoader(Subset(data, range(dist.get_rank(), SAMPLES, 2)), batch_size=BATCH // 2)
    model = DistributedDataParallel(make_model())
    recorded = train(out / "ddp", model, half, settings={"lr": 0.1, "gamma": 0.9})
    train(out / "again", model, half)

    hooked, called = DistributedDataParallel(make_model()), list[int]()

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        called.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        result: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return result

    hooked.register_comm_hook(None, hook)
    train(out / "hooked", hooked, half)
    assert called, "the user's own hook has been replaced"
    plain = train_plainly(DistributedDataParallel(make_model()), half)
    assert all(map(torch.equal, recorded, plain)), "recording has changed the training"
    sharded = make_model()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (2,)))
    train(out / "fsdp", sharded, half)
    dist.destroy_process_group()


def fault(out: Path, how: str) -> None:
    dist.init_process_group("gloo")
    rank, folder, plain = dist.get_rank(), out / "run", make_model()
    model, optimizer = DistributedDataParallel(plain), torch.optim.SGD(plain.parameters(), lr=0.1)
    checkpoints = paceline.Checkpoints(folder / "checkpoints", model=plain, optimizer=optimizer)
    start = checkpoints.restore()
    inputs, targets = make_data()[:BATCH]
    with paceline.record(folder, model, start=start, steps=STEPS) as run:
        for number in range(start, STEPS):
            with run.step(epoch=number // 4) as step:
                if rank == 1 and number == FAULTS[how]:
                    if how == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise ValueError("a bad sample")
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
                step.log(loss=loss)
            if (number + 1) % 5 == 0:
                with run.span("save"):
                    checkpoints.save(number + 1)
                    checkpoints.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[2] == "kinds":
        kinds(Path(sys.argv[1]))
    else:
        fault(Path(sys.argv[1]), sys.argv[3])
