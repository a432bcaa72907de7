"""The peers: a model trained by a plain PyTorch loop, or by PyTorch's DistributedDataParallel over gloo.

Written as their users write it. `--tuned` gives them this project's mnist-cnn (pooling before ReLU), its memory layout
(channels_last), its fused optimizer and (by data_parallel.py) its way with memory, so that what is left to compare is
the data parallelism itself. The other models are this project's in any case. `--divide` divides the optimizer's state
(ZeroRedundancyOptimizer), or that, weights and gradients (FSDP2), over the ranks. Prints samples/s of all ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from paceline.data.load import load
from paceline.models.build import build


def textbook() -> nn.Module:
    """Convolution, ReLU, pooling; default memory layout."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 128, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(128, 256, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.5),
        nn.Linear(256, 1000), nn.ReLU(), nn.Linear(1000, 100), nn.ReLU(), nn.Linear(100, 10),
    )  # fmt: skip


def divide(model: nn.Module) -> None:
    """FSDP2: each block of a residual net or transformer on its own, then the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for blocks in model.children():
        if isinstance(blocks, nn.Sequential | nn.ModuleList):
            for block in blocks:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--skip", type=int, required=True)
    parser.add_argument("--model", default="mnist-cnn")
    parser.add_argument("--data", default="mnist-mini")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--divide", choices=["no", "optimizer", "all"], default="no")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    data = load(args.data)
    text = data.info.kind == "tokens"
    inputs, targets = data.train.inputs, data.train.targets
    own = args.model != "mnist-cnn" or args.tuned
    model = build(args.model, data.info.shape, data.info.classes) if own else textbook()
    channels_last = args.tuned and not text and args.divide != "all"  # FSDP2 refuses such parameters
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if size > 1:
        dist.init_process_group("gloo")
        if args.divide == "all":
            divide(model)
        else:
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    kind = torch.optim.AdamW if text else torch.optim.Adam
    if args.divide == "optimizer":
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.001, fused=args.tuned)
    else:
        optimizer = kind(model.parameters(), 0.001, fused=args.tuned)
    start = 0.0
    for step in range(args.steps):
        if step == args.skip:
            start = time.perf_counter()
        batch = torch.randint(len(targets), (args.batch,))
        images = None if text else inputs[batch].float() / 255
        if channels_last and images is not None:
            images = images.contiguous(memory_format=torch.channels_last)
        output = model(inputs[batch].long() if images is None else images)
        loss = F.cross_entropy(output.flatten(0, -2), targets[batch].long().flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()  # as a script that prints its progress does, and as this project does
    seconds = time.perf_counter() - start
    if os.environ.get("RANK", "0") == "0":
        print(size * args.batch * (args.steps - args.skip) / seconds)
    if size > 1:
        leave()


def leave() -> None:
    dist.barrier()  # without it, a rank that leaves early can leave the other waiting in its last sum
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may hang while the interpreter ends


if __name__ == "__main__":
    main()
