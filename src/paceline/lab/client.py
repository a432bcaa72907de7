"""The client of labs: starts one, finds one, sends requests, runs commands on nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UsageError
from paceline.lab import wire
from paceline.lab.node import PRIVATE
from paceline.lab.plan import LAB, LabPlan
from paceline.messages import LOGGER

START_SECONDS = 60.0
ANSWER_SECONDS = 30.0
# Prefix of the names of labs that `lab run` creates; such a lab is used by others only if they name it.
FOR_A_COMMAND = "run-"
LAB_NAME = re.compile(r"[a-z][a-z0-9-]*")
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
             signal.SIGWINCH)  # fmt: skip


def check_here(plan: LabPlan) -> None:
    """Raise UsageError if a lab cannot work on this machine, or in this folder."""
    if sys.platform != "linux":
        raise UsageError("a lab needs Linux namespaces, and this is not Linux: use a Linux machine or a VM")
    here = os.path.realpath(working_folder())
    if here in PRIVATE:
        raise UsageError(f"{here} is private to every node of a lab, and files there are lost: use another folder")
    for path in plan.shared:
        if not os.path.isdir(path):
            raise UsageError(f"share: {path!r} is not a folder on this machine")
        if os.path.realpath(path) in PRIVATE:
            raise UsageError(f"share: {path} is private to every node of a lab; share a folder in it")


def working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working folder has been removed: change to another") from None


def start(plan: LabPlan, *, detached: bool) -> subprocess.Popen[str]:
    """Create a lab; return its keeper when all nodes are up. Unless detached, the lab ends with this process."""
    check_here(plan)
    shared = (*plan.shared, *_needed_folders())
    plan = replace(plan, shared=tuple(dict.fromkeys(shared)))
    command = [sys.executable, "-P", "-m", "paceline.lab.keeper", *(["--detached"] if detached else [])]
    keeper = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if detached else None,
        start_new_session=True,
        text=True,
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # the keeper has ended, which is handled below
            keeper.stdin.write(plan.to_json() + "\n")
            keeper.stdin.flush()
        ready, _, _ = select.select([keeper.stdout], [], [], START_SECONDS)
        line = keeper.stdout.readline() if ready else ""
    except BaseException:  # Ctrl-C: do not leave a lab that is still starting
        stop(keeper)
        raise
    why = "its keeper has exited" if ready else f"it did not start within {START_SECONDS:g} s"
    answer = json.loads(line) if line else {"error": why}
    if "ready" not in answer:
        stop(keeper)
        raise (UsageError if answer.get("usage") else PacelineError)(f"lab {plan.name}: {answer['error']}")
    for flag in answer["flags"]:
        LOGGER.warning("lab %s: %s", plan.name, flag)
    return keeper


def _needed_folders() -> list[str]:
    """Folders that nodes must see as this process does: the working folder, the program, the data."""
    program = Path(__file__).resolve().parents[2]
    found = [working_folder(), sys.prefix, sys.base_prefix, str(program), os.environ.get("PACELINE_CACHE", "")]
    home = os.path.expanduser("~")
    return [path for path in (*found, home) if path and os.path.isdir(path) and os.path.realpath(path) not in PRIVATE]


def stop(keeper: subprocess.Popen[str]) -> None:
    """End a lab that this process has started, and wait until it is removed."""
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        keeper.stdin.close()
    keeper.terminate()
    try:
        keeper.wait(ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        keeper.kill()  # the holder notices, and exits
        keeper.wait()
    keeper.stdout.close()


def names() -> list[str]:
    """The labs of this user that are up."""
    prefix = wire.name_of("").replace("\0", "@")
    # Other users may have sockets of any name.
    text = Path("/proc/net/unix").read_bytes().decode(errors="replace") if sys.platform == "linux" else ""
    found = {
        path.removeprefix(prefix) for line in text.split("\n")[1:] if (path := line.split(" ")[-1]).startswith(prefix)
    }
    return sorted(name for name in found if LAB_NAME.fullmatch(name) and _is_ours(name))


def _is_ours(name: str) -> bool:
    with wire.make_socket() as connection:
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # it is busy
            try:
                connection.connect(wire.name_of(name))
            except BlockingIOError:
                raise
            except OSError:
                return False
            return wire.is_own(connection)
        return True


def connect(lab: str | None) -> socket.socket:
    """Connect to a lab by its name; by default to the only one, or, on a node, to its own lab."""
    inside = is_around(lab)
    if lab is None and not inside:
        lab = only(names())
    connection = wire.make_socket()
    connection.settimeout(ANSWER_SECONDS)
    try:
        connection.connect(wire.IN_NODE if inside else wire.name_of(lab or ""))
    except OSError:
        connection.close()
        up = ", ".join(names()) or "none"
        raise UsageError(f"no lab named {lab!r} is up (up: {up}); `paceline lab up 1gbit:3` starts one") from None
    if not wire.is_own(connection):
        connection.close()
        raise UsageError(f"the lab {lab!r} belongs to another user")
    return connection


def only(found: list[str]) -> str:
    """The lab to use if none is named: the only one that was not created by `lab run`, or else the only one."""
    kept = [name for name in found if not name.startswith(FOR_A_COMMAND)] or found
    if len(kept) != 1:
        what = f"{len(kept)} labs are up ({', '.join(kept)}): name one" if kept else "no lab is up"
        raise UsageError(f"{what}; `paceline lab up 1gbit:3` starts one")
    return kept[0]


def is_around(lab: str | None) -> bool:
    """Whether this process is on a node of that lab. (A node may have other labs, created there.)"""
    if LAB not in os.environ:
        return False
    return lab is None or (lab == json.loads(os.environ[LAB])["name"] and lab not in names())


def ask(lab: str | None, do: str, **values: Any) -> dict[str, Any]:
    """Send one request; return the answer."""
    with connect(lab) as connection:
        _request(connection, {"do": do, **values})
        try:
            heard = wire.hear(connection)
        except TimeoutError:
            raise PacelineError(f"the lab has not answered for {ANSWER_SECONDS:g} s") from None
    return _checked(heard[0] if heard else {})


def _request(connection: socket.socket, message: dict[str, Any], files: tuple[int, ...] = ()) -> None:
    try:
        wire.say(connection, message, files)
    except (BrokenPipeError, ConnectionResetError):
        raise PacelineError("the lab has ended") from None


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise (UsageError if answer.get("usage") else PacelineError)(answer["error"])
    return answer


def down(lab: str | None) -> None:
    """End a lab; return when it is removed."""
    if is_around(lab):
        raise UsageError("a lab cannot be ended from one of its nodes: leave the node first")
    lab = lab or only([name for name in names() if not name.startswith(FOR_A_COMMAND)])
    keeper = ask(lab, "status")["keeper"]
    try:
        ended = os.pidfd_open(keeper)
    except ProcessLookupError:
        return
    try:
        ask(lab, "down")
        if not select.select([ended], [], [], ANSWER_SECONDS)[0]:
            raise PacelineError(f"the lab has not ended for {ANSWER_SECONDS:g} s; its keeper is process {keeper}")
    finally:
        os.close(ended)


@dataclass
class Command:
    """A command that runs on a node, and the connection that reports its end."""

    node: str  # empty outside the nodes
    connection: socket.socket
    exit_code: int | None = None

    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            wire.say(self.connection, {"signal": number})

    def hear(self) -> None:
        """Read the exit code, negative for a signal, as in subprocess."""
        heard = wire.hear(self.connection)
        self.exit_code = int(_checked(heard[0])["exit"]) if heard else -signal.SIGKILL
        self.connection.close()


def begin(
    lab: str | None,
    node: str | None,
    words: list[str],
    files: tuple[int, int, int] = (0, 1, 2),
    environment: Mapping[str, str] = os.environ,
    *,
    tty: bool = False,
) -> Command:
    """Start a command on a node, with this process's working folder and environment, and with these open files.

    Without a node, it runs in the lab and outside its nodes: a last argument is added, see `NodeSpaces`.
    """
    folder, connection = working_folder(), connect(lab)
    message = {"do": "exec", "node": node, "argv": words, "cwd": folder, "env": dict(environment), "tty": tty}
    _request(connection, message, files)
    connection.settimeout(None)
    return Command(node or "", connection)


def wait(commands: list[Command], timers: list[tuple[float, Callable[[], None]]] | None = None) -> None:
    """Wait until all have ended; pass signals on to them. A timer's action runs at its time."""
    todo = sorted(timers or [], key=lambda timer: timer[0])
    begun = time.monotonic()
    with passing_on(commands) as wake:
        while running := [command for command in commands if command.exit_code is None]:
            left = max(0.0, begun + todo[0][0] - time.monotonic()) if todo else None
            sources = [wake, *(command.connection.fileno() for command in running)]
            ready, _, _ = select.select(sources, [], [], left)
            if wake in ready:
                for number in os.read(wake, 64):
                    for command in running:
                        command.signal(number)
            for command in running:
                if command.connection.fileno() in ready:
                    command.hear()
            while todo and todo[0][0] <= time.monotonic() - begun:
                todo.pop(0)[1]()


@contextlib.contextmanager
def passing_on(commands: list[Command]) -> Iterator[int]:
    """Catch signals while commands run; their numbers can be read from the descriptor."""
    wake, write = os.pipe()
    os.set_blocking(write, False)
    old_wake = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    # As in stopping(): SIGHUP only if it is not ignored, as under nohup.
    deaf = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    old = {number: signal.signal(number, lambda *_: None) for number in PASSED_ON if number not in deaf}
    try:
        yield wake
    finally:
        signal.set_wakeup_fd(old_wake)
        for number, handler in old.items():
            signal.signal(number, handler)
        os.close(wake)
        os.close(write)
        for command in commands:
            command.connection.close()


def finish_like(exit_code: int) -> int:
    """The exit code for a shell: 128 plus the signal if the command was killed."""
    return 128 - exit_code if exit_code < 0 else exit_code
