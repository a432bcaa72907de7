"""The cache: one folder a data set, of uncompressed files that are whole or not there."""

import os
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from hashlib import file_digest
from pathlib import Path

from paceline.data.origins import File, Origin
from paceline.errors import DataError

_STALE_SECONDS = 3600.0


def folder_of(name: str) -> Path:
    """Where a data set is kept, whether it is there or not."""
    given, xdg = os.environ.get("PACELINE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    root = Path(given) if given else Path(xdg or "~/.cache", "paceline")
    try:
        return (root.expanduser() / name).absolute()
    except RuntimeError as why:
        raise DataError(f"{root} cannot be the cache ({why}): set PACELINE_CACHE to a folder") from why


def has(folder: Path, origin: Origin) -> bool:
    """Whether every file seems to be there. Their digests are checked when they are used."""
    try:
        return all((folder / file.name).stat().st_size == file.size for file in origin.files)
    except OSError:
        return False


def digest(path: Path) -> str | None:
    """The SHA-256 of a cached file, or None where there is no such file."""
    try:
        with path.open("rb") as stream:
            return file_digest(stream, "sha256").hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as why:
        raise _trouble("read", path, why) from why


def store(path: Path, content: Iterable[bytes]) -> None:
    """Write a file that gets its name only when all its content is on the disk, and if the content raises, never."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as out:
                for chunk in content:
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as why:
        raise _trouble("write", path, why) from why


def sweep(folder: Path) -> None:
    """Remove what killed processes left behind.

    By age and not by process number, which means nothing to another machine or container with the same cache. A live
    writer writes every few seconds, as its source times out otherwise.
    """
    for path in folder.glob(".*.part"):
        with suppress(OSError):  # another process swept it, or may write here and this one may not
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


def missing(folder: Path, files: Iterable[File]) -> dict[File, str | None]:
    """The files that are not there or not right, with the digest that was found."""
    digests = {file: digest(folder / file.name) for file in files}
    return {file: found for file, found in digests.items() if found != file.sha256}


def _trouble(verb: str, path: Path, why: OSError) -> DataError:
    return DataError(
        f"cannot {verb} {path} in the cache: {why.strerror or why}. Check the folder's permissions and the free space "
        "of its disk, or set PACELINE_CACHE to another folder"
    )
