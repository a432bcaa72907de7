"""A rank of a test world: connects as any rank does, then serves cases."""

import os
import sys
from pathlib import Path

from worlds import COMM_TIMEOUT, serve

from paceline.launch.connect import connect

if __name__ == "__main__":
    path, transport = sys.argv[1:]
    sys.path.extend(str(folder) for folder in Path(__file__).parent.iterdir() if folder.is_dir())
    serve(connect(transport, COMM_TIMEOUT), path)
    sys.stdout.flush()
    if transport != "mpi":
        os._exit(0)
