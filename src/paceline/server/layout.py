"""Which server has which part of the parameters, in which chunks; and the traffic of an update. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.collectives.plan import Cost
from paceline.layout import share

# A message has about this many bytes: one is added up while the next is in flight.
CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Layout:
    """How a flat vector of values is cut into chunks, and which server has which chunk.

    The first `trainable` values are parameters; the rest are buffers, such as batch-norm statistics.
    """

    length: int
    trainable: int
    servers: int
    itemsize: int
    chunk_bytes: int = CHUNK_BYTES

    @property
    def chunks(self) -> int:
        return max(self.servers, -(-self.length * self.itemsize // self.chunk_bytes))

    def span(self, chunk: int) -> range:
        return share(self.length, self.chunks, chunk)

    def of_server(self, server: int) -> range:
        """The chunks of a server; chunks have the same size, so servers get equal parts of the bytes."""
        return share(self.chunks, self.servers, server)

    def server_of(self, chunk: int) -> int:
        return next(s for s in range(self.servers) if chunk in self.of_server(s))

    def bytes_of_server(self, server: int) -> int:
        return sum(len(self.span(chunk)) for chunk in self.of_server(server)) * self.itemsize


def cost(workers: int, layout: Layout) -> Cost:
    """The traffic of one update by rank, servers first: each worker sends a gradient and receives the weights.

    A worker's traffic does not depend on the number of workers; a server's grows with it: a single server moves W times
    as many bytes as a worker. In a ring all ranks move the same, at most twice the gradient.
    """
    chunks = [len(layout.of_server(server)) * workers for server in range(layout.servers)]
    moved = [layout.bytes_of_server(server) * workers for server in range(layout.servers)]
    everything = [layout.length * layout.itemsize] * workers
    return Cost(
        bytes_sent=tuple(moved + everything),
        bytes_received=tuple(moved + everything),
        messages_sent=tuple(chunks + [layout.chunks] * workers),
    )
