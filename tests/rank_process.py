"""A rank of a test world: connects as any rank does, then serves cases."""

import os
import sys
from pathlib import Path
from typing import NoReturn

from worlds import COMM_TIMEOUT, serve

from paceline.launch.connect import connect

sys.path.extend(str(folder) for folder in Path(__file__).parent.iterdir() if folder.is_dir())


def run(path: str, transport: str) -> NoReturn:
    serve(connect(transport, COMM_TIMEOUT), path)
    sys.stdout.flush()
    if transport == "mpi":
        sys.exit()
    os._exit(0)


if __name__ == "__main__":
    run(*sys.argv[1:])
