"""Entry point of `python -m paceline` and `torchrun -m paceline`."""

import os
import sys

# `python -m` puts the working folder first, where a user's random.py would replace Python's.
if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
    sys.path.append(sys.path.pop(0))

from paceline.cli import main

sys.exit(main())
