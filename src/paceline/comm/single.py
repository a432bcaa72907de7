"""The communicator of a single rank, which sends nothing."""

from torch import Tensor

from paceline.comm.base import Comm, Work
from paceline.errors import CommError


class SingleComm(Comm):
    transport = "single"
    rank = 0
    size = 1

    def __init__(self, timeout: float = 120.0) -> None:
        self.timeout = timeout

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        raise CommError(f"rank 0 of 1 cannot send to rank {to}: there are no other ranks")

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        raise CommError(f"rank 0 of 1 cannot receive from rank {source}: there are no other ranks")

    def allreduce(self, tensor: Tensor) -> None:
        self.check(tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self.check(tensor)

    def barrier(self) -> None:
        pass

    def group(self, ranks: list[int]) -> Comm:
        assert ranks == [0]
        return SingleComm(self.timeout)

    def abort(self, reason: str, code: int = 1) -> None:
        pass

    def close(self) -> None:
        pass
