"""paceline train: has one flag for each field of the spec."""

from __future__ import annotations

import argparse
import sys
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, replace
from itertools import groupby
from typing import Any

from paceline.cli import nodes
from paceline.cli.main import add_verbosity
from paceline.comm import table as transports
from paceline.comm.seat import Seat
from paceline.errors import UsageError, visible
from paceline.launch.cluster import Cluster, read_cluster, split_address
from paceline.launch.env import find_lab, find_seat, in_lab
from paceline.launch.run import launch
from paceline.launch.signals import quiet_interrupt
from paceline.messages import LOGGER, quiet
from paceline.spec import CONFIG, FIELDS, KINDS, OWN, RunSpec, World, read_config, resolve
from paceline.strategies import table as strategies
from paceline.strict_json import dump

LISTS = ("memory", "speed")  # given once with commas, or several times
NOT_SPEC = ("verb", "config", "json", "quiet", "verbose", "cluster", "role", "index")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each field of the spec; only given ones are in the namespace."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    abouts = {
        "strategies": {each.name: each.summary for each in strategies.TABLE.values()},
        "transports": {info.name: info.about for info in transports.TABLE.values()},
    }
    parser.epilog = "\n\n".join(
        f"{title}:\n" + "\n".join(f"  {name:<14}{about}" for name, about in table.items())
        for title, table in abouts.items()
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file with values for these flags; flags win")
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="parameter servers: a file with the addresses of all ranks, one of which is started here",
    )
    parser.add_argument("--role", metavar="ps|worker", help="with --cluster: what this one is")
    parser.add_argument("--index", type=reader(int), metavar="N", help="with --cluster: which of its role, from 0")
    parser.add_argument("--json", action="store_true", help="print the summary as the last line of standard output")
    add_verbosity(parser, "print every option at the start, defaults included, and where ranks run and meet")
    add_fields(parser, (name for name in FIELDS if name not in OWN))
    for having, names in groupby(sorted(OWN, key=_first), key=strategies.having):
        add_fields(parser.add_argument_group(f"options of {_and(having)}"), names)


def _first(name: str) -> tuple[int, ...]:
    """A key that sorts options by their strategies, in the order of the table."""
    table = list(strategies.TABLE)
    return tuple(table.index(strategy) for strategy in strategies.having(name))


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def add_fields(parser: argparse._ActionsContainer, names: Iterable[str]) -> None:
    """Add a flag for each of these fields of the spec."""
    for name in names:
        f, kind = FIELDS[name], KINDS[name]
        flag, about = "--" + name.replace("_", "-"), f.metadata["about"]
        kind = typing.get_args(kind)[0] if isinstance(kind, types.UnionType) else kind
        if f.default not in (None, MISSING):
            about += f" (default: {str(f.default).lower() if kind is bool else f.default})"
        options: dict[str, Any] = {"help": about, "default": argparse.SUPPRESS}
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
            continue
        if f.name in LISTS:
            options["action"] = Joined
        choices = f.metadata["choices"]
        usual = f.metadata["metavar"] or "|".join(choices)
        options["metavar"] = usual or {int: "N", float: "X", str: "TEXT"}.get(kind, "N,N")
        parser.add_argument(flag, type=reader(kind), **options)
        if former := f.metadata["formerly"]:
            hidden = options | {"help": argparse.SUPPRESS, "dest": name}
            parser.add_argument("--" + former.replace("_", "-"), type=reader(kind), **hidden)


def reader(kind: Any) -> Any:
    """Converts a flag's text to the field's type; the spec reports wrong values."""

    def read(text: str) -> Any:
        try:
            if kind in (int, float):
                return kind(text)
            return [int(part) for part in text.split(",")] if kind is not str else text
        except ValueError:
            return text

    return read


def _cluster_seat(args: argparse.Namespace, found: Seat | None) -> tuple[Cluster, Seat]:
    """The seat of a rank in a cluster file."""
    if found:
        raise UsageError(f"--cluster under {found.launcher}: its ranks find each other; leave --cluster out")
    cluster = read_cluster(args.cluster)
    if args.role is None:
        raise UsageError(f"--cluster {args.cluster}: give this rank's --role ps|worker and --index N")
    if args.index is not None and not isinstance(args.index, int):
        raise UsageError(f"--index is {args.index!r}; it takes a whole number")
    rank = cluster.place(args.role, args.index)
    addresses = (*cluster.ps, *cluster.worker)
    hosts = [split_address(address)[0] for address in addresses]
    neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    seat = Seat(rank, len(addresses), neighbours.index(rank), len(neighbours), f"cluster file {args.cluster}")
    return cluster, in_lab(seat)


class Joined(argparse.Action):
    """A flag that may be given several times; its values are joined by commas."""

    def __call__(self, _: Any, namespace: argparse.Namespace, values: Any, __: str | None = None) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


def layers_of(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """The values of the config file and the flags; flags override the file."""
    flags = {name: value for name, value in vars(args).items() if name not in NOT_SPEC}
    config = [(f"{CONFIG} {args.config}", read_config(args.config))] if args.config else []
    return [*config, ("flag", flags)]


def check_processes(spec: RunSpec, world: World | None) -> None:
    """Refuse the threads transport under a launcher that starts processes."""
    if spec.elastic and world:
        raise UsageError(
            f"--elastic {spec.elastic} under {world.launcher}: only Paceline's own launcher, on one machine, restarts "
            f"workers; run paceline train without {world.launcher}, or leave --elastic out"
        )
    if spec.carrier.in_one_process and world and world.size > 1:
        raise UsageError(
            f"--transport {spec.transport} under {world.launcher}: its ranks are processes; use gloo or mpi"
        )


def run(args: argparse.Namespace) -> int:
    layers = layers_of(args)
    seat, cluster = find_seat(), None
    if args.cluster:
        cluster, seat = _cluster_seat(args, seat)
        served = {"strategy": strategies.default(None, servers=True).name, "servers": len(cluster.ps)}
        layers.insert(0, (f"cluster file {args.cluster}", served))
        asked, having = [v["strategy"] for _, v in layers if v.get("strategy")][-1], strategies.having("servers")
        if asked in strategies.TABLE and asked not in having:
            raise UsageError(f"--cluster with strategy {asked}: it is for {_and(having)}")
    elif args.role is not None or args.index is not None:
        raise UsageError("--role and --index say which rank of a cluster file this is: give --cluster FILE, too")
    world = World(seat.size, seat.launcher) if seat else None
    one_machine = (seat is None or seat.one_node) and find_lab() is None
    resolved = replace(resolve(*layers, world=world, one_machine=one_machine), verbose=args.verbose)
    check_processes(resolved.spec, world)
    if seat:
        with quiet_interrupt():
            from paceline.launch.worker import finish, run_seat
        finish(run_seat(resolved, seat, as_json=args.json, cluster=cluster))
    show = sys.stderr if args.json else sys.stdout
    folder, ending = launch(resolved, show)
    if not quiet() and (rows := nodes.table(folder)):
        print(visible("\n".join(["", *rows])), file=show)
    if ending.message:
        LOGGER.error(ending.message)
    if args.json and ending.summary:
        print(dump(ending.summary.as_dict()))
    return ending.exit_code
