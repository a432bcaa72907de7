"""What every transport must do, as cases that run on each rank."""

from __future__ import annotations

import time

import torch
from worlds import limited_to

from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.errors import CommError, CommTimeout


def neighbours_exchange(comm: Comm, length: int, dtype: str) -> list[float]:
    kind = getattr(torch, dtype)
    out = torch.full((length,), comm.rank, dtype=kind)
    into = torch.empty(length, dtype=kind)
    receive = comm.irecv(into, (comm.rank - 1) % comm.size)
    comm.send(out, (comm.rank + 1) % comm.size)
    receive.wait()
    return [float(x) for x in into.unique()]


def tags_choose(comm: Comm) -> list[float]:
    """Two messages sent as tag 1, tag 2; the receiver takes tag 2 first."""
    if comm.rank == 0:
        first = comm.isend(torch.tensor([1.0]), 1, tag=1)
        second = comm.isend(torch.tensor([2.0]), 1, tag=2)
        first.wait()
        second.wait()
        return []
    if comm.rank == 1:
        one, two = torch.zeros(1), torch.zeros(1)
        comm.recv(two, 0, tag=2)
        comm.recv(one, 0, tag=1)
        return [one.item(), two.item()]
    return []


def order_is_kept(comm: Comm, count: int) -> list[float]:
    if comm.rank == 0:
        works = [comm.isend(torch.full((1 + i * 7,), float(i)), 1) for i in range(count)]
        for work in works:
            work.wait()
        return []
    if comm.rank == 1:
        places = [torch.empty(1 + i * 7) for i in range(count)]
        works = [comm.irecv(place, 0) for place in places]
        for work in works:
            work.wait()
        return [place.mean().item() for place in places]
    return []


def large_both_ways(comm: Comm, length: int) -> bool:
    """Both sides send before they receive: a send must not need the other side to be waiting."""
    if comm.rank > 1:
        return True
    other = 1 - comm.rank
    out, into = torch.full((length,), float(comm.rank)), torch.empty(length)
    sending, receiving = comm.isend(out, other), comm.irecv(into, other)
    receiving.wait()
    sending.wait()
    return bool((into == other).all())


def sums(comm: Comm, length: int, dtype: str) -> bool:
    kind = getattr(torch, dtype)
    mine = (torch.arange(length) % 7 + comm.rank).to(kind)
    wanted = sum((torch.arange(length) % 7 + r).to(kind) for r in range(comm.size))
    comm.allreduce(mine)
    return bool((mine == wanted).all())


def broadcasts(comm: Comm, root: int) -> list[float]:
    tensor = torch.full((1000,), float(comm.rank))
    comm.broadcast(tensor, root)
    return [float(x) for x in tensor.unique()]


def barrier_holds(comm: Comm) -> tuple[float, float]:
    if comm.rank == 0:
        time.sleep(0.2)
    came = time.time()
    comm.barrier()
    return came, time.time()


def odd_and_even(comm: Comm) -> list[int]:
    group = comm.split(comm.rank % 2, key=-comm.rank)
    total = torch.tensor([comm.rank])
    group.allreduce(total)
    result = [group.rank, group.size, int(total)]
    group.close()
    return result


def duplicates_keep_apart(comm: Comm) -> list[float]:
    """The same tag on two communicators: each receive gets its own communicator's message."""
    second = comm.dup()
    if comm.rank == 0:
        works = [second.isend(torch.tensor([2.0]), 1), comm.isend(torch.tensor([1.0]), 1)]
        for work in works:
            work.wait()
        return []
    if comm.rank == 1:
        one, two = torch.zeros(1), torch.zeros(1)
        comm.recv(one, 0)
        second.recv(two, 0)
        return [one.item(), two.item()]
    return []


def duplicates_close_at_once(comm: Comm, count: int) -> int:
    for _ in range(count):
        comm.dup().close()
    return count


def nobody_sends(comm: Comm) -> str:
    """A receive whose message never comes ends at the deadline, with both ranks in the message."""
    message = ""
    with limited_to(comm, 0.3) as short:
        if comm.rank == 0:
            try:
                short.recv(torch.zeros(1), 1, tag=5)
            except CommTimeout as error:
                message = str(error)
        comm.barrier()
    return message


def somebody_stays_away(comm: Comm, what: str) -> str:
    """A collective that one rank does not join ends at the deadline."""
    message = ""
    with limited_to(comm, 0.3) as short:
        if comm.rank != 0:
            try:
                getattr(short, what)(*([] if what == "barrier" else [torch.zeros(10)]))
            except CommError as error:
                message = str(error)
        comm.barrier()
    return message


def wrong_peers(comm: Comm) -> list[str]:
    messages = []
    for peer in (comm.rank, comm.size, -1):
        for call in (comm.isend, comm.irecv):
            try:
                call(torch.zeros(1), peer)
            except CommError as error:
                messages.append(str(error))
    return messages


def metered(comm: Comm) -> dict[str, int]:
    meter = MeteredComm(comm)
    if comm.rank == 0:
        meter.send(torch.zeros(10), 1)
        meter.send(torch.zeros(3, dtype=torch.float64), 1)
    if comm.rank == 1:
        meter.recv(torch.zeros(10), 0)
        meter.recv(torch.zeros(3, dtype=torch.float64), 0)
    child = meter.dup()
    child.allreduce(torch.zeros(5))
    total = meter.meter.total()
    return {
        "messages_sent": total.messages_sent,
        "messages_received": total.messages_received,
        "bytes_sent": total.bytes_sent,
        "bytes_received": total.bytes_received,
        "opaque_calls": total.opaque_calls,
        "opaque_bytes": total.opaque_bytes,
        "own_opaque_calls": meter.meter.opaque_calls,
    }


def one_aborts(comm: Comm, nested: bool) -> str:
    """A rank that aborts ends the waits of the others well before their deadline, also in groups of what it aborts."""
    group = comm.dup()
    waited_on = group.dup() if nested else group
    comm.barrier()
    message = ""
    if comm.rank == 0:
        group.abort("it has seen enough")
    else:
        try:
            waited_on.recv(torch.zeros(1), 0, tag=9)
        except CommTimeout:
            message = "waited until the deadline"
        except CommError as error:
            message = str(error)
    comm.barrier()
    return message


def groups_of_some(comm: Comm) -> int:
    """Rank 0 is in a group with each other rank; the others only in their own."""
    pairs = [comm.group([0, other]) for other in range(1, comm.size) if comm.rank in (0, other)]
    total = 0
    for pair in pairs:
        value = torch.tensor([comm.rank])
        pair.allreduce(value)
        total += int(value)
    return total
