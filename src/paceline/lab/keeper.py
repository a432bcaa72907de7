"""The keeper, outside a lab's namespaces: creates them, waits for their end, removes what the kernel does not remove.

    python -m paceline.lab.keeper [--detached]

reads a plan from standard input and writes the result to standard output, one line of JSON each. Unless detached, the
lab ends with the input. The keeper and the holder (the first process inside) watch each other: if one is killed, the
other one cleans up.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

from paceline.errors import PacelineError, UsageError
from paceline.lab import groups, kernel, wire
from paceline.lab.plan import LabPlan

WHY_NOT = (
    "a lab needs Linux namespaces, and this machine refuses them ({error}): run as root, or let users create them "
    "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, "
    "user.max_user_namespaces=10000; in a container: start it with --privileged)"
)


def isolate() -> None:
    """Create new namespaces; without root, inside a user namespace that maps only this user."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        if uid == 0:
            with contextlib.suppress(PermissionError):
                kernel.unshare(kernel.OWN_SPACES)
                return
        if uid == int(Path("/proc/sys/kernel/overflowuid").read_text()):
            # In a user namespace all unmapped users appear as this one, so they could control the lab.
            raise UsageError("the user nobody cannot create a lab, because every user could enter it: use another user")
        kernel.unshare(kernel.NEW_USER | kernel.OWN_SPACES)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    except OSError as error:
        raise UsageError(WHY_NOT.format(error=error.strerror)) from error


def _be_holder(plan: LabPlan, listener: socket.socket, keeper: socket.socket, pid: int, made: list[Path]) -> None:
    """Run the holder in the child, which never returns; what it has created ends with it."""
    try:
        from paceline.lab.holder import Holder

        signal.set_wakeup_fd(-1)
        kernel.mount("none", "/", flags=kernel.MS_RECURSIVE | kernel.MS_PRIVATE)
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV)
        holder = Holder(plan, listener, keeper, pid, made)
        holder.build()
        wire.say(keeper, {"ready": True, "flags": holder.flags})
        holder.serve()
    except PermissionError as error:
        wire.say(keeper, {"error": WHY_NOT.format(error=error.strerror), "usage": True})
    except Exception as error:  # noqa: BLE001  told to the keeper, whatever it is
        usage = isinstance(error, UsageError)
        text = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            wire.say(keeper, {"error": text, "usage": usage})
    finally:
        if made and os.getpid() == 1:  # of its own namespace: the groups can be removed when they are empty
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            groups.remove(made)
        os._exit(0)


def keep(plan: LabPlan, *, detached: bool) -> None:
    """Create the lab and keep it until its end."""
    try:
        listener = wire.listen(wire.name_of(plan.name))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise UsageError(
            f"a lab named {plan.name!r} is already up: `paceline lab down {plan.name}` ends it, or give this one "
            f"another name with --name"
        ) from None
    wake = _catch_signals(detached=detached)
    made = groups.make(plan)
    own, pid = os.getpid(), 0
    try:
        isolate()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            _be_holder(plan, listener, theirs, own, made)
        theirs.close()
        listener.close()
        if ours not in select.select([ours, sys.stdin, wake], [], [])[0]:
            return  # the parent has ended before the lab was up
        heard = wire.hear(ours)
        told = _tell(heard[0] if heard else {"error": "its first process has exited"})
        if told and heard and "ready" in heard[0]:
            # Wait until the holder ends or sends `down`, the parent ends, or a signal arrives.
            select.select([ours, wake, *([] if detached else [sys.stdin])], [], [])
    finally:
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        groups.remove(made)


def _tell(message: dict[str, object]) -> bool:
    """Write a line to the parent; false if it has ended."""
    try:
        os.write(1, f"{json.dumps(message)}\n".encode())
    except BrokenPipeError:
        return False
    return True


def _catch_signals(*, detached: bool) -> int:
    """A descriptor that becomes readable when a signal asks to end, so that cleaning up is never interrupted."""
    wake, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        # The parent ends the lab after its command; Ctrl-C is for the command.
        deaf = not detached and number != signal.SIGTERM
        signal.signal(number, signal.SIG_IGN if deaf else lambda *_: None)
    return wake


def main() -> None:
    detached = "--detached" in sys.argv[1:]
    given = sys.stdin.readline()
    if not given:
        return  # the parent has ended
    plan = LabPlan.from_json(given)
    try:
        keep(plan, detached=detached)
    except PacelineError as error:
        _tell({"error": str(error), "usage": isinstance(error, UsageError)})
    except Exception as error:  # noqa: BLE001  told to whoever started this
        _tell({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
