"""A missing browser is installed where that is allowed; elsewhere the tests that need one are listed as not run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NEED_ONE = (HERE / "test_report_in_browser.py", HERE.parent / "cli" / "test_report.py")
UPDATE, INSTALL = "apt-get update", "apt-get install -y -qq --no-install-recommends chromium chromium-driver"


def install(folder: Path, user: int, tools: dict[str, int]) -> tuple[list[str], str]:
    """What install.sh calls, and what it says, if there are only these tools, which end with these exit codes."""
    calls = folder / "calls"
    calls.touch()
    (folder / "cat").symlink_to(shutil.which("cat") or "/bin/cat")
    scripts = {"id": f"echo {user}", **dict.fromkeys(("chromium", "chromedriver"), "")}
    for name, code in {"id": 0, **tools}.items():
        body = scripts.get(name, f'echo "{name} $*" >> {calls}')
        run = 'shift; "$@"' if name == "sudo" and code == 0 else f"exit {code}"
        (folder / name).write_text(f"#!/bin/sh\n{body}\n{run}\n")
        (folder / name).chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", HERE / "install.sh"], env={"PATH": str(folder)}, check=True, capture_output=True, text=True
    )
    return calls.read_text().splitlines(), done.stderr


def test_a_browser_that_is_there_is_used(tmp_path: Path) -> None:
    assert install(tmp_path, 0, {"chromium": 0, "chromedriver": 0, "apt-get": 0}) == ([], "")


@pytest.mark.parametrize("user", [0, 1000])
def test_a_browser_is_installed_by_root_and_by_sudo(tmp_path: Path, user: int) -> None:
    calls, said = install(tmp_path, user, {"chromium": 0, "apt-get": 0, "sudo": 0})
    by_apt = [call for call in calls if call.startswith("apt-get")]
    assert [call.startswith(start) for call, start in zip(by_apt, (UPDATE, INSTALL), strict=True)] == [True, True]
    assert len(calls) == (2 if user == 0 else 5), "sudo is used by others than root alone"
    assert said.startswith("installing chromium")
    assert "WARNING" not in said


@pytest.mark.parametrize(
    ("user", "tools", "called"),
    [
        (0, {}, 0),  # another system than Debian
        (0, {"apt-get": 100}, 1),  # no network
        (1000, {"apt-get": 0}, 0),  # no sudo
        (1000, {"apt-get": 0, "sudo": 1}, 1),  # sudo asks for a password
    ],
)
def test_where_it_cannot_be_installed_a_warning_says_so(
    tmp_path: Path, user: int, tools: dict[str, int], called: int
) -> None:
    calls, said = install(tmp_path, user, tools)
    assert len(calls) == called
    assert "WARNING: there is no chromium" in said
    assert "will not run. As root: apt-get install" in said


def test_tests_that_need_a_browser_are_listed_as_not_run(tmp_path: Path) -> None:
    files = [str(path) for path in NEED_ONE]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files, "-k", "browser or pictures"]
    nowhere = {"PATH": str(tmp_path), "BROWSER_PATH": str(tmp_path / "chromium")}
    done = subprocess.run(command, env=nowhere, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    _, _, said = done.stdout.partition("NOT RUN")
    assert "tests that need a browser, for reports and pictures, did not run: there is no chromium" in said
    assert "(apt-get install chromium chromium-driver fonts-dejavu-core)" in said
