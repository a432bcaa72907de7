"""gpt.py on many processes: the lines that changed are marked, and what is inside the new `with` is indented.

torchrun --nproc-per-node 2 examples/gpt_parallel.py
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

import paceline  # changed
from paceline.data.load import load


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, width = x.shape
        q, k, v = self.attend(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(b, t, width))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, block, layers, width, heads):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--block", type=int, default=64)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--warmup", type=int, default=20)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--float64", action="store_true")
parser.add_argument("--folder", default="runs/gpt", help="for what is recorded")
parser.add_argument("--save", help="a file for the weights")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
torch.manual_seed(1)
log = print if paceline.connect().rank == 0 else (lambda text: None)  # changed

data = load(f"shakespeare:block={args.block}")
model = paceline.DataParallel(GPT(data.info.classes, args.block, args.layers, args.width, 4))  # changed
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
order = torch.Generator().manual_seed(2)


def learning_rate(number):
    if number < args.warmup:
        return args.lr * (number + 1) / args.warmup
    done = (number - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def get_batch():
    chosen = torch.randint(len(data.train.inputs), (args.batch_size,), generator=order)
    return data.train.inputs[chosen].long(), data.train.targets[chosen].long()


with paceline.record(args.folder, model, settings=vars(args)) as run:  # changed
    for number in range(args.steps):
        with run.step() as step:  # changed
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(number)
            for micro in range(1, args.accumulate + 1):  # changed
                inputs, targets = paceline.shard(get_batch())  # changed
                with model.no_sync(micro < args.accumulate):  # changed
                    _, loss = model(inputs, targets)
                    (loss / args.accumulate).backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)  # changed
        if number % 20 == 0:
            log(f"step {number}: loss {loss.item():.4f}")

if args.save and paceline.connect().rank == 0:  # changed
    torch.save(model.state_dict(), args.save)
