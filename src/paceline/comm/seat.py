"""What a launcher has told a rank; this file is read before torch is."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Seat:
    """This process's place among the ranks, and how the ranks can meet: at an address, or in a file."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    address: tuple[str, int] | None = None
    hosts_store: bool = False
    store_file: str | None = None
    attempt: int = 0  # a launcher that restarts its ranks counts; old ranks' addresses are of no use then
    sockets: str | None = None  # the private folder of ranks that are all on one node
    lives: int = 0  # how often our own launcher has started this rank before
    interface: str | None = None
    servers: tuple[str, ...] = ()  # where they listen, if our own launcher has chosen that, and their secret
    secret: str | None = field(default=None, repr=False)
    speed: float = 1.0  # of the node's emulated device
    in_lab: bool = False

    @property
    def one_node(self) -> bool:
        return self.local_size == self.size
