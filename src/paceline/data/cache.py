"""The cache: one file a data set, whole or not there."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from paceline.data.origins import Origin
from paceline.errors import DataError
from paceline.run.atomic import replacing

_STALE_SECONDS = 3600.0


def folder_of(name: str) -> Path:
    """Where a data set is kept, whether it is there or not."""
    given, xdg = os.environ.get("PACELINE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    root = Path(given) if given else Path(xdg or "~/.cache", "paceline")
    try:
        return (root.expanduser() / name).absolute()
    except RuntimeError as why:
        raise DataError(f"{root} cannot be the cache ({why}): set PACELINE_CACHE to a folder") from why


def file_of(name: str) -> Path:
    """The file that has all parts of a data set, whether it is there or not."""
    return folder_of(name) / f"{name}.bin"


def has(path: Path, size: int) -> bool:
    """Whether the file seems to be there. Its content is checked when it is used."""
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def damage(path: Path, origin: Origin) -> str | None:
    """What is wrong with a cached file: nothing to be said (an empty text) if it is not there, None if all is right."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != origin.size:
                return f"{path} is corrupt: expected {origin.size} bytes, found {size}"
            for file in origin.files:
                digest, left = sha256(), file.size
                while left and (chunk := stream.read(min(left, 1 << 18))):
                    digest.update(chunk)
                    left -= len(chunk)
                if (found := digest.hexdigest()) != file.sha256:
                    return f"{path} is corrupt: expected SHA-256 {file.sha256} of its {file.name}, found {found}"
            return None
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as why:
        raise trouble("read", path, why) from why


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name only when the block is done and all of it is on the disk; if it raises, never."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as out:
            yield out
    except OSError as why:
        raise trouble("write", path, why) from why


def sweep(folder: Path) -> None:
    """Remove what killed processes left behind.

    By age and not by process number, which means nothing to another machine or container with the same cache. A live
    writer writes every few minutes, as its source times out otherwise.
    """
    for path in folder.glob(".*.part"):
        with suppress(OSError):  # another process swept it, or may write here and this one may not
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


def trouble(verb: str, path: Path, why: OSError) -> DataError:
    """The error for a cache that cannot be used."""
    return DataError(
        f"cannot {verb} {path} in the cache: {why.strerror or why}. Check the folder's permissions and the free space "
        "of its disk, or set PACELINE_CACHE to another folder"
    )
