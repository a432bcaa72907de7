"""The peer of input.py: the same model fed by PyTorch's DataLoader, a sample at a time, as its users write it."""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.data.load import load
from paceline.models.build import build

SKIP = 2


class Cifar(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, size: int) -> None:
        data = load("cifar10", prepared=True)
        assert data.info.mean is not None
        assert data.info.std is not None
        self.images, self.labels, self.size = data.train.inputs, data.train.targets, size
        self.mean, self.std = (torch.tensor(each).view(3, 1, 1) for each in (data.info.mean, data.info.std))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = F.pad(self.images[index], (4, 4, 4, 4))
        down, right, mirror = (int(torch.randint(high, ())) for high in (9, 9, 2))
        image = image[:, down : down + 32, right : right + 32]
        floats = ((image.flip(2) if mirror else image).float() / 255 - self.mean) / self.std
        if self.size != 32:
            floats = F.interpolate(floats[None], (self.size, self.size), mode="bilinear")[0]
        return floats, self.labels[index].long()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--image-size", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    args = parser.parse_args()
    model = build(args.model, (3, args.image_size, args.image_size), 10).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)
    batches = iter(DataLoader(Cifar(args.image_size), args.batch, shuffle=True, num_workers=args.processes))
    waited, start = 0.0, 0.0
    for step in range(args.steps):
        if step == SKIP:
            waited, start = 0.0, time.perf_counter()
        before = time.perf_counter()
        images, labels = next(batches)
        waited += time.perf_counter() - before
        loss = F.cross_entropy(model(images.to(memory_format=torch.channels_last)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
    seconds = time.perf_counter() - start
    print(args.batch * (args.steps - SKIP) / seconds, waited / seconds)


if __name__ == "__main__":
    main()
