"""mnist.py on many processes: the lines that changed are marked, and what is inside the new `with` is indented.

torchrun --nproc-per-node 2 examples/mnist_parallel.py
mpiexec -n 2 python examples/mnist_parallel.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline  # changed
from paceline.data.load import load


class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3)
        self.fc1, self.fc2 = nn.Linear(4608, 64), nn.Linear(64, 10)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(self.dropout(x.flatten(1))))
        return F.log_softmax(self.fc2(self.dropout(x)), dim=1)


def test(model, loader):
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            output = model(images)
            loss += F.nll_loss(output, labels, reduction="sum").item()
            correct += int((output.argmax(1) == labels).sum())
    return loss / len(loader.dataset), correct / len(loader.dataset)


parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.7)
parser.add_argument("--dropout", type=float, default=0.25)
parser.add_argument("--samples", type=int, help="train with the first samples only")
parser.add_argument("--float64", action="store_true")
parser.add_argument("--folder", default="runs/mnist", help="for what is recorded")
parser.add_argument("--save", help="a file for the weights")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
torch.manual_seed(1)
log = print if paceline.connect().rank == 0 else (lambda text: None)  # changed

data = load("mnist-mini")
kind = torch.get_default_dtype()
train_set, test_set = (
    TensorDataset(split.inputs[: args.samples].to(kind) / 255, split.targets[: args.samples].long())
    for split in (data.train, data.test)
)
train_loader = paceline.shard(DataLoader(train_set, args.batch_size, shuffle=True))  # changed
test_loader = DataLoader(test_set, 1000)
model = paceline.DataParallel(Net(args.dropout))  # changed
optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)

with paceline.record(args.folder, model, settings=vars(args)) as run:  # changed
    for epoch in range(args.epochs):
        model.train()
        for number, (images, labels) in enumerate(train_loader):
            with run.step(epoch=epoch) as step:  # changed
                optimizer.zero_grad()
                loss = F.nll_loss(model(images), labels)
                loss.backward()
                optimizer.step()
                step.log(loss=loss)  # changed
            if number % 20 == 0:
                log(f"epoch {epoch}, batch {number} of {len(train_loader)}: loss {loss.item():.4f}")
        scheduler.step()
        test_loss, accuracy = test(model, test_loader)
        run.validation(test_loss, accuracy)  # changed
        log(f"epoch {epoch}: test loss {test_loss:.4f}, accuracy {accuracy:.2%}")

if args.save and paceline.connect().rank == 0:  # changed
    torch.save(model.state_dict(), args.save)
