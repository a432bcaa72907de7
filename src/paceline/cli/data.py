"""`paceline data`: what data sets there are, getting one, and where it is."""

import argparse
from pathlib import Path

from paceline.data import cache, fetch, mini
from paceline.data.origins import ORIGINS
from paceline.data.table import TABLE, DataInfo, describe
from paceline.errors import UsageError

HELP = "list the data sets, get one, or say where it is"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="action", required=True, metavar="list | get | path")
    verbs.add_parser("list", help="every data set, its size, and whether it is in the cache")
    get = verbs.add_parser("get", help="fetch a data set into the cache, or check the one that is there")
    get.add_argument("name", metavar="NAME", help=f"one of: {', '.join(TABLE)}")
    get.add_argument("--source", metavar="S", help=f"try only this source: {', '.join(fetch.SOURCES)} (default: each)")
    get.add_argument("--data-dir", type=Path, metavar="DIR", help="look for the files here first (or: PACELINE_DATA)")
    path = verbs.add_parser("path", help="print the folder of a data set")
    path.add_argument("name", metavar="NAME", help=f"one of: {', '.join(TABLE)}")


def run(args: argparse.Namespace) -> int:
    if args.action == "list":
        _list()
    elif args.action == "get":
        _get(describe(args.name), args.data_dir, args.source)
    else:
        print(_path(describe(args.name)))
    return 0


def _list() -> None:
    rows = [("name", "training", "test", "shape", "classes", "where", "about")]
    for info in TABLE.values():
        shape = "×".join(map(str, info.shape))
        rows.append(
            (info.name, f"{info.train:,}", f"{info.test:,}", shape, str(info.classes), _where(info), info.about)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if heading in ("training", "test", "classes") else cell.ljust(width)
            for cell, width, heading in zip(row, widths, rows[0], strict=True)
        )
        print("  ".join(cells).rstrip())


def _where(info: DataInfo) -> str:
    if info.name in ORIGINS:
        return "cached" if cache.has(cache.folder_of(info.name), ORIGINS[info.name]) else "not cached"
    return "in the package" if info.name == "mnist-mini" else "made in memory"


def _get(info: DataInfo, folder: Path | None, source: str | None) -> None:
    if info.name not in ORIGINS:
        print(f"{info.name} is {_where(info)}: there is nothing to get")
        return
    place = fetch.get(info.name, folder, source)
    print(f"{info.name}: {info.train:,} training and {info.test:,} test images, every file checked, in {place}")


def _path(info: DataInfo) -> Path:
    if info.name == "mnist-mini":
        return mini.FOLDER
    if info.name not in ORIGINS:
        raise UsageError(f"{info.name} is made in memory and has no folder")
    place = cache.folder_of(info.name)
    if not cache.has(place, ORIGINS[info.name]):
        raise UsageError(f"{info.name} is not in the cache ({place}): get it with `paceline data get {info.name}`")
    return place
