"""paceline lab: emulates a cluster on one Linux machine."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

from paceline.cli.main import add_json, add_verbosity
from paceline.errors import PacelineError, UsageError
from paceline.lab import client
from paceline.lab.measure import show
from paceline.lab.plan import ABOUT, FAULTS, LAB, Fault, LabPlan, Table, check_name, in_words, read_plan
from paceline.strict_json import dump

LOGGER = logging.getLogger("paceline.lab")
MOST_SECONDS = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    presets = "\n".join(f"  {name:<12}{about}" for name, about in ABOUT.items())
    parser.epilog = f"LAB is a TOML file, or a preset with a number of nodes, such as 1gbit:4\n\npresets:\n{presets}"
    verbs = parser.add_subparsers(dest="do", metavar="DO", required=True)

    def add(name: str, about: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=about, description=about, allow_abbrev=False)

    run_it = add("run", "make a lab, run a command in it, remove it: run LAB -- COMMAND")
    run_it.add_argument("lab", metavar="LAB", help="a lab file, or PRESET[:NODES]")
    run_it.add_argument("--name", help="the lab's name, where several are up")
    run_it.add_argument("--each", action="store_true",
                        help="run the command on every node; {name}, {index}, {nodes} and {head} in its words are "
                        "replaced")  # fmt: skip
    add_verbosity(run_it)
    up = add("up", "make a lab that stays until `down`")
    up.add_argument("lab", metavar="LAB", help="a lab file, or PRESET[:NODES]")
    up.add_argument("--name", help="the lab's name, where several are up")
    for name, about in (("down", "end a lab and all that runs in it"), ("status", "what is up, and how it is")):
        add(name, about).add_argument("name", nargs="?", help="the lab; not needed where only one is up")
    add_json(verbs.choices["status"], "it")
    execute = add("exec", "run a command in a node: exec NODE -- COMMAND")
    execute.add_argument("--name", help="the lab; not needed where only one is up")
    execute.add_argument("node", metavar="NODE", help="its name, such as n1")
    measure = add("measure", "measure the links of a lab beside what they should be")
    measure.add_argument("name", nargs="?", help="the lab; not needed where only one is up")
    measure.add_argument("--seconds", type=float, default=3.0, help="how long to send (default: 3)")
    add_json(measure, "the rates, in bit/s,")
    for name, about in zip(FAULTS, ABOUT_FAULTS, strict=True):
        fault = add(name, about)
        fault.add_argument("--name", help="the lab; not needed where only one is up")
        fault.add_argument("node", metavar="NODE", help="its name, such as n1")
        if name == "slow":
            for way, what in (("rate", "in both directions"), ("up", "from the node"), ("down", "to the node")):
                fault.add_argument(f"--{way}", metavar="RATE", help=f"{what}, such as 10mbit")


ABOUT_FAULTS = (
    "let all frames from and to a node disappear",
    "undo a cut",
    "give a node's link another speed",
    "stop every process that runs in a node (its kernel still answers)",
    "let a stopped node go on",
    "end a node for good, all of its processes at once",
)


def run(args: argparse.Namespace) -> int:
    _open_missing()
    if args.command is not None and args.do not in ("run", "exec"):
        raise UsageError(f"lab {args.do} takes no command; lab run LAB -- COMMAND and lab exec NODE -- COMMAND do")
    if args.do in FAULTS:
        return _break_now(args)
    work: dict[str, Callable[[], int]] = {
        "run": lambda: _run(args),
        "up": lambda: _up(args),
        "down": lambda: _down(args.name),
        "status": lambda: _status(args.name, as_json=args.json),
        "exec": lambda: _exec(args.name, args.node, _words(args.command)),
        "measure": lambda: show(args.name, _seconds(args.seconds), as_json=args.json),
    }
    return work[args.do]()


def _open_missing() -> None:
    """Replace closed standard files by /dev/null, so that no other file gets their numbers."""
    while (file := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(file, True)
    os.close(file)


def _down(lab: str | None) -> int:
    client.down(lab)
    print("the lab is down")
    return 0


def _break_now(args: argparse.Namespace) -> int:
    values = {way: value for way in ("rate", "up", "down") if (value := getattr(args, way, None))}
    table = Table(values, f"lab {args.do}", ("rate", "up", "down"))
    both = table.rate("rate")
    client.ask(args.name, args.do, node=args.node, up=table.rate("up") or both, down=table.rate("down") or both)
    print(f"{args.node}: {args.do}")
    return 0


def _seconds(given: float) -> float:
    if not 0 < given <= MOST_SECONDS:
        raise UsageError(f"--seconds is {given:g}; it takes a number above 0, up to {MOST_SECONDS:g}")
    return given


def _words(command: list[str] | None) -> list[str]:
    if not command:
        raise UsageError("the command is missing: write it after --, such as -- paceline train")
    return command


def _plan(args: argparse.Namespace) -> LabPlan:
    plan = read_plan(args.lab)
    if args.name is None:
        return plan
    check_name(args.name, "--name")
    return replace(plan, name=args.name)


def _run(args: argparse.Namespace) -> int:
    words, plan = _words(args.command), _plan(args)
    if not args.name:
        plan = replace(plan, name=f"{client.FOR_A_COMMAND}{os.getpid()}")
    keeper = client.start(plan, detached=False)
    try:
        on = plan.nodes if args.each else plan.nodes[:1]
        commands = []
        for index, node in enumerate(on):
            said = {"name": node.name, "index": index, "nodes": len(plan.nodes), "head": plan.nodes[0].address}
            filled = [_fill(word, said) for word in words] if args.each else words
            commands.append(client.begin(plan.name, node.name, filled))
        client.wait(commands, [(fault.at, partial(_break, plan.name, fault)) for fault in plan.faults])
    finally:
        ended = keeper.poll() is not None
        client.stop(keeper)
    if ended:
        LOGGER.error("the lab %s ended before its command", plan.name)
    codes = [client.finish_like(command.exit_code or 0) for command in commands]
    return next((code for code in codes if code), 0)


def _fill(word: str, values: dict[str, object]) -> str:
    for key, value in values.items():
        word = word.replace(f"{{{key}}}", str(value))
    return word


def _break(lab: str, fault: Fault) -> None:
    LOGGER.info("%g s: %s %s", fault.at, fault.do, fault.node)
    try:
        client.ask(lab, fault.do, node=fault.node, up=fault.up, down=fault.down)
    except PacelineError as error:  # for example a node that has been killed; the command continues
        LOGGER.error(error)


def _up(args: argparse.Namespace) -> int:
    plan = _plan(args)
    client.start(plan, detached=True)
    _status(plan.name)
    first = plan.nodes[0].name
    print(f"\nOpen a shell with: paceline lab exec {first} -- bash; end the lab with: paceline lab down")
    return 0


def _status(lab: str | None, *, as_json: bool = False) -> int:
    if lab is None and LAB not in os.environ and len(found := client.names()) != 1:
        labs = [{"name": name} for name in found]
        print(dump({"labs": labs}) if as_json else "\n".join(found) or "no lab is up")
        return 0
    answer = client.ask(lab, "status")
    plan = LabPlan.from_json(answer["plan"])
    if as_json:
        nodes = [asdict(node) | {"state": answer["states"][node.name]} for node in plan.nodes]
        print(dump({"labs": [asdict(plan) | {"nodes": nodes}]}))
        return 0
    print(f"lab {plan.name}")
    print(f"  {'node':<12}{'address':<14}{'up':>12}{'down':>12}  {'rack':<6}state")
    for node in plan.nodes:
        rack = str(node.rack + 1) if plan.racks else ""
        print(f"  {node.name:<12}{node.address:<14}{in_words(node.up):>12}{in_words(node.down):>12}  {rack:<6}"
              f"{answer['states'][node.name]}")  # fmt: skip
    for i, rack_links in enumerate(plan.racks):
        print(f"  rack {i + 1}: {in_words(rack_links.up)} up, {in_words(rack_links.down)} down")
    return 0


def _exec(lab: str | None, node: str, words: list[str]) -> int:
    if os.isatty(0) and os.isatty(1):
        from paceline.lab.terminal import run_in_terminal

        return client.finish_like(run_in_terminal(lab, node, words))
    command = client.begin(lab, node, words)
    client.wait([command])
    return client.finish_like(command.exit_code or 0)
