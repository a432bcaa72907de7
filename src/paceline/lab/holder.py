"""The holder, the first process of a lab's namespaces: it creates nodes and serves requests; the lab ends with it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UsageError
from paceline.lab import groups, kernel, links, wire
from paceline.lab.capacity import flags, pair_capacity
from paceline.lab.commands import Commands, start_command
from paceline.lab.node import Init, furnish
from paceline.lab.plan import Fault, LabPlan, Node, check_fault
from paceline.lab.spaces import NodeSpaces

# A node's first process answers at once; if it was stopped, the lab must not wait for it.
NODE_SECONDS = 20.0


class Holder:
    def __init__(self, plan: LabPlan, listener: socket.socket, keeper: socket.socket, keeper_pid: int,
                 made: list[Path]) -> None:  # fmt: skip
        self.plan, self.keeper, self.keeper_pid, self.groups = plan, keeper, keeper_pid, made
        self.selector = selectors.DefaultSelector()
        self.switches = links.Switches(plan)
        self.pids: dict[str, int] = {}
        self.first: dict[str, int] = {}  # pidfds of the nodes' first processes, if this kernel can join them
        self.channels: dict[str, socket.socket] = {}
        self.flags: list[str] = []
        self.rates = {node.name: (node.up, node.down) for node in plan.nodes}
        self.states = {node.name: "up" for node in plan.nodes}
        self.cut: set[str] = set()
        self.ended = False
        self._watch(listener, self._accept)
        self._watch(keeper, self._end)

    def _watch(self, source: socket.socket, callback: Callable[[socket.socket], None]) -> None:
        self.selector.register(source, selectors.EVENT_READ, callback)

    def build(self) -> None:
        """Create all nodes, measure the machine's speed, then create the links, whose counters thus start at zero."""
        for node in self.plan.nodes:
            self._add(node)
        self.flags = flags(self.plan, self._capacity() if len(self.plan.nodes) > 1 else None)
        for number, node in enumerate(self.plan.nodes):
            self._connect(number, node)
            self._set_rates(node.name, node.up, node.down)

    def _connect(self, number: int, node: Node) -> None:
        self.switches.connect(number, node, self.pids[node.name])
        links.inside(self.pids[node.name], lambda: links.join(node, self.plan.mtu))

    def _set_rates(self, name: str, up: int, down: int) -> None:
        self.switches.set_down(name, down)
        links.inside(self.pids[name], lambda: links.set_up(up, self.plan.mtu))

    def _capacity(self) -> float:
        """Measure bits per second from one node to another, over links that are then removed. Both nodes are in one
        rack meanwhile, because links between racks have a limit already.
        """
        pair = [replace(node, rack=self.plan.nodes[0].rack) for node in self.plan.nodes[:2]]
        for number, node in enumerate(pair):
            self._connect(number, node)
        first, second = (self.pids[node.name] for node in pair)
        found = pair_capacity(
            lambda work: links.inside(first, work), lambda work: links.inside(second, work), pair[1].address
        )
        for node in pair:
            self.switches.disconnect(node)
        return found

    def _add(self, node: Node) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(NODE_SECONDS)
        between = os.fork()
        if between == 0:
            _be_node(self.plan, node, theirs)
        theirs.close()
        os.waitpid(between, 0)
        pid = (self._answer(ours, node) | self._answer(ours, node))["pid"]  # pid and set-up, in any order
        groups.enter(self.groups, node.name, pid)
        self.pids[node.name], self.channels[node.name] = pid, ours
        if kernel.enters_by_pidfd():
            self.first[node.name] = os.pidfd_open(pid)
        self._watch(ours, lambda _: self._lost(node.name))
        self._watch(links.inside(pid, lambda: wire.listen(wire.IN_NODE)), self._accept)

    def _answer(self, channel: socket.socket, node: Node) -> dict[str, Any]:
        try:
            heard = wire.hear(channel)
        except TimeoutError:
            raise PacelineError(f"node {node.name} has not answered for {NODE_SECONDS:g} s") from None
        if heard is None or "error" in heard[0]:
            raise PacelineError(f"node {node.name}: {heard[0]['error'] if heard else 'its first process has exited'}")
        return heard[0]

    def serve(self) -> None:
        """Serve until a request `down` arrives, or the keeper has ended."""
        self.commands = Commands(self.selector, self._start)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while not self.ended:
            for key, _ in self.selector.select():
                key.data(key.fileobj)

    def _end(self, keeper: socket.socket) -> None:
        self.ended = True

    def _lost(self, name: str) -> None:
        """A node's first process has been killed, and with it all processes of the node."""
        channel = self.channels.pop(name, None)
        if channel:
            self.selector.unregister(channel)
            channel.close()
            self.states[name] = "killed"

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        if wire.is_own(connection):
            self._watch(connection, self._request)
        else:
            connection.close()

    def _request(self, connection: socket.socket) -> None:
        """Handle the one request of a connection."""
        self.selector.unregister(connection)
        heard = wire.hear(connection)
        files = heard[1] if heard else []
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            try:
                if heard:
                    answer = self._answer_to(heard[0], connection, files)
                    if answer is not None:
                        wire.say(connection, answer)
            except Exception as error:  # noqa: BLE001  a request that fails does not end the lab
                wire.say(connection, {"error": str(error), "usage": isinstance(error, UsageError)})
        for file in files:
            os.close(file)
        connection.close()

    def _answer_to(self, message: dict[str, Any], connection: socket.socket, files: list[int]) -> dict[str, Any] | None:
        do = message.get("do")
        if do == "exec" and message["node"] is None:
            client = socket.socket(fileno=os.dup(connection.fileno()))
            self.commands.start(message, client, files)
            return None
        if do == "exec":
            node = self.plan.node(message["node"])
            wire.say(self._channel(node.name), message | {"flags": self.flags}, (connection.fileno(), *files))
            return None
        if do == "status":
            now = tuple(
                replace(node, up=up, down=down) for node in self.plan.nodes for up, down in [self.rates[node.name]]
            )
            plan = replace(self.plan, nodes=now)
            return {"plan": plan.to_json(), "states": self.states, "keeper": self.keeper_pid, "flags": self.flags}
        if do == "down":
            wire.say(self.keeper, {"do": "down"})
            return None
        fault = check_fault(Fault(0.0, str(do), str(message.get("node")), message.get("up"), message.get("down")),
                            self.plan, f"lab {do}")  # fmt: skip
        self._break(fault)
        return {}

    def _start(self, message: dict[str, Any], files: list[int]) -> int:
        """Start a program outside the nodes; its last argument says how it can start processes on them."""
        spaces = NodeSpaces({name: self.first[name] for name in self.channels}, tuple(self.groups))
        folder = message["cwd"] if os.path.isdir(message["cwd"]) else "/"
        changed = message | {"argv": [*message["argv"], spaces.to_json()], "cwd": folder}
        return start_command(changed, files, "outside the nodes", message["env"], spaces.hand_down)

    def _channel(self, name: str) -> socket.socket:
        if name not in self.channels:
            raise UsageError(f"node {name} has been killed; `paceline lab down` and `up` create a new one")
        return self.channels[name]

    def _break(self, fault: Fault) -> None:
        name, channel = fault.node, self._channel(fault.node)
        if fault.do in ("cut", "heal", "slow"):
            up, down = self.rates[name]
            self.rates[name] = fault.up or up, fault.down or down
            self.cut = self.cut - {name} if fault.do == "heal" else self.cut | ({name} if fault.do == "cut" else set())
            self._set_rates(name, *((0, 0) if name in self.cut else self.rates[name]))
        elif fault.do == "kill":
            os.kill(self.pids[name], signal.SIGKILL)
        else:
            wire.say(channel, {"do": fault.do})
        self.states[name] = {"stop": "stopped"}.get(fault.do, "cut off" if name in self.cut else "up")


def _be_node(plan: LabPlan, node: Node, channel: socket.socket) -> None:
    """An intermediate process: it creates the namespaces, whose first process is its child, and exits."""
    try:
        kernel.unshare(kernel.OWN_SPACES)
        pid = os.fork()
        if pid:
            wire.say(channel, {"pid": pid})
            os._exit(0)
        _close_all_but(channel)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        furnish(plan, node)
        wire.say(channel, {"furnished": node.name})
        Init(plan, node, channel).serve()
    except Exception as error:  # noqa: BLE001  told to the holder, whatever it is
        wire.say(channel, {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(1)


def _close_all_but(channel: socket.socket) -> None:
    """Close other nodes' channels here, so that they end with the holder."""
    kept = {0, 1, 2, channel.fileno()}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
