"""The lab's network, with netlink: veth pairs, bridges, and token buckets that limit the speed of every link."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute

from paceline.lab import kernel
from paceline.lab.plan import LEAST_RATE, LabPlan, Node, burst_bytes

INSIDE = "eth0"
PREFIX = 24
# TCP congestion control of all nodes, independent of the machine's own. Only the second is always available.
CONGESTION = ("cubic", "reno")


def queue_bytes(rate: int, mtu: int) -> int:
    """Bytes that a link queues before it drops: 50 ms, as on a switch port, within limits."""
    return round(burst_bytes(rate, mtu) + max(64 * 1024, min(rate / 8 * 0.05, 2**20)))


def shape(ip: Any, index: int, rate: int, mtu: int) -> None:
    """Limit an interface to this many bits per second, Ethernet headers included.

    At 0, every frame is dropped, because not even one fits into the queue; the link silently stays up.
    """
    limit, rate = (queue_bytes(rate, mtu), rate) if rate else (1, LEAST_RATE)
    ip.tc("replace", "tbf", index, rate=round(rate / 8), burst=burst_bytes(rate, mtu), limit=limit)


def join(node: Node, mtu: int) -> None:
    """Set the node's address and its loopback; runs in the node's namespace."""
    for congestion in CONGESTION:
        with contextlib.suppress(OSError):
            Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(congestion)
            break
    kernel.send_single_packets(INSIDE)
    with IPRoute() as ip:
        index = ip.link_lookup(ifname=INSIDE)[0]
        ip.link("set", index=ip.link_lookup(ifname="lo")[0], state="up")
        ip.addr("add", index=index, address=node.address, prefixlen=PREFIX)
        ip.link("set", index=index, mtu=mtu, state="up")


def set_up(rate: int, mtu: int) -> None:
    """Set the node's speed towards the switch; runs in the node's namespace."""
    with IPRoute() as ip:
        shape(ip, ip.link_lookup(ifname=INSIDE)[0], rate, mtu)


def counters() -> dict[str, int]:
    """The kernel's counters of this node's interface: bytes, packets, errors, drops."""
    with IPRoute() as ip:
        index = ip.link_lookup(ifname=INSIDE)[0]
        return dict(ip.get_links(index)[0].get_attr("IFLA_STATS64"))


class Switches:
    """The lab's switches, in their own namespace: one bridge, or one for each rack and one between them."""

    def __init__(self, plan: LabPlan) -> None:
        self.plan = plan
        self._ip: Any = IPRoute()
        self._ports: dict[str, int] = {}
        self._ip.link("set", index=self._index("lo"), state="up")
        core = self._bridge("core")
        self._bridges = [core]
        if plan.racks:
            self._bridges = [self._bridge(f"rack{i}") for i in range(len(plan.racks))]
            for i, rack in enumerate(plan.racks):
                self._pair(f"up{i}", {"ifname": f"down{i}"})
                self._plug(f"up{i}", self._bridges[i], rack.up)
                self._plug(f"down{i}", core, rack.down)

    def _index(self, name: str) -> int:
        return int(self._ip.link_lookup(ifname=name)[0])

    def _bridge(self, name: str) -> int:
        # No spanning tree, no multicast snooping: frames are forwarded from the first one on.
        self._ip.link("add", ifname=name, kind="bridge", br_stp_state=0, br_mcast_snooping=0)
        index = self._index(name)
        self._ip.link("set", index=index, mtu=self.plan.mtu, state="up")
        return index

    def _pair(self, name: str, peer: dict[str, Any]) -> None:
        self._ip.link("add", ifname=name, kind="veth", peer=peer)

    def _plug(self, name: str, bridge: int, rate: int) -> int:
        kernel.send_single_packets(name)
        index = self._index(name)
        self._ip.link("set", index=index, mtu=self.plan.mtu, master=bridge, state="up")
        if rate:
            shape(self._ip, index, rate, self.plan.mtu)
        return index

    def connect(self, number: int, node: Node, pid: int) -> None:
        """Connect the node's namespace, where the interface is eth0, to its switch, without a limit."""
        name = f"port{number}"
        self._pair(name, {"ifname": INSIDE, "net_ns_pid": pid})
        self._ports[node.name] = self._plug(name, self._bridges[node.rack], 0)

    def disconnect(self, node: Node) -> None:
        """Remove the link; the node then has no eth0 either."""
        self._ip.link("del", index=self._ports.pop(node.name))

    def set_down(self, node: str, rate: int) -> None:
        """Set a node's speed from the switch."""
        shape(self._ip, self._ports[node], rate, self.plan.mtu)


def inside(pid: int, work: Callable[[], Any]) -> Any:
    """Call a function in the network namespace of a process."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        kernel.enter(there)
        return work()
    finally:
        kernel.enter(here)
        os.close(here)
        os.close(there)
