"""How ranks find the parameter servers of their run, and the secret that they share."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import socket
from pathlib import Path

from paceline.comm.process_group import private_folder, store_of
from paceline.comm.seat import Seat
from paceline.errors import UsageError
from paceline.launch.cluster import Cluster, read_key, split_address
from paceline.server.roles import Meeting
from paceline.server.segments import path_beside
from paceline.server.sockets import Listener
from paceline.spec import RunSpec

# The longest path of a Unix socket.
LONGEST = 107


def meet(spec: RunSpec, seat: Seat, cluster: Cluster | None) -> tuple[Meeting, Listener | None]:
    """The servers' addresses; on a server, also its listener, which is open when this returns."""
    if cluster is None and seat.servers:
        assert seat.secret is not None
        secret = bytes.fromhex(seat.secret)
        key = secret if spec.encrypt else None
        meeting = Meeting(seat.servers, _number(secret), "curve" if key else "plain", key)
    elif cluster is None and not seat.one_node:
        return _meet_at_store(spec, seat)
    elif cluster is None:
        meeting = _meet_in_folder(spec.servers, seat)
    else:
        meeting = _meet_at_addresses(cluster, encrypt=spec.encrypt)
    if seat.rank >= spec.servers:
        return meeting, None
    try:
        return meeting, Listener(meeting.endpoints[seat.rank], meeting.secret)
    except UsageError as error:
        if cluster is None:
            raise
        address = cluster.ps[seat.rank]
        raise UsageError(f"{cluster.path} line {cluster.line_of(address)}: {error}") from error


def _meet_in_folder(servers: int, seat: Seat) -> Meeting:
    """On one machine: Unix sockets in a folder that only this user can enter."""
    assert seat.sockets is not None
    private_folder(Path(seat.sockets))
    paths = [f"{seat.sockets}/ps{i}" for i in range(servers)]
    endpoints = tuple(f"ipc://{path}" for path in paths)
    longest = path_beside(endpoints[-1]) or paths[-1]
    if len(longest.encode()) > LONGEST:
        raise UsageError(f"the socket path {longest} is longer than {LONGEST} bytes: set TMPDIR to a shorter path")
    return Meeting(endpoints, _number(seat.sockets.encode()), "ipc")


def _meet_at_addresses(cluster: Cluster, *, encrypt: bool) -> Meeting:
    secret = read_key(cluster) if encrypt else None
    endpoints = tuple(_endpoint(cluster, address) for address in cluster.ps)
    run = _number(secret or repr((cluster.worker, cluster.ps)).encode())
    return Meeting(endpoints, run, "curve" if secret else "plain", secret)


def _endpoint(cluster: Cluster, address: str) -> str:
    """The endpoint with a numeric address, because ZeroMQ cannot bind to a host name."""
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        line = cluster.line_of(address)
        raise UsageError(f"{cluster.path} line {line}: the host of {address} is not known: {error.strerror}") from error
    return f"tcp://[{found}]:{port}" if ":" in str(found) else f"tcp://{found}:{port}"


def _meet_at_store(spec: RunSpec, seat: Seat) -> tuple[Meeting, Listener | None]:
    """On several nodes: servers publish their addresses, and rank 0 the secret, in the launcher's store."""
    store, prefix = store_of(seat, spec.timeout), f"paceline/{seat.attempt}"
    if seat.rank == 0:
        store.set(f"{prefix}/secret", secrets.token_hex(32))
    secret = bytes.fromhex(store.get(f"{prefix}/secret").decode())
    key = secret if spec.encrypt else None
    listener = None
    if seat.rank < spec.servers:
        assert seat.address is not None, "checked when the store was opened"
        listener = Listener(f"tcp://{own_address(seat.address)}:*", key)
        store.set(f"{prefix}/server_{seat.rank}", listener.endpoint)
    endpoints = tuple(store.get(f"{prefix}/server_{i}").decode() for i in range(spec.servers))
    return Meeting(endpoints, _number(secret), "curve" if key else "plain", key, store), listener


def own_address(towards: tuple[str, int]) -> str:
    """The local address of the route to another machine; nothing is sent."""
    family, kind, _, _, place = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        found = str(probe.getsockname()[0])
    if ipaddress.ip_address(found).is_loopback and not _is_loopback(towards[0]):
        raise UsageError(
            f"the rendezvous host {towards[0]} resolves to {found} on its own machine, and other machines cannot "
            f"connect to a server there: set MASTER_ADDR to the machine's address on the network"
        )
    return f"[{found}]" if ":" in found else found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _number(text: bytes) -> int:
    """The number of a run: 63 bits from which the text cannot be recovered."""
    return int.from_bytes(hashlib.sha256(b"run " + text).digest()[:8], "little") >> 1


def accepts_connections(endpoint: str) -> bool:
    """Whether a program listens there."""
    host, port = split_address(endpoint.removeprefix("tcp://"))
    try:
        socket.create_connection((host, port), 2).close()
    except OSError:
        return False
    return True
