"""An ordinary PyTorch training script: one process. parallel_script.py is the same, made data-parallel."""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from paceline.data.load import load
from paceline.models.build import build

BATCH = 64

data = load("mnist-mini").train
images, labels = data.inputs / 255, data.targets.long()

torch.manual_seed(0)
model = build("mlp", (1, 28, 28), 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for epoch in range(2):
    order = torch.from_numpy(np.random.default_rng([0, 0, epoch]).permutation(len(labels)))
    for batch in order.split(BATCH):
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss of the last batch {loss.item():.4f}")

save_file(model.state_dict(), sys.argv[1])
