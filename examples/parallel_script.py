"""plain_script.py, made data-parallel: the lines that changed are marked.

Start it alone, or with any launcher:

    python examples/parallel_script.py OUT.safetensors
    torchrun --nproc-per-node 2 examples/parallel_script.py OUT.safetensors
    mpiexec -n 2 python examples/parallel_script.py OUT.safetensors
"""

import sys

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import paceline
from paceline.data.load import load
from paceline.models.build import build

BATCH = 64

data = load("mnist-mini").train
images, labels = data.inputs / 255, data.targets.long()

torch.manual_seed(0)
model = build("mlp", (1, 28, 28), 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

comm = paceline.connect()  # changed: find the other ranks
parallel = paceline.DataParallel(model, comm)  # changed: start from rank 0's weights
sampler = paceline.Sampler(len(labels), BATCH, comm.rank, comm.size)  # changed: this rank's samples

for epoch in range(2):
    for step, batch in enumerate(sampler):  # changed
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        parallel.backward(loss, sampler.share(step))  # changed: gradients of the whole batch, on every rank
        optimizer.step()
    if comm.rank == 0:
        print(f"epoch {epoch}: loss of rank 0's last batch {loss.item():.4f}")

if comm.rank == 0:
    save_file(model.state_dict(), sys.argv[1])
comm.barrier()
