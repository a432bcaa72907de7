"""Forks ranks from one process, the zygote, which has imported torch and all that ranks need: N ranks, one import.

    launcher ── arguments and variables of a rank ──► zygote ── fork ──► rank
             ◄── its pid and pidfd, then its exit code ──

The zygote forks only while it has a single thread. It keeps ended ranks as zombies until it exits, so that their pids
are not reused. If it dies, the kernel kills its ranks; if the launcher dies, it waits for the janitor to end them.

In a lab, the zygote is outside the nodes, and each rank joins its node after the fork. The launcher, on a node, has an
agent there in the zygote's place: they end together. Pids of the zygote's namespace mean nothing to the launcher and to
the janitor, so the zygote passes on signals, and ends its ranks if the launcher dies. It keeps no zombies: the first
process of a killed node would wait for them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from paceline.errors import EXIT_USAGE, UsageError
from paceline.lab.kernel import end_with_parent, enters_by_pidfd
from paceline.lab.spaces import NodeSpaces
from paceline.launch.signals import STOPPING
from paceline.messages import LOGGER, configure

REQUEST_BYTES = 1 << 16
# How long a rank's exit code may take to arrive once the kernel says that the rank has ended.
REPORT_SECONDS = 5.0
# After the launcher of a lab's zygote has died, ranks get this long to end on SIGTERM.
GRACE_SECONDS = 3.0


def available() -> bool:
    """Whether this kernel has what a zygote needs; otherwise each rank is started as a program."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return sys.platform == "linux"


def available_in_lab() -> bool:
    """Whether processes can join the namespaces of nodes; otherwise agents start ranks as programs."""
    return available() and enters_by_pidfd()


class ForkedRank:
    """A process that a zygote forks, with the part of subprocess.Popen's interface that supervision needs."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self.number: int | None = None  # its pid for the zygote, once it is forked
        self.pid: int | None = None  # the same, if the zygote's PID namespace is that of this process
        self.pidfd = -1
        self.returncode: int | None = None
        self.ended_at: float | None = None  # when the kernel first reported it as ended

    def poll(self) -> int | None:
        if self.returncode is None:
            self._zygote.read()
        return self.returncode

    def signal(self, number: int) -> None:
        """Send a signal to the rank and the processes that it has started; if it is not forked yet, nothing is sent."""
        if self.poll() is not None:
            return
        if self.pid is not None:
            os.killpg(self.pid, number)
        elif self.number is not None:
            self._zygote.request({"signal": number, "to": self.number})

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            self._zygote.wait_for_news(0.1)
        return code


class Zygote:
    """The launcher's side: requests ranks and receives their exit codes."""

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        out: int | None,
        on_fork: Callable[[int], None] = lambda pid: None,
        *,
        in_lab: bool = False,
    ) -> None:
        """`command` runs `main` below, or an agent that starts it outside the nodes of a lab."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                list(command),
                # NumPy's OpenBLAS would start threads on import.
                env=dict(variables) | {"OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
                stdin=theirs.fileno(),
                stdout=out,
            )
        self._control.setblocking(False)
        self._on_fork, self._in_lab = on_fork, in_lab
        self._asked: deque[ForkedRank] = deque()
        self._forked: dict[int, ForkedRank] = {}
        self.dead = False

    def fork(
        self, name: str, arguments: Sequence[str], variables: Mapping[str, str], node: str | None = None
    ) -> ForkedRank:
        """`name` is shown by ps and top; at most 15 characters. In a lab, `node` is where the rank runs."""
        rank = ForkedRank(self)
        self._asked.append(rank)
        asked = {"name": name, "arguments": list(arguments), "variables": dict(variables)}
        self.request(asked | ({"node": node, "folder": os.getcwd()} if node else {}))
        return rank

    def request(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode()
        assert len(data) <= REQUEST_BYTES
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the zygote is dead; `read` handles that
            self._control.send(data)

    def read(self) -> None:
        """Read the zygote's reports. If it has died, its ranks have been killed."""
        while not self.dead:
            try:
                message, files, _, _ = socket.recv_fds(self._control, REQUEST_BYTES, 1)
            except BlockingIOError:
                break
            except ConnectionResetError:
                message = b""
            if not message:
                self._end()
                return
            pid, code = json.loads(message)
            if code is None:
                rank = self._asked.popleft()
                rank.number, rank.pidfd = pid, files[0]
                self._forked[pid] = rank
                if not self._in_lab:
                    rank.pid = pid
                    self._on_fork(pid)
            else:
                self._set(self._forked.pop(pid), code)
        self._look()

    def _look(self) -> None:
        """Find ranks that ended although the zygote has not reported it, because it is stopped."""
        ended = select.select([rank.pidfd for rank in self._forked.values()], [], [], 0)[0] if self._forked else []
        for rank in [rank for rank in self._forked.values() if rank.pidfd in ended]:
            rank.ended_at = rank.ended_at or time.monotonic()
            if time.monotonic() - rank.ended_at > REPORT_SECONDS and rank.number is not None:
                self._set(self._forked.pop(rank.number), -signal.SIGKILL)

    def _set(self, rank: ForkedRank, code: int) -> None:
        rank.returncode = code
        if rank.pidfd >= 0:
            os.close(rank.pidfd)
            rank.pidfd = -1

    def _end(self) -> None:
        self.dead = True
        self._control.close()
        code = self.process.wait()
        for rank in [*self._asked, *self._forked.values()]:
            self._set(rank, code or -signal.SIGKILL)
        self._asked.clear()
        self._forked.clear()

    @property
    def control(self) -> int:
        """A descriptor that can be read when there is news."""
        return self._control.fileno()

    def wait_for_news(self, seconds: float) -> None:
        if not self.dead:
            select.select([self._control], [], [], seconds)

    def end(self) -> None:
        """Let the zygote reap its ranks, which have all ended: not every container has an init that would."""
        deadline = time.monotonic() + REPORT_SECONDS
        while self._forked and not self.dead and not self._asked and time.monotonic() < deadline:
            self.wait_for_news(0.1)
            self.read()
        if self._forked or self._asked:
            self.kill()
        elif not self.dead:
            self.dead = True
            self._control.close()
            try:
                self.process.wait(REPORT_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def kill(self) -> None:
        """Kill the zygote, and with it all its ranks."""
        self.process.kill()
        self.process.wait()
        while not self.dead:
            self.read()
            self.wait_for_news(0.1)


def main(modules: Sequence[str], function: str, nodes: NodeSpaces | None = None) -> NoReturn:
    """The zygote's side: import modules, then fork ranks that call a function of the first, until the launcher closes.

    Standard input is the socket. In a lab, `nodes` are where ranks run.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # ranks handle these; none may be lost during a fork
    control = _take_input()
    first, *_ = [importlib.import_module(module) for module in modules]
    run = getattr(first, function)
    gc.collect()
    gc.freeze()  # the collector then does not touch these objects, and their pages stay shared with ranks
    children: dict[int, int] = {}  # pidfd → pid
    asking, deadline = True, None
    while asking or children:
        left = max(0.0, deadline - time.monotonic()) if deadline else None
        ready = select.select([*children, *([control.fileno()] if asking else [])], [], [], left)[0]
        if control.fileno() in ready:
            try:
                request = control.recv(REQUEST_BYTES)
            except ConnectionResetError:  # the launcher was killed before it had read all reports
                request = b""
            asking = bool(request)  # empty: the launcher has closed its end
            message = json.loads(request) if request else {}
            if "signal" in message:
                _signal([message["to"]] if message["to"] in children.values() else [], message["signal"])
            elif message:
                pid, pidfd = _fork(run, message, [control.fileno(), *children], nodes)
                children[pidfd] = pid
                _report(control, pid, None, pidfd)
            elif nodes:  # no janitor can reach these ranks
                _signal(children.values(), signal.SIGTERM)
                deadline = time.monotonic() + GRACE_SECONDS
        if deadline and time.monotonic() >= deadline:
            _signal(children.values(), signal.SIGKILL)
            deadline = None
        for pidfd in [each for each in children if each in ready]:
            _report(control, children.pop(pidfd), _exit_code(pidfd, keep=nodes is None))
            os.close(pidfd)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)  # tearing the interpreter down takes a second with torch


def _take_input() -> socket.socket:
    """The socket that is standard input, which then is empty."""
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return control


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            try:
                os.killpg(pid, number)
            except ProcessLookupError:  # it has just been forked, and is not a group yet
                os.kill(pid, number)


def _fork(
    run: Callable[..., NoReturn], request: Mapping[str, Any], files: list[int], nodes: NodeSpaces | None
) -> tuple[int, int]:
    """A rank's pid and pidfd."""
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process with {len(threads)} threads cannot be forked safely"
    zygote = os.getpid()
    pid = nodes.fork(request["node"]) if nodes else os.fork()
    if pid == 0:
        _be_rank(run, request, files, nodes, zygote)
    return pid, os.pidfd_open(pid)


def _be_rank(
    run: Callable[..., NoReturn], request: Mapping[str, Any], files: list[int], nodes: NodeSpaces | None, zygote: int
) -> NoReturn:
    code = 1
    try:
        end_with_parent()
        if nodes or os.getppid() == zygote:  # otherwise the zygote died before that; `enter` has its own check
            os.setsid()
            for file in files:
                os.close(file)
            if nodes:
                nodes.enter(request["node"])
                os.chdir(request["folder"])
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
            Path("/proc/self/comm").write_text(request["name"])
            os.environ.update(request["variables"])
            run(*request["arguments"])
    except UsageError as error:
        code = EXIT_USAGE
        configure()
        LOGGER.error(error)
    except BaseException:  # noqa: BLE001  a rank must never continue as a second zygote
        traceback.print_exc()
    finally:
        os._exit(code)


def _exit_code(pidfd: int, *, keep: bool) -> int:
    found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | (os.WNOWAIT if keep else 0))
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _report(control: socket.socket, pid: int, code: int | None, *files: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the launcher is gone
        socket.send_fds(control, [json.dumps([pid, code]).encode()], files)
