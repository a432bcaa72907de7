"""The command line: `paceline COMMAND`."""

import sys

try:
    from paceline.cli.main import main
except KeyboardInterrupt:
    sys.exit(130)  # EXIT_INTERRUPTED, which may not have been imported yet

__all__ = ["main"]
