"""Connects this process to the other ranks of its launcher."""

from __future__ import annotations

import atexit
import shutil

from paceline.comm import table as transports
from paceline.comm.base import Comm
from paceline.comm.seat import Seat
from paceline.comm.single import SingleComm
from paceline.errors import unknown
from paceline.launch.env import find_seat


def connect(transport: str = "auto", timeout: float = 120.0, seat: Seat | None = None) -> Comm:
    """A communicator of all ranks that torchrun, mpiexec, srun or paceline started; without a launcher, of one rank."""
    seat = seat or find_seat()
    if seat is None or seat.size == 1:
        return SingleComm(timeout)
    chosen, _ = transports.choose(seat.launcher, one_machine=seat.one_node and not seat.in_lab)
    name = chosen if transport == "auto" else transport
    if name not in transports.TABLE:
        raise unknown("transport", name, ("auto", *transports.TABLE))
    atexit.register(leave, seat)
    return transports.TABLE[name].connect(seat, timeout)


def leave(seat: Seat) -> None:
    """Remove the rendezvous folder, unless Paceline's launcher does that."""
    if seat.sockets and seat.launcher != "paceline":
        shutil.rmtree(seat.sockets, ignore_errors=True)
