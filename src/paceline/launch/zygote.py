"""Forks ranks from one process, the zygote, which has imported torch and all that ranks need: N ranks, one import.

    launcher ── arguments and variables of a rank ──► zygote ── fork ──► rank
             ◄── its pid and pidfd, then its exit code ──

The zygote forks only while it has a single thread. It keeps ended ranks as zombies until it exits, so that their pids
are not reused. If it dies, the kernel kills its ranks; if the launcher dies, it waits for the janitor to end them.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from paceline.launch.signals import STOPPING

REQUEST_BYTES = 1 << 16
# How long a rank's exit code may take to arrive once the kernel says that the rank has ended.
REPORT_SECONDS = 5.0
PR_SET_PDEATHSIG = 1


def available() -> bool:
    """Whether this kernel has what a zygote needs; otherwise each rank is started as a program."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return sys.platform == "linux"


class ForkedRank:
    """A process that a zygote forks, with the part of subprocess.Popen's interface that supervision needs."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self.pid: int | None = None  # until the zygote has forked it
        self.pidfd = -1
        self.returncode: int | None = None
        self.ended_at: float | None = None  # when the kernel first reported it as ended

    def poll(self) -> int | None:
        if self.returncode is None:
            self._zygote.read()
        return self.returncode

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
    ) -> None:
        """`command` runs `main` below; the file descriptor of a socket is appended to it."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                # NumPy's OpenBLAS would start threads on import.
                env=dict(variables) | {"OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=out,
            )
        self._control.setblocking(False)
        self._on_fork = on_fork
        self._asked: deque[ForkedRank] = deque()
        self._forked: dict[int, ForkedRank] = {}
        self.dead = False

    def fork(self, name: str, arguments: Sequence[str], variables: Mapping[str, str]) -> ForkedRank:
        """`name` is shown by ps and top; at most 15 characters."""
        rank = ForkedRank(self)
        self._asked.append(rank)
        request = json.dumps({"name": name, "arguments": list(arguments), "variables": dict(variables)}).encode()
        assert len(request) <= REQUEST_BYTES
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the zygote is dead; `read` handles that
            self._control.send(request)
        return rank

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
                rank.pid, rank.pidfd = pid, files[0]
                self._forked[pid] = rank
                self._on_fork(pid)
            else:
                self._set(self._forked.pop(pid), code)
        self._look()

    def _look(self) -> None:
        """Find ranks that ended although the zygote has not reported it, because it is stopped."""
        ended = select.select([rank.pidfd for rank in self._forked.values()], [], [], 0)[0] if self._forked else []
        for rank in [rank for rank in self._forked.values() if rank.pidfd in ended]:
            rank.ended_at = rank.ended_at or time.monotonic()
            if time.monotonic() - rank.ended_at > REPORT_SECONDS and rank.pid is not None:
                self._set(self._forked.pop(rank.pid), -signal.SIGKILL)

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


def main(module: str, function: str, control_fd: int) -> None:
    """The zygote's side: import the module, then fork ranks that call its function, until the launcher closes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # ranks handle these; none may be lost during a fork
    control = socket.socket(fileno=control_fd)
    run = getattr(importlib.import_module(module), function)
    gc.collect()
    gc.freeze()  # the collector then does not touch these objects, and their pages stay shared with ranks
    children: dict[int, int] = {}  # pidfd → pid
    asking = True
    while asking or children:
        ready = select.select([*children, *([control.fileno()] if asking else [])], [], [])[0]
        if control.fileno() in ready:
            request = control.recv(REQUEST_BYTES)
            asking = bool(request)  # empty: the launcher has closed its end
            if request:
                pid, pidfd = _fork(run, json.loads(request), [control.fileno(), *children])
                children[pidfd] = pid
                _report(control, pid, None, pidfd)
        for pidfd in [each for each in children if each in ready]:
            _report(control, children.pop(pidfd), _exit_code(pidfd))
            os.close(pidfd)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _fork(run: Callable[..., NoReturn], request: Mapping[str, Any], files: list[int]) -> tuple[int, int]:
    """A rank's pid and pidfd."""
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process with {len(threads)} threads cannot be forked safely"
    zygote = os.getpid()
    pid = os.fork()
    if pid:
        return pid, os.pidfd_open(pid)
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == zygote:  # otherwise the zygote died before prctl
            os.setsid()
            for file in files:
                os.close(file)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
            Path("/proc/self/comm").write_text(request["name"])
            os.environ.update(request["variables"])
            run(*request["arguments"])
    except BaseException:  # noqa: BLE001  a rank must never continue as a second zygote
        traceback.print_exc()
    finally:
        os._exit(1)


def _exit_code(pidfd: int) -> int:
    found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _report(control: socket.socket, pid: int, code: int | None, *files: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the launcher is gone
        socket.send_fds(control, [json.dumps([pid, code]).encode()], files)
