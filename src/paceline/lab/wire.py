"""Messages between a lab's processes: JSON with open files, over local sockets of this user."""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from typing import Any

# The machine limits the size of a message, often to 200 kB, and an environment may be larger: longer messages are sent
# as a file in memory, of which only the descriptor is sent.
MESSAGE_BYTES = 1 << 16
MOST_BYTES = 1 << 26
IN_A_FILE = b"@"
MOST_FILES = 8
# In every node's own network namespace, where no other lab can be.
IN_NODE = "\0paceline-lab"


def name_of(lab: str) -> str:
    """The name of a lab's abstract socket, which disappears when the holder ends."""
    return f"\0paceline-lab/{os.getuid()}/{lab}"


def make_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def listen(name: str) -> socket.socket:
    listener = make_socket()
    try:
        listener.bind(name)
    except OSError:
        listener.close()
        raise
    listener.listen(64)
    return listener


def say(to: socket.socket, message: dict[str, Any], files: tuple[int, ...] = ()) -> None:
    data = json.dumps(message).encode()
    if len(data) <= MESSAGE_BYTES:
        socket.send_fds(to, [data], list(files))
        return
    with open(os.memfd_create("message"), "w+b") as whole:
        whole.write(data)
        whole.flush()
        socket.send_fds(to, [IN_A_FILE], [whole.fileno(), *files])


def hear(source: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its open files; None if the other side has closed."""
    size = array.array("i").itemsize * MOST_FILES
    try:
        data, extra, flags, _ = source.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None
    files: list[int] = []
    for level, kind, raw in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(raw) - len(raw) % array.array("i").itemsize
            files += array.array("i", raw[:whole])
    if not data:
        return None
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("longer than allowed")
        message = json.loads(_whole(files) if data == IN_A_FILE else data)
        if not isinstance(message, dict):
            raise ValueError("not an object")
    except (ValueError, OSError) as error:
        for file in files:
            os.close(file)
        return {"do": f"nothing: {error}"}, []
    return message, files


def _whole(files: list[int]) -> bytes:
    """A long message, which is in the first of the files."""
    if not files:
        raise ValueError("its file is missing")
    with open(files.pop(0), "rb") as whole:
        if os.fstat(whole.fileno()).st_size > MOST_BYTES:
            raise ValueError("longer than allowed")
        whole.seek(0)
        return whole.read()


def is_own(connection: socket.socket) -> bool:
    """Whether the other side is a process of this user, or of root."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", raw)[1] in (os.getuid(), 0)
