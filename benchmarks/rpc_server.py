"""The peer: the synchronous parameter server of PyTorch's own RPC tutorial, one server and N trainers on this machine.

    python benchmarks/rpc_server.py --model mnist-cnn --workers 2 --steps 40 --batch-size 32 --threads 1 --json

Written as "Implementing Batch RPC Processing Using Asynchronous Executions" (pytorch.org/tutorials) has it: trainers
send a list of gradients, the server sums them, steps, and answers every trainer with the whole model. Images are random
and made once. The first quarter of the steps is not counted: `seconds_per_step` is the median of all trainers' other
steps, `samples_per_second` is what all of them did in the time the slowest took.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection, wait

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import rpc

from paceline.models.build import build

BIG_HIDDEN = (4096, 4096, 1216)  # 24,990,794 parameters with MNIST's 784 inputs and 10 classes
MODELS = {"mnist-cnn": ("mnist-cnn", None), "big": ("mlp", BIG_HIDDEN)}
# RPC obeys whoever connects, so all of it stays on loopback. TensorPipe, and the gloo group with which RPC starts,
# listen on the address of the host's name unless these name an interface; the ranks meet in a file, because the store
# of tcp:// listens on every address. `ss -ltnp` then shows 127.0.0.1 alone. Tensors go by what TensorPipe itself
# chooses on one machine: its shm transport (memory, abstract Unix sockets) and cma channel (process_vm_readv).
LOOPBACK = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


class BatchUpdateParameterServer:
    """The tutorial's, but for gradients that are None: zero_grad leaves them so since torch 2.0."""

    def __init__(self, model: str, batch_update_size: int) -> None:
        name, hidden = MODELS[model]
        self.model = build(name, (1, 28, 28), 10, 0.0, hidden)
        self.lock = threading.Lock()
        self.future_model: torch.futures.Future[nn.Module] = torch.futures.Future()
        self.batch_update_size = batch_update_size
        self.curr_update_size = 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.cpu: list[float] = []  # this process's CPU time whenever a step's last gradients have come

    def get_model(self) -> nn.Module:
        return self.model

    @staticmethod
    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def update_and_fetch_model(ps_rref: Reference, grads: list[Tensor]) -> torch.futures.Future[nn.Module]:
        self: BatchUpdateParameterServer = ps_rref.local_value()
        with self.lock:
            self.curr_update_size += 1
            for p, g in zip(self.model.parameters(), grads, strict=True):
                p.grad = g if p.grad is None else p.grad.add_(g)
            fut = self.future_model
            if self.curr_update_size >= self.batch_update_size:
                self.cpu.append(time.process_time())
                for p in self.model.parameters():
                    assert p.grad is not None
                    p.grad /= self.batch_update_size
                self.curr_update_size = 0
                self.optimizer.step()
                self.optimizer.zero_grad()
                fut.set_result(self.model)
                self.future_model = torch.futures.Future()
        return fut


Reference = rpc.RRef[BatchUpdateParameterServer]


def run_trainer(ps_rref: Reference, steps: int, batch_size: int) -> list[float]:
    """The seconds of each step; called by the server."""
    generator = torch.Generator().manual_seed(rpc.get_worker_info().id)
    images = torch.randn(batch_size, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (batch_size,), generator=generator)
    m = ps_rref.rpc_sync().get_model()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        F.cross_entropy(m(images), labels).backward()
        m = rpc.rpc_sync(
            ps_rref.owner(),
            BatchUpdateParameterServer.update_and_fetch_model,
            args=(ps_rref, [p.grad for p in m.parameters()]),
        )
        seconds.append(time.perf_counter() - start)
    return seconds


def run_server(args: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(0)
    server = BatchUpdateParameterServer(args.model, args.workers)
    work = (rpc.RRef(server), args.steps, args.batch_size)
    futures = [rpc.rpc_async(f"rank{rank}", run_trainer, args=work) for rank in range(1, args.workers + 1)]
    skip = max(1, args.steps // 4)
    timed = [seconds[skip:] for seconds in torch.futures.wait_all(futures)]
    images = args.workers * args.batch_size * (args.steps - skip)
    return {
        "seconds_per_step": statistics.median(second for seconds in timed for second in seconds),
        "samples_per_second": images / max(sum(seconds) for seconds in timed),
        "server_cpu_seconds_per_step": (server.cpu[-1] - server.cpu[skip - 1]) / (args.steps - skip),
        "model_bytes": sum(p.numel() * p.element_size() for p in server.model.parameters()),
    }


def deadline(steps: int) -> float:
    """Seconds after which a run, or any one wait in it, is given up."""
    return 120.0 + 10.0 * steps


def die_with(parent: int) -> None:
    """End with the parent, however it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit("the parent has gone")


def node(rank: int, args: argparse.Namespace, parent: int, meeting: str, results: Connection) -> None:
    """The process of the server (rank 0), which alone reports, or of a trainer."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    torch.set_num_threads(args.threads)
    limit = deadline(args.steps)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}", rpc_timeout=limit)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=args.workers + 1, rpc_backend_options=options)
    if rank == 0:
        try:
            results.send(run_server(args))
        finally:
            signal.alarm(20)  # kills: after an error torch sometimes hangs at exit
    rpc.shutdown(timeout=limit)


def run(args: argparse.Namespace) -> dict[str, float]:
    os.environ.update(LOOPBACK, OMP_NUM_THREADS=str(args.threads))
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    end = time.monotonic() + deadline(args.steps)
    with tempfile.TemporaryDirectory(prefix="paceline-rpc-") as folder:
        shared = (args, os.getpid(), f"{folder}/meeting", writer)
        nodes = [context.Process(target=node, args=(rank, *shared), daemon=True) for rank in range(args.workers + 1)]
        try:
            for process in nodes:
                process.start()
            while running := [process.sentinel for process in nodes if process.exitcode is None]:
                if not wait(running, max(0.0, end - time.monotonic())):
                    sys.exit(f"{len(running)} processes still run after {deadline(args.steps):g} s")
                if codes := [process.exitcode for process in nodes if process.exitcode]:
                    sys.exit(f"a process ended with code {codes[0]}")
        finally:
            for process in nodes:
                if process.is_alive():
                    process.kill()
                    process.join()
    return dict(reader.recv())


def measure(model: str, workers: int, steps: int, batch_size: int, threads: int) -> dict[str, float]:
    """What this program prints, run in processes of its own."""
    sizes = {"workers": workers, "steps": steps, "batch-size": batch_size, "threads": threads, "parent": os.getpid()}
    command = [sys.executable, __file__, "--model", model, "--json", *(f"--{k}={v}" for k, v in sizes.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline(steps) + 30, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="mnist-cnn")
    for name, default in {"workers": 2, "steps": 40, "batch-size": 32, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--parent", type=int, help="end with this process, which started this one")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps must be 2 or more: the first quarter is not counted")
    if args.parent:
        die_with(args.parent)
    found = run(args)
    print(json.dumps(found) if args.json else "\n".join(f"{name}: {value:,.4g}" for name, value in found.items()))


if __name__ == "__main__":
    main()
