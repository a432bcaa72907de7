"""A rank that the kernel kills because memory ran out is reported as that, and one that a person kills is not."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_run import ENDLESS, OURS, LiveRun, launchers, until
from own_modules import LEAKING

from paceline.control_groups import mounted
from paceline.run.records import FAILED

LIMIT = 1 << 30


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with 1 GiB of memory and no swap."""
    found = mounted("memory") if os.getuid() == 0 else None
    if found is None:
        pytest.skip("needs root and control groups with the memory controller")
    root, version = found
    folder = root / f"paceline-test-{os.getpid()}"
    limit, swap = (("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if version == 1
                   else ("memory.max", "memory.swap.max"))  # fmt: skip
    try:
        if version == 2:
            (root / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT))
        if (folder / swap).exists():
            (folder / swap).write_text(str(LIMIT) if version == 1 else "0")
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"control groups cannot be created here: {error}")
    yield folder
    until("its processes have ended", lambda: not (folder / "cgroup.procs").read_text(), 15)
    folder.rmdir()


def inside(group: Path, launcher: str, *words: str) -> list[str]:
    """A command for two ranks that runs in the group from its start."""
    return ["/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *launchers(2)[launcher], *words]


@pytest.mark.parametrize("launcher", launchers(2))
def test_a_rank_that_the_kernel_killed_is_named_with_its_memory_and_the_limit(
    launcher: str, group: Path, tmp_path: Path
) -> None:
    (tmp_path / "leaking.py").write_text(LEAKING)
    words = ["--model", "leaking:build", "--strategy", "ring", "--steps", "1000000", "--log-every", "0"]
    with LiveRun(inside(group, launcher, *words), tmp_path, cwd=tmp_path) as run:
        assert run.end() != 0
        summary = run.summary()
        assert (summary.status, summary.failed_rank) == (FAILED, 1), run.stderr()
        error = str(summary.error)
        assert error.startswith("its process was killed by the kernel because memory ran out: "), error
        assert error.endswith(f"the control group {group} is limited to 1.00 GiB"), error
        if launcher in OURS:  # our launcher watches its ranks
            used = re.search(r": it used at least (\d\.\d\d) GiB, and the", error)
            assert used, error
            assert float(used[1]) > 0.4, "without the leak it is less"
            assert f"paceline: rank 1 failed: {error}\n  its log: {run.folder / 'logs' / 'rank_1.log'}" in run.stderr()
        run.check_nothing_is_left()


def test_a_worker_of_a_parameter_server_is_lost_with_a_warning_that_says_why(group: Path, tmp_path: Path) -> None:
    (tmp_path / "leaking.py").write_text(LEAKING)
    words = ["--model", "leaking:build", "--strategy", "ps-async", "--steps", "2000", "--worker-timeout", "2"]
    with LiveRun(inside(group, "shm", *words), tmp_path, cwd=tmp_path) as run:
        assert run.end() == 0, run.stderr()
        (warning,) = [line for line in run.stderr().splitlines() if "because memory ran out" in line]
        assert "rank 1: its process was killed by the kernel" in warning
        assert warning.endswith(f"the control group {group} is limited to 1.00 GiB")
        assert [lost["rank"] for lost in run.summary().own_figures["lost_workers"]] == [1]
        run.check_nothing_is_left()


@pytest.mark.parametrize("launcher", ["shm", "torchrun"])
def test_a_rank_that_was_killed_by_hand_did_not_run_out_of_memory(launcher: str, group: Path, tmp_path: Path) -> None:
    with LiveRun(inside(group, launcher, *ENDLESS), tmp_path) as run:
        until("it trains", lambda: run.process.poll() is not None or run.logged() > 3)
        os.kill(run.pid(1), signal.SIGKILL)
        assert run.end() == 1, run.stderr()
        how = "was killed by signal 9" if launcher == "shm" else "exited without an error message"
        assert (run.summary().failed_rank, run.summary().error) == (1, f"its process {how}")
        run.check_nothing_is_left()
