"""paceline doctor: shows what this machine has for training, and what is missing."""

import argparse
import importlib.metadata
import shutil
import sys

from paceline.cli.main import add_json
from paceline.comm.table import SHM, mpiexec
from paceline.launch.env import find_seat
from paceline.layout import cores
from paceline.strict_json import dump


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser, "it")


def run(args: argparse.Namespace) -> int:
    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    seat = find_seat()
    rows = [
        ("paceline", version("paceline")),
        ("Python", sys.version.split()[0]),
        ("torch", version("torch")),
        ("cores", str(cores())),
        ("transport shm", SHM.requires(True, True) or "yes"),
        ("transport gloo", "yes"),
        ("transport mpi", f"mpi4py {version('mpi4py')}, mpiexec: {mpiexec() or 'not found'}"),
        ("transport zmq", f"pyzmq {version('pyzmq')}"),
        ("launchers", ", ".join(w for w in ("torchrun", "mpiexec", "srun") if shutil.which(w)) or "none on the path"),
        ("started by", f"{seat.launcher}, rank {seat.rank} of {seat.size}" if seat else "a plain shell"),
    ]
    if args.json:
        print(dump(dict(rows)))
        return 0
    for name, value in rows:
        print(f"{name:<16}{value}")
    return 0
