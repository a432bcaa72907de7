"""A rank's place, as given by its launcher; no torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Seat:
    """This process's place among the ranks, and how the ranks rendezvous: at an address, or in a file."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    address: tuple[str, int] | None = None
    hosts_store: bool = False
    store_file: str | None = None
    attempt: int = 0  # counts restarts of all ranks by a launcher; addresses of earlier attempts are invalid
    sockets: str | None = None  # the private folder, if all ranks are on one node
    lives: int = 0  # how often Paceline's launcher has restarted this rank
    interface: str | None = None
    servers: tuple[str, ...] = ()  # their addresses, if Paceline's launcher has chosen them
    secret: str | None = field(default=None, repr=False)
    speed: float = 1.0  # of the node's emulated device
    noise: float = 0.0  # of the node's emulated device
    in_lab: bool = False

    @property
    def one_node(self) -> bool:
        return self.local_size == self.size
