"""Starts commands for clients of the lab, passes on their signals, and reports how the commands ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import termios
from collections.abc import Callable, Mapping
from typing import Any

from paceline.lab import wire

Start = Callable[[dict[str, Any], list[int]], int]


class Commands:
    """The commands that the first process of a PID namespace runs for clients. It also reaps orphans there.

    The callbacks of the selector's sources take the source.
    """

    def __init__(self, selector: selectors.BaseSelector, start: Start) -> None:
        """`start` returns the pid of a new process for a message and its open files."""
        self._selector, self._start = selector, start
        self._clients: dict[int, socket.socket] = {}  # by the process that runs for them
        self._wake, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector.register(self._wake, selectors.EVENT_READ, lambda _: self._reap())

    def start(self, message: dict[str, Any], client: socket.socket, files: list[int]) -> None:
        """Start a command; the client, which then belongs to it, gets its exit code, or the error."""
        try:
            pid = self._start(message, files)
        except (OSError, KeyError, TypeError) as error:
            with contextlib.suppress(OSError):
                wire.say(client, {"error": f"cannot start a process: {error}"})
            client.close()
            return
        self._clients[pid] = client
        self._selector.register(client, selectors.EVENT_READ, lambda _: self._listen_to(pid))

    def _listen_to(self, pid: int) -> None:
        """Pass on a client's signals; if the client has ended, kill its command."""
        client = self._clients.get(pid)
        if client is None:
            return  # its command has been reaped since the selector returned
        heard = wire.hear(client)
        number = signal.SIGKILL if heard is None else heard[0].get("signal")
        if number in signal.valid_signals():
            with contextlib.suppress(ProcessLookupError):
                try:
                    os.killpg(pid, number)
                except ProcessLookupError:  # it has just been started, and is not a group yet
                    os.kill(pid, number)
        if heard is None:
            self._forget(pid)

    def _forget(self, pid: int) -> None:
        client = self._clients.pop(pid)
        self._selector.unregister(client)
        client.close()

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._clients:
                    with contextlib.suppress(OSError):
                        wire.say(self._clients[pid], {"exit": os.waitstatus_to_exitcode(status)})
                    self._forget(pid)


def start_command(
    message: dict[str, Any],
    files: list[int],
    where: str,
    environment: Mapping[str, str],
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """Start the message's program with these standard files; return its pid. `prepare` is called before it."""
    # Signals are blocked until the command has its own handlers.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return pid
    try:
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
        if message.get("tty"):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.chdir(message["cwd"])
        prepare()
        words = message["argv"]
        os.execvpe(words[0], words, environment)
    except OSError as error:
        what = message["cwd"] if error.filename == message["cwd"] else message["argv"][0]
        os.write(2, f"paceline lab: {where}: {what}: {error.strerror}\n".encode())
    finally:
        os._exit(127)
