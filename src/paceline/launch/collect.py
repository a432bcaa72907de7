"""Run folders without a shared file system: ranks that do not see the folder send their records to rank 0.

Such a rank writes to a private folder on its own machine. A thread sends what is new to rank 0 every few seconds, when
the rank fails, and at the end; rank 0 appends it to the files of the same names in the run folder. Each message says
where in its file it belongs, and the answer how much of the file has arrived, so nothing is lost or written twice.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from paceline.run.folder import LOGS, is_node_file, is_record_of, record_files
from paceline.server.sockets import Diallers, Listener
from paceline.server.wire import Header, Kind, Message, WireError, read

PERIOD = 5.0
LAST_SECONDS = 10.0  # the end of a run waits this long for records that are on their way
LOOK_SECONDS = 0.2
CHUNK = 256 * 1024
DONE = b"done"  # in the place of a file without a name: all has been sent


class Collector:
    """Rank 0's side: a thread that appends what other ranks send to the files of the run folder."""

    def __init__(self, folder: Path, address: str, secret: bytes | None) -> None:
        self._folder = folder
        self._listener = Listener(f"tcp://{address}:*", secret)
        self.endpoint = self._listener.endpoint
        self._files: dict[tuple[int, int, str], tuple[Path, int]] = {}  # by rank, process and name: where it goes
        self._open: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-collector", daemon=True)
        self._thread.start()

    def close(self, seconds: float = LAST_SECONDS) -> list[int]:
        """Wait until every rank that has sent something has sent all; returns those that have not."""
        deadline = time.monotonic() + seconds
        while self._open and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS / 4)
        self._stop.set()
        self._thread.join(LAST_SECONDS)
        return sorted(self._open)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._listener.wait(LOOK_SECONDS)
            for sender, frames in self._listener.messages():
                try:
                    message = read(frames)
                    if message.kind == Kind.RECORDS:
                        self._listener.send(sender, self._take(message))
                except (WireError, OSError):
                    continue  # a stranger; or the disk is full, and the sender will try again
        self._listener.close()

    def _take(self, message: Message) -> Message:
        """Append a part of a file, unless it is here already; the answer says how much of the file is."""
        header, (name, _, data) = message.header, bytes(message.payload).partition(b"\n")
        if not name:
            (self._open.discard if data == DONE else self._open.add)(header.rank)
            return Message(Header(Kind.RECORDED, sequence=header.sequence))
        path, start = self._place(header.rank, header.life, name.decode(errors="replace"))
        size = (path.stat().st_size if path.exists() else 0) - start
        if header.version == size:
            with path.open("ab") as file:
                file.write(data)
            size += len(data)
        return Message(Header(Kind.RECORDED, sequence=header.sequence, version=size), name)

    def _place(self, rank: int, life: int, name: str) -> tuple[Path, int]:
        """The file, and how long it was when this process of the rank began to write to it.

        A rank has one file for all its processes; two nodes may have one name, and get files of their own.
        """
        key = rank, life, name
        if key not in self._files:
            if not is_record_of(name, rank):
                raise WireError(f"{name[:60]!r} is no file of rank {rank}")
            path = self._folder / name
            if is_node_file(path) and path.exists() and path not in self._of(rank):
                path = path.with_stem(f"{path.stem}-{rank}")
            self._files[key] = path, path.stat().st_size if path.exists() else 0
        return self._files[key]

    def _of(self, rank: int) -> Iterator[Path]:
        return (path for (owner, _, _), (path, _) in self._files.items() if owner == rank)


class Forwarder:
    """The side of a rank that does not see the run folder: a folder of its own, and a thread that sends what is new."""

    def __init__(self, endpoint: str, rank: int, secret: bytes | None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-records-"))
        (self.folder / LOGS).mkdir()
        self._endpoint, self._rank, self._secret = endpoint, rank, secret
        self._life = random.getrandbits(63)
        self._sent: dict[str, int] = {}
        self._hurry, self._stop, self.complete = threading.Event(), threading.Event(), False
        self._flushes: deque[threading.Event] = deque()  # to be set when what there is now has been sent
        self._thread = threading.Thread(target=self._run, name="paceline-forwarder", daemon=True)
        self._thread.start()

    def flush(self, seconds: float = 2.0) -> None:
        """Send what there is now, as far as that is possible in this time."""
        flushed = threading.Event()
        self._flushes.append(flushed)
        self._hurry.set()
        flushed.wait(seconds)

    def close(self, seconds: float = LAST_SECONDS) -> bool:
        """Send the rest and remove the folder; false if not all has arrived in this time, and the folder stays."""
        self._stop.set()
        self._hurry.set()
        self._thread.join(seconds)
        if self.complete:
            shutil.rmtree(self.folder, ignore_errors=True)
        return self.complete

    def _run(self) -> None:
        diallers = Diallers([self._endpoint], f"records-{self._rank}-{self._life}", self._secret)
        try:
            self._say(diallers, done=False)
            while not self._stop.is_set():
                self._hurry.wait(PERIOD)
                self._hurry.clear()
                asked = len(self._flushes)  # those that come while it sends are for the next time
                self._send_new(diallers)
                for _ in range(asked):
                    self._flushes.popleft().set()
            self.complete = self._send_new(diallers) and self._say(diallers, done=True)
        finally:
            diallers.close()

    def _send_new(self, diallers: Diallers) -> bool:
        """Whether all that was there has arrived."""
        for path in record_files(self.folder):
            name = str(path.relative_to(self.folder))
            while (sent := self._sent.get(name, 0)) < path.stat().st_size:
                with path.open("rb") as file:
                    file.seek(sent)
                    data = file.read(CHUNK)
                arrived = self._ask(diallers, name.encode() + b"\n" + data, sent)
                if arrived is None:
                    return False
                self._sent[name] = arrived
        return True

    def _say(self, diallers: Diallers, *, done: bool) -> bool:
        """That there is somebody who will send, or that all has been sent."""
        return self._ask(diallers, b"\n" + (DONE if done else b""), 0) is not None

    def _ask(self, diallers: Diallers, payload: bytes, offset: int) -> int | None:
        """Send a message and wait for its answer; None if there is none."""
        (dialler,), deadline = diallers.all, time.monotonic() + LAST_SECONDS / 2
        number = int(time.monotonic() * 1e6)
        header = Header(Kind.RECORDS, rank=self._rank, life=self._life, version=offset, sequence=number)
        dialler.send(Message(header, payload))
        while time.monotonic() < deadline:
            diallers.wait(LOOK_SECONDS)
            for frames in dialler.messages():
                answer = read(frames).header
                if answer.kind == Kind.RECORDED and answer.sequence == number:
                    return answer.version
        return None
