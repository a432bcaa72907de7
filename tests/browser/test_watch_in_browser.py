"""The page of `paceline watch` in a real browser: on runs that go on, end and are killed, and with hostile names."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import look
import pytest
from conftest import NO_BROWSER
from live_run import ENDLESS, LAUNCHERS, PACELINE, LiveRun, until
from made_up import steady, write_run
from raw_lines import RawWriter
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from paceline.run.folder import read_summary
from paceline.run.liveness import claim
from paceline.watch.server import Server
from paceline.watch.state import State

pytestmark = pytest.mark.skipif(look.programs() is None, reason=NO_BROWSER)

# A model that trains slowly until the test opens the gate, so that the test sees it under way, however fast it is.
GATED = """
import pathlib, time, torch
class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(784, 10)
    def forward(self, images):
        if not pathlib.Path({gate!r}).exists():
            time.sleep(0.05)
        return self.layer(images.flatten(1))
def build(classes):
    return Gated()
"""
HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    with look.browser() as started:
        yield started


@contextmanager
def serving(folder: Path, port: int | None = None) -> Iterator[Server]:
    with Server(State(folder), port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def visit(driver: Chrome, server: Server) -> None:
    driver.get("about:blank")
    look.console_problems(driver)  # a page of before, whose server has gone, complained
    driver.get(server.address)


def text(driver: Chrome, selector: str) -> str:
    """What is in the first such element; of one that is not shown, too."""
    return str(driver.execute_script("return document.querySelector(arguments[0]).textContent", selector))


def shown(driver: Chrome, selector: str) -> bool:
    found = driver.find_elements(By.CSS_SELECTOR, selector)
    return bool(found) and all(each.is_displayed() for each in found)


def count(driver: Chrome, selector: str) -> int:
    return len(driver.find_elements(By.CSS_SELECTOR, selector))


def steps(driver: Chrome) -> int:
    return int("".join(filter(str.isdigit, text(driver, "#steps").partition(" of ")[0])) or 0)


def share(driver: Chrome) -> float:
    return float(driver.execute_script("return parseFloat(document.querySelector('.bar div').style.width)") or 0)


def check_whole(driver: Chrome) -> None:
    """Nothing is wider than the window, at both widths; the browser has no complaint."""
    for width in (400, 1400):
        look.resize(driver, width)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert look.console_problems(driver) == []


def test_a_run_is_followed_from_its_first_steps_to_its_end(driver: Chrome, tmp_path: Path) -> None:
    (tmp_path / "gated.py").write_text(GATED.format(gate=str(tmp_path / "gate")))
    command = [*PACELINE, "--model", f"{tmp_path / 'gated.py'}:build", "--strategy", "ring", "--workers", "2",
               "--batch-size", "8", "--steps", "1000", "--validation", "0.1", "--evaluate-every", "500",
               "--threads", "1"]  # fmt: skip
    with LiveRun(command, tmp_path) as run:
        until("the run has begun", lambda: read_summary(run.folder))
        with serving(run.folder) as server:
            visit(driver, server)
            until("its steps are shown", lambda: 0 < steps(driver) < 1000)
            assert text(driver, "#status") == "running"
            assert "of 1,000" in text(driver, "#steps")
            before = steps(driver), share(driver)
            until("it goes on", lambda: steps(driver) > before[0] and share(driver) > before[1])
            until("both ranks and the node are shown", lambda: count(driver, "#ranks .rows > div") == 2
                  and count(driver, "#nodes .rows > div") == 1)  # fmt: skip
            assert "left" in text(driver, "#left")
            assert shown(driver, "#loss path, #rate path, .bar")
            assert not shown(driver, "#next")
            (tmp_path / "gate").touch()
            until("its end is shown", lambda: text(driver, "#status") == "completed")
            assert run.end() == 0
            assert text(driver, "#next code") == f"paceline report {run.folder}"
            assert shown(driver, "#next")
            assert (steps(driver), share(driver)) == (1000, 100)
            assert count(driver, "#loss circle.validation") == 2
            assert driver.title.startswith("completed")
            assert "test accuracy" in text(driver, "#figures")
            check_whole(driver)


def test_a_run_that_is_killed_with_its_launcher_is_shown_as_killed(driver: Chrome, tmp_path: Path) -> None:
    with LiveRun([*LAUNCHERS["shm"][:2], "--workers", "2", *ENDLESS], tmp_path) as run:
        run.wait_until_training()
        with serving(run.folder) as server:
            visit(driver, server)
            until("it is shown as running", lambda: text(driver, "#status") == "running")
            os.killpg(run.process.pid, signal.SIGKILL)
            for pid in run.living():
                os.kill(pid, signal.SIGKILL)
            run.end()
            until("its end is shown", lambda: text(driver, "#status") == "killed")
            assert f"its process {run.process.pid} on " in text(driver, "#said")
            assert "is gone: was it killed?" in text(driver, "#said")
            assert shown(driver, "#said, #next")
            assert text(driver, "#next code") == str(run.folder / "logs")
            assert text(driver, "#left") == ""
            check_whole(driver)


def hostile(folder: Path) -> Path:
    moves: dict[str, Any] = {"a": (1e3, 1e3)}
    write_run(folder, steady(0.1, 40), workers=8, losses=steady(1.0, 40), hosts=[HOSTILE, *"bcdefgh"], moves=moves,
              model=HOSTILE, data=HOSTILE, strategy=HOSTILE, status="failed", error=f"rank 0: {HOSTILE}",
              disturbed=HOSTILE)  # fmt: skip
    lines = RawWriter(folder / "node_a.jsonl")
    lines.write("node", schema=1, name=HOSTILE, cores=4, memory_bytes=1, period=0.5, clock="unix", own_processes=True)
    lines.close()
    lines = RawWriter(folder / "rank_0.jsonl")
    lines.write("step", step=HOSTILE)
    lines.close()
    return folder


def test_nothing_that_comes_from_a_run_is_taken_for_html(driver: Chrome, tmp_path: Path) -> None:
    with serving(hostile(tmp_path / HOSTILE.replace("/", "-"))) as server:
        visit(driver, server)
        until("it is shown", lambda: text(driver, "#status") == "failed")
        assert text(driver, "#title") == f"{HOSTILE} on {HOSTILE}"
        assert text(driver, "#said") == f"rank 0: {HOSTILE}"
        for selector in ("#about", "#folder", "#ranks .rows", "#nodes .rows", "#notes", "#next code"):
            assert "<img src=x onerror" in text(driver, selector), selector
        assert count(driver, "img") == 0
        assert count(driver, "script") == 1
        assert driver.title == f"failed · {HOSTILE} on {HOSTILE}"
        check_whole(driver)


def test_a_page_whose_server_has_gone_says_so_and_recovers(driver: Chrome, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steady(0.1, 40), workers=2, status="running")
    claim(folder)
    with serving(folder) as server:
        visit(driver, server)
        until("it is shown", lambda: text(driver, "#status") == "running")
        assert not shown(driver, "#lost")
        port = server.server_port
    until("it says so", lambda: shown(driver, "#lost"))
    assert text(driver, "#lost").startswith("paceline watch does not answer")
    assert steps(driver) == 40
    with serving(folder, port):
        until("it has recovered", lambda: not shown(driver, "#lost"))
