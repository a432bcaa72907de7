"""A rank of a test world: connects as any rank does, then serves cases."""

import sys
from pathlib import Path
from typing import NoReturn

from worlds import COMM_TIMEOUT, serve

from paceline.errors import EXIT_OK
from paceline.launch.connect import connect
from paceline.launch.worker import finish

sys.path.extend(str(folder) for folder in Path(__file__).parent.iterdir() if folder.is_dir())


def run(path: str, transport: str) -> NoReturn:
    serve(connect(transport, COMM_TIMEOUT), path)
    finish(EXIT_OK)


if __name__ == "__main__":
    run(*sys.argv[1:])
