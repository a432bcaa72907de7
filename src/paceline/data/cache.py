"""The cache: one file per data set, written atomically."""

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
    """The folder of a data set in the cache, which may not exist."""
    given, xdg = os.environ.get("PACELINE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    root = Path(given) if given else Path(xdg or "~/.cache", "paceline")
    try:
        return (root.expanduser() / name).absolute()
    except RuntimeError as why:
        raise DataError(f"{root} cannot be the cache ({why}): set PACELINE_CACHE to a folder") from why


def file_of(name: str) -> Path:
    """The file with all parts of a data set, which may not exist."""
    return folder_of(name) / f"{name}.bin"


def has(path: Path, size: int) -> bool:
    """Whether the file exists and has this size; its content is checked on use."""
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def damage(path: Path, origin: Origin) -> str | None:
    """What is wrong with a cached file: empty if it does not exist, None if it is correct."""
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
    """A file that gets its name only after the block has completed and all data is on the disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as out:
            yield out
    except OSError as why:
        raise trouble("write", path, why) from why


def sweep(folder: Path) -> None:
    """Remove temporary files of killed processes.

    By age, not by process number, which has no meaning on another machine or container with the same cache. A live
    writer writes every few minutes, because otherwise its source times out.
    """
    for path in folder.glob(".*.part"):
        with suppress(OSError):  # another process has removed it, or this one has no permission
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


def trouble(verb: str, path: Path, why: OSError) -> DataError:
    """The error if the cache cannot be used."""
    return DataError(
        f"cannot {verb} {path} in the cache: {why.strerror or why}. Check the folder's permissions and the free space "
        "of its disk, or set PACELINE_CACHE to another folder"
    )
