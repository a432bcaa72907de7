"""Starts processes on nodes from a process in the lab that is outside of them, by joining the nodes' namespaces."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError
from paceline.lab import groups, kernel
from paceline.lab.plan import LAB

# A process joins these itself; its PID namespace is that of its parent's choice when it is forked.
JOINED = kernel.OWN_SPACES & ~kernel.NEW_PIDS


@dataclass(frozen=True)
class NodeSpaces:
    """The nodes of a lab: a pidfd of the first process of each, and the control groups of those with limits."""

    first: Mapping[str, int]
    groups: tuple[Path, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> NodeSpaces:
        values = json.loads(text)
        return cls(values["first"], tuple(map(Path, values["groups"])))

    def to_json(self) -> str:
        return json.dumps({"first": dict(self.first), "groups": list(map(str, self.groups))})

    def hand_down(self) -> None:
        """Let the next program of this process use what is described here."""
        kernel.keep_capabilities()
        for descriptor in self.first.values():
            os.set_inheritable(descriptor, True)

    def fork(self, node: str) -> int:
        """Fork a process into the PID namespace of the node; it must then call `enter`.

        If the node has been killed, the process stays in that of its parent, and `enter` refuses it.
        """
        try:
            kernel.enter(self.first[node], kernel.NEW_PIDS)
        except (KeyError, ProcessLookupError):
            return os.fork()
        try:
            pid = os.fork()
        except OSError:  # the node has been killed since
            self._fork_here()
            return os.fork()
        if pid:
            self._fork_here()
        return pid

    def _fork_here(self) -> None:
        own = os.pidfd_open(os.getpid())
        kernel.enter(own, kernel.NEW_PIDS)
        os.close(own)

    def enter(self, node: str) -> None:
        """Join the node's control groups and its other namespaces; give up the capabilities to do so again."""
        try:
            if os.getppid():  # the parent can be seen, so it is in the same PID namespace
                raise ProcessLookupError
            groups.enter(list(self.groups), node, 0)
            kernel.enter(self.first[node], JOINED)
        except (KeyError, ProcessLookupError):
            raise UsageError(f"node {node} has been killed; `paceline lab down` and `up` create a new one") from None
        kernel.drop_capabilities()
        for descriptor in self.first.values():
            os.close(descriptor)
        os.environ[LAB] = json.dumps(json.loads(os.environ[LAB]) | {"node": node})
