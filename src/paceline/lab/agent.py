"""Runs a command on another node of the lab; mpiexec and Paceline's launcher use it instead of ssh.

    python -m paceline.lab.agent NODE WORD...          a shell runs the words, as with ssh
    python -m paceline.lab.agent --words NODE WORD...  runs the words without a shell

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


def main() -> None:
    words = sys.argv[1:]
    as_they_are = words[:1] == ["--words"]
    while words and words[0].startswith("-"):
        option = words.pop(0)  # ssh's options, such as -x
        if option in WITH_VALUE:
            words = words[1:]
    if len(words) < 2:
        print("usage: python -m paceline.lab.agent [--words] NODE WORD...", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    node, *command = words
    node = node.rpartition("@")[2]
    try:
        running = begin(None, node, command if as_they_are else ["/bin/sh", "-c", " ".join(command)])
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
