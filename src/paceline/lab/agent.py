"""Runs a command on another node of the lab; mpiexec and Paceline's launcher use it instead of ssh.

    python -m paceline.lab.agent NODE WORD...          a shell runs the words, as with ssh
    python -m paceline.lab.agent --words NODE WORD...  runs the words without a shell
    python -m paceline.lab.agent --outside WORD...     runs them outside the nodes: they start processes on all of them

It ends like the command: with the same exit code, or by the same signal.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys

from paceline.errors import EXIT_USAGE, PacelineError
from paceline.lab.client import begin, wait
from paceline.messages import configure

# Options of ssh that are followed by a value.
WITH_VALUE = {f"-{letter}" for letter in "BDEFIJLOPQRSWbceilmopw"}


def read(words: list[str]) -> tuple[str | None, list[str]]:
    """The node, or none, and the command."""
    kind = words[0] if words else ""
    if kind == "--outside":
        return None, words[1:]
    while words and words[0].startswith("-"):
        option = words.pop(0)  # ssh's options, such as -x
        if option in WITH_VALUE:
            words = words[1:]
    node, command = words[0].rpartition("@")[2] if words else "", words[1:]
    return node, command if kind == "--words" or not command else ["/bin/sh", "-c", " ".join(command)]


def main() -> None:
    node, command = read(sys.argv[1:])
    if not command:
        print("usage: python -m paceline.lab.agent [--words] NODE WORD...", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    try:
        running = begin(None, node, command)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)  # the command has it; if it is a socket, its end must be seen
        wait([running])
    except PacelineError as error:
        configure()
        logging.getLogger("paceline.lab").error(error)
        sys.exit(error.exit_code)
    assert running.exit_code is not None
    if running.exit_code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump: the command crashed, not this process
        signal.signal(-running.exit_code, signal.SIG_DFL) if -running.exit_code != signal.SIGKILL else None
        os.kill(os.getpid(), -running.exit_code)
    sys.exit(running.exit_code)


if __name__ == "__main__":
    main()
