"""Ranks are forked from one process that has imported torch; it and they end together, and nobody waits for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kills
import pytest
from live_run import ENDLESS, LAUNCHERS, LiveRun, until

from paceline.launch import zygote
from paceline.launch.zygote import ForkedRank, Zygote

TEST_PROGRAM = "import sys; from paceline.launch import zygote; zygote.main([{module!r}], 'run')"


def forked(rank: ForkedRank) -> int:
    """The rank's pid, once there is one."""
    pid: int = until("it is forked", lambda: rank.poll() or rank.pid)
    return pid


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[Zygote]:
    """A zygote whose ranks do what a small module says."""
    (tmp_path / "small.py").write_text(
        "import os, sys, time\n"
        "def run(what, *rest):\n"
        "    if what == 'exit': os._exit(int(rest[0]))\n"
        "    if what == 'raise': raise ValueError('a mistake')\n"
        "    if what == 'tell': open(rest[0], 'w').write(os.environ['WHO'])\n"
        "    if what == 'wait': time.sleep(1000)\n"
        "    os._exit(0)\n"
    )
    program = [sys.executable, "-c", TEST_PROGRAM.format(module="small")]
    made = Zygote(program, dict(os.environ) | {"PYTHONPATH": str(tmp_path)}, subprocess.DEVNULL)
    yield made
    made.kill()


def test_ranks_get_their_own_variables_and_report_how_they_ended(forks: Zygote, tmp_path: Path) -> None:
    ranks = [forks.fork(f"r{i}", ["tell", str(tmp_path / str(i))], {"WHO": str(i)}) for i in range(3)]
    assert [rank.wait(30) for rank in ranks] == [0, 0, 0]
    assert [(tmp_path / str(i)).read_text() for i in range(3)] == ["0", "1", "2"]
    assert forks.fork("r", ["exit", "7"], {}).wait(30) == 7
    assert forks.fork("r", ["raise"], {}).wait(30) == 1
    waiting = forks.fork("waits", ["wait"], {})
    pid = forked(waiting)
    until("it has its name and a session", lambda: Path(f"/proc/{pid}/comm").read_text() == "waits\n")
    assert os.getsid(pid) == pid
    os.kill(pid, signal.SIGTERM)
    assert waiting.wait(30) == -signal.SIGTERM


def test_the_pid_of_a_rank_that_has_ended_stays_its_own(forks: Zygote) -> None:
    rank = forks.fork("r", ["exit", "0"], {})
    rank.wait(30)
    assert rank.pid is not None
    assert kills.parent(rank.pid) == forks.process.pid  # a zombie: nobody else can get its number


def test_at_the_end_it_reaps_its_ranks(forks: Zygote) -> None:
    ranks = [forks.fork("r", ["exit", "0"], {}), forks.fork("r", ["wait"], {})]
    pids = [forked(rank) for rank in ranks]
    os.kill(pids[1], signal.SIGKILL)
    forks.end()
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL]
    assert forks.process.returncode == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_when_it_dies_its_ranks_do_and_those_it_was_asked_for_are_not_waited_for(forks: Zygote) -> None:
    rank = forks.fork("r", ["wait"], {})
    pid = forked(rank)
    forks.process.kill()
    late = forks.fork("r", ["wait"], {})
    assert (rank.wait(30), late.wait(30)) == (-signal.SIGKILL, -signal.SIGKILL)
    until("the rank has gone", lambda: not Path(f"/proc/{pid}").exists())


def test_a_rank_that_ends_while_the_zygote_is_stopped_is_noticed(
    forks: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote, "REPORT_SECONDS", 0.2)
    rank = forks.fork("r", ["wait"], {})
    pid = forked(rank)
    os.kill(forks.process.pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGTERM)
    assert rank.wait(30) == -signal.SIGKILL  # how it ended is not known


def test_a_process_with_threads_is_not_forked(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(100,), daemon=True).start()\n"
        "def run(): ...\n"
    )
    program = [sys.executable, "-c", TEST_PROGRAM.format(module="threaded")]
    made = Zygote(program, dict(os.environ) | {"PYTHONPATH": str(tmp_path)}, None)
    assert made.fork("r", [], {}).wait(30) == 1
    assert made.dead


def test_importing_what_ranks_need_runs_no_torch_operation() -> None:
    """Locks and threads of torch's kernels do not survive a fork."""
    code = (
        "import json, torch\n"
        "with torch.autograd.profiler.profile() as ran:\n"
        "    import paceline.launch.worker, paceline.launch.served_rank, torch.fx.experimental.symbolic_shapes\n"
        "with torch.autograd.profiler.profile() as one:\n"
        "    torch.ones(2)\n"
        "print(*(json.dumps([each.name for each in events.function_events]) for events in (ran, one)), sep='\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ran, one = done.stdout.splitlines()[-2:]
    assert "aten::" not in ran
    assert "aten::ones" in json.loads(one), "it would be seen"


def test_all_ranks_have_one_parent_and_die_with_it(tmp_path: Path) -> None:
    with LiveRun(LAUNCHERS["shm"] + ENDLESS, tmp_path) as run:
        run.wait_until_training()
        kills.kill_zygote(run)
