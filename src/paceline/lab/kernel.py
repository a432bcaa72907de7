"""Linux system calls that the lab needs and Python's standard library lacks."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct

NEW_MOUNT, NEW_HOSTNAME, NEW_IPC = 0x0002_0000, 0x0400_0000, 0x0800_0000
NEW_USER, NEW_PIDS, NEW_NETWORK = 0x1000_0000, 0x2000_0000, 0x4000_0000
# The namespaces of a lab, and of each of its nodes.
OWN_SPACES = NEW_NETWORK | NEW_MOUNT | NEW_HOSTNAME | NEW_IPC | NEW_PIDS

MS_BIND, MS_RECURSIVE, MS_PRIVATE = 0x1000, 0x4000, 0x4_0000
MS_NOSUID, MS_NODEV = 0x2, 0x4

SIOCETHTOOL = 0x8946
# Without segmentation offload, an interface counts single packets. Receive offload merges packets only after they were
# counted; a veth needs it, or several CPUs receive the packets of one flow and change their order.
OFFLOADS = {"tso": (0x1F, 0), "gso": (0x24, 0), "gro": (0x2C, 1)}

PR_SET_PDEATHSIG, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 1, 47, 2
CAPABILITIES_VERSION = 0x2008_0522
# Capabilities that a process needs to join namespaces of nodes: CAP_SYS_CHROOT, CAP_SYS_PTRACE, CAP_SYS_ADMIN.
JOINING = (18, 19, 21)

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def unshare(flags: int) -> None:
    """Create new namespaces for this process (a PID namespace: for its children)."""
    _call("unshare", flags)


def enter(descriptor: int, flags: int = 0) -> None:
    """Enter the namespace behind a descriptor of /proc/PID/ns, or these namespaces of the process behind a pidfd."""
    _call("setns", descriptor, flags)


def enters_by_pidfd() -> bool:
    """Whether `enter` takes pidfds: since Linux 5.8. Without privileges, a kernel that does says EPERM."""
    try:
        own = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return False
    try:
        enter(own, NEW_HOSTNAME)
    except OSError as error:
        return error.errno == errno.EPERM
    finally:
        os.close(own)
    return True


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)


def keep_capabilities() -> None:
    """Let the next program keep the capabilities for joining namespaces. Programs of root keep all by themselves."""
    if os.geteuid() == 0:
        return
    header = ctypes.create_string_buffer(struct.pack("Ii", CAPABILITIES_VERSION, 0))
    sets = ctypes.create_string_buffer(struct.calcsize("6I"))
    _call("capget", header, sets)
    effective, permitted, _, *rest = struct.unpack("6I", sets.raw)
    _call("capset", header, struct.pack("6I", effective, permitted, sum(1 << number for number in JOINING), *rest))
    for number in JOINING:
        _call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, number, 0, 0)


def drop_capabilities() -> None:
    """Give up what `keep_capabilities` has kept."""
    if os.geteuid() != 0:
        header = ctypes.create_string_buffer(struct.pack("Ii", CAPABILITIES_VERSION, 0))
        _call("capset", header, bytes(struct.calcsize("6I")))


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None)


def send_single_packets(interface: str) -> None:
    """Make an interface of this namespace count packets as on a wire."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command, on in OFFLOADS.values():
            value = ctypes.create_string_buffer(struct.pack("II", command, on))
            request = struct.pack("16sP8x", interface.encode(), ctypes.addressof(value))
            fcntl.ioctl(any_socket, SIOCETHTOOL, request)
