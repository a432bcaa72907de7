"""paceline watch: serves a live page of a run on loopback until Ctrl-C."""

from __future__ import annotations

import argparse
import socket
import webbrowser
from pathlib import Path

from paceline.errors import EXIT_OK, UsageError, visible
from paceline.messages import LOGGER, end_line
from paceline.spec import FIELDS
from paceline.watch.server import Server
from paceline.watch.state import State, find_run

RUNS = str(FIELDS["output_dir"].default)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", nargs="?", type=Path, default=Path(RUNS),
        help="a run folder, or a folder of run folders: then the newest run that is under way, or the newest "
             f"(default: {RUNS})",
    )  # fmt: skip
    parser.add_argument("--port", metavar="N", type=_port, help="port on 127.0.0.1 (default: one that is free)")
    parser.add_argument("--open", action="store_true", help="also open the page in this machine's browser")


def run(args: argparse.Namespace) -> int:
    folder = find_run(args.run)
    try:
        state = State(folder)
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} has no summary that can be read: {error}") from None
    state.refresh()
    state.check()
    with Server(state, args.port) as server:
        forward = f"ssh -L {server.server_port}:127.0.0.1:{server.server_port} {socket.gethostname()}"
        print(visible(f"Watching {folder} at {server.address} (Ctrl-C ends this, not the run)"))
        print(visible(f"From another machine: {forward}, then open the same address there"), flush=True)
        try:
            if args.open and not webbrowser.open(server.address):
                LOGGER.warning("there is no browser that can be opened here: open the address above")
            server.serve_forever()
        except KeyboardInterrupt:
            end_line()
    return EXIT_OK


def _port(text: str) -> int:
    port = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a whole number from 1 to 65535")
    return port
