"""Messages: on standard error, as people know them from the command; a library leaves logging to its user."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from paceline import messages


def test_messages_go_to_standard_error_marked_by_their_level(capsys: pytest.CaptureFixture[str]) -> None:
    lab = logging.getLogger("paceline.lab")
    for level in ("WARNING", "INFO", "DEBUG"):
        messages.configure(level)
        messages.LOGGER.debug("which %s", "port")
        messages.LOGGER.info("it goes on")
        messages.LOGGER.warning("a \x1b[2J name")
        lab.error("it is down")
    loud = [r"paceline: warning: a \x1b[2J name", "paceline lab: it is down"]
    usual = ["paceline: it goes on", *loud]
    assert capsys.readouterr() == ("", "".join(f"{line}\n" for line in [*loud, *usual, "paceline: which port", *usual]))


@pytest.mark.parametrize(("level", "quiet"), [("WARNING", True), ("INFO", False), ("DEBUG", False)])
def test_only_warnings_and_errors_is_quiet(level: str, quiet: bool) -> None:
    messages.configure(level)
    assert messages.quiet() == quiet


def test_a_library_does_not_configure_logging() -> None:
    code = "import logging, paceline; paceline.RunSpec, paceline.train; log = logging.getLogger('paceline'); "
    code += "import sys; sys.exit(bool(log.handlers or log.level or logging.root.handlers))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
