"""The smallest training that PyTorch DDP can do: one step of one layer; the peer of benchmarks/startup.py."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(784, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(8, 784)).sum().backward()
optimizer.step()
dist.destroy_process_group()
