"""The command line: `paceline VERB`."""

from paceline.cli.main import main

__all__ = ["main"]
