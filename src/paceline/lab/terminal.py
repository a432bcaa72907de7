"""Runs a command on a node in the user's terminal, with job control, colours and the window's size."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import sys
import termios
import tty

from paceline.lab import client


def run_in_terminal(lab: str | None, node: str, words: list[str]) -> int:
    """Run a command in its own pseudo-terminal, whose input and output are passed on; return its exit code."""
    ours, theirs = pty.openpty()
    command = client.begin(lab, node, words, (theirs, theirs, theirs), tty=True)
    os.close(theirs)
    before = termios.tcgetattr(0)

    def resize(*_: object) -> None:
        fcntl.ioctl(ours, termios.TIOCSWINSZ, fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))

    resize()
    old = signal.signal(signal.SIGWINCH, resize)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # exit only after restoring the terminal
    tty.setraw(0)
    try:
        _pass_on(ours, command)
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
        signal.signal(signal.SIGWINCH, old)
        os.close(ours)
    return -signal.SIGHUP if command.exit_code is None else command.exit_code


def _pass_on(terminal: int, command: client.Command) -> None:
    while command.exit_code is None:
        ready, _, _ = select.select([0, terminal, command.connection.fileno()], [], [])
        if terminal in ready:
            _copy(terminal, sys.stdout.fileno())
        if 0 in ready and not _copy(0, terminal):
            return
        if command.connection.fileno() in ready:
            command.hear()
    while select.select([terminal], [], [], 0)[0] and _copy(terminal, sys.stdout.fileno()):
        pass


def _copy(source: int, target: int) -> bool:
    """Copy some bytes; false at the end. (Linux returns EIO when no process has the terminal open.)"""
    try:
        data = os.read(source, 65536)
    except OSError:
        return False
    while data:
        data = data[os.write(target, data) :]
        if not data:
            return True
    return False
