"""Makes sure that this machine's cache has a data set, before any rank opens it."""

from pathlib import Path

from paceline import own_code
from paceline.data import cache, packed, text
from paceline.data.fetch import get
from paceline.data.origins import ORIGINS
from paceline.data.table import describe, own_file, text_of
from paceline.errors import DataError, UsageError
from paceline.messages import LOGGER

_WANTED = {
    "images": "folder of images, a sub-folder for each class",
    "arrays": "file of arrays, .npz",
    "text": "file of text",
    "tokens": "file of tokens",
}


def prepare(name: str, folder: Path | None = None, source: str | None = None) -> Path | None:
    """The file of a data set, fetched, checked or packed; None if it needs none."""
    info = describe(name)
    if name in ORIGINS:
        return get(name, folder, source)
    if source is not None:
        raise UsageError(f"{name} is not fetched, so no source can be chosen: leave --source out")
    own, described = own_file(name), text_of(name)
    if described and described.path:
        own = described.kind, described.path
    if own is None:
        if own_code.is_own(name):
            own_code.check_exists(name, "data set")
        elif folder is not None and not (info and info.load):
            raise UsageError(f"--data-dir {folder}: {name} is not read from files; leave --data-dir out")
        return None
    if folder is not None:
        raise UsageError(f"--data-dir {folder}: {name} already gives the place of the data; leave --data-dir out")
    _check_there(name, *own)
    if described:
        text.read(name, described)  # checks all of it
        return described.path
    return _pack(*own)


def place_of(name: str) -> Path | None:
    """The file that `prepare` creates, which may not exist; None if it needs none."""
    if name in ORIGINS:
        return cache.file_of(name)
    if described := text_of(name):
        return described.path
    own = own_file(name)
    return packed.place_of(own[1]) if own else None


def _check_there(name: str, kind: str, path: Path) -> None:
    """Raise an error if the folder or file does not exist."""
    wanted = _WANTED[kind]
    reason = ""
    try:
        if not (path.is_dir() if kind == "images" else path.is_file()):
            reason = f"is not a {wanted.partition(' ')[0]}" if path.exists() else "does not exist"
    except OSError as why:
        reason = f"cannot be accessed ({why.strerror})"
    if reason:
        raise DataError(f"the data set {name!r} cannot be read: {path.absolute()} {reason}; give a {wanted}")


def _pack(kind: str, source: Path) -> Path:
    """Pack a user's folder or file, unless it has not changed since it was packed."""
    from paceline.data import arrays, images  # imports Pillow, which nothing else needs

    place = packed.place_of(source)
    cache.sweep(place.parent)
    listing = images.scan(source) if kind == "images" else None
    if listing:
        LOGGER.info("images:%s: %s", source, listing)
    mark = packed.fingerprint(source, listing.files if listing else [source])
    if place.exists():
        try:
            if packed.read(place, "", "")[2] == mark:
                return place
        except DataError as why:
            LOGGER.warning("%s; packing it again", why)
    packed.write(place, images.content(listing) if listing else arrays.open_npz(source), source, mark)
    return place
