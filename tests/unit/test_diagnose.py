"""How a run ended and who is to blame, from what its ranks left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from raw_lines import RawWriter

from paceline.launch.diagnose import diagnose, failed_before, find_stopped, wait_for_blame
from paceline.run.folder import read_summary, write_summary
from paceline.run.records import COMPLETED, FAILED, INTERRUPTED, RUNNING, Summary

LOST = "rank {} of 3 lost another rank while trying to sum with it over gloo: Connection closed by peer"


def own(error: str, time: float, **values: Any) -> dict[str, Any]:
    """As a rank writes an error that is its own."""
    return {"kind": "error", "error": error, "time": time, "own": True, "exit_code": 1, "everyone": False, **values}


def lost(rank: int, time: float, peer: int | None = None, **values: Any) -> dict[str, Any]:
    """As a rank writes that it lost another."""
    return own(LOST.format(rank), time, own=False, peer=peer, **values)


class Run:
    """A run folder of three ranks that have taken two steps of an epoch after a whole one."""

    def __init__(self, folder: Path, status: str | None = RUNNING) -> None:
        self.folder = folder
        (folder / "logs").mkdir()
        if status is not None:
            write_summary(folder, Summary(status, "ring", 3, "gloo", "mlp", "mnist-mini", 8, 24, 5, 0))
            step = {"kind": "step", "epoch": 0, "time": 1.0, "seconds": 0.5, "samples": 24, "spans": {}}
            self.write(0, {"kind": "start"}, step | {"step": 0})
            epoch = {"kind": "epoch", "epoch": 0, "seconds": 1.5, "samples": 24, "loss": 2.25, "accuracy": 0.5}
            self.write(0, epoch, step | {"step": 1})
            self.write(0, step | {"step": 2})
            self.write(1, {"kind": "start"})
            self.write(2, {"kind": "start"})

    def write(self, rank: int, *records: dict[str, Any]) -> None:
        lines = RawWriter(self.folder / f"rank_{rank}.jsonl")
        for record in records:
            lines.write(**record)
        lines.close()

    def write_ranks(self, *pids: int, host: str | None = None) -> None:
        rows = [
            {"rank": r, "role": "worker", "host": host or socket.gethostname(), "pid": p} for r, p in enumerate(pids)
        ]
        (self.folder / "env.json").write_text(json.dumps({"schema": 1, "ranks": rows}))

    def saved(self) -> Summary:
        summary = read_summary(self.folder)
        assert summary is not None
        return summary


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture(params=["gone", "zombie"])
def gone(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of a process that has ended, whether its parent has taken note or not."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if request.param == "gone":
            process.wait()
        yield process.pid


def test_a_rank_with_an_error_of_its_own_is_blamed_whoever_noticed_first(run: Run) -> None:
    run.write(0, lost(0, 10.0, peer=2))
    run.write(1, own("ValueError: bad sample", 11.0))
    run.write(2, lost(2, 10.5))
    ending = diagnose(run.folder, {0: 1, 1: 1, 2: 1})
    assert ending.exit_code == 1
    assert ending.message == f"rank 1 failed: ValueError: bad sample\n  its log: {run.folder / 'logs' / 'rank_1.log'}"
    assert (run.saved().status, run.saved().failed_rank, run.saved().error) == (FAILED, 1, "ValueError: bad sample")
    assert ending.summary == run.saved()


def test_of_two_errors_the_earlier_counts(run: Run) -> None:
    run.write(0, own("late", 12.0))
    run.write(2, own("early", 11.0))
    diagnose(run.folder, {0: 1, 1: -9, 2: 1})
    assert (run.saved().failed_rank, run.saved().error) == (2, "early")


def test_a_rank_that_saw_anothers_error_failed_after_it_whatever_its_clock_says(run: Run) -> None:
    run.write(2, own("ValueError: the first", 5000.0, after=[]))
    run.write(0, own("KeyError: the second, on a machine whose clock is slow", 1000.0, after=[2]))
    assert failed_before(run.folder, 1, 3) == (0, 2)
    ending = diagnose(run.folder)
    assert (run.saved().failed_rank, run.saved().error) == (2, "ValueError: the first"), ending.message


def test_what_had_been_measured_is_kept(run: Run) -> None:
    run.write(1, own("ValueError: bad sample", 11.0))
    diagnose(run.folder, {1: 1})
    summary = run.saved()
    assert (summary.steps, summary.epoch_seconds, summary.train_loss, summary.train_accuracy) == (
        3,
        [1.5],
        [2.25],
        [0.5],
    )


@pytest.mark.parametrize(("code", "how"), [(-9, "killed by signal 9"), (3, "exited with code 3")])
def test_a_rank_that_vanished_is_blamed_by_its_exit_code(run: Run, code: int, how: str) -> None:
    run.write(0, lost(0, 10.0, peer=1))
    run.write(1, lost(1, 10.0))
    ending = diagnose(run.folder, {0: 1, 1: 1, 2: code})
    assert ending.exit_code == 1
    assert ending.message.startswith("rank 2 failed: ")
    assert how in ending.message
    assert str(run.folder / "logs" / "rank_2.log") in ending.message
    assert run.saved().failed_rank == 2


@pytest.mark.parametrize("exits", [{2: -9}, {2: -11}, {2: 1}, None], ids=["SIGKILL", "SIGSEGV", "exit", "unknown"])
def test_only_a_death_by_sigkill_is_explained_by_a_lack_of_memory(run: Run, gone: int, exits: Any) -> None:
    run.write_ranks(os.getpid(), os.getpid(), gone)
    diagnose(run.folder, exits, memory_kill=lambda rank: f"was killed for memory as rank {rank}")
    explained = exits in ({2: -9}, None)
    assert run.saved().failed_rank == 2
    assert (run.saved().error == "its process was killed for memory as rank 2") is explained
    assert ("memory" in str(run.saved().error)) is explained


def test_a_rank_whose_process_is_gone_is_blamed_where_no_exit_code_is_known(run: Run, gone: int) -> None:
    run.write_ranks(os.getpid(), gone, os.getpid())
    run.write(0, lost(0, 10.0, peer=2))
    run.write(2, lost(2, 10.5, peer=0))
    ending = diagnose(run.folder)
    assert ending.message.startswith("rank 1 failed: its process exited")
    assert run.saved().failed_rank == 1


def test_a_process_number_of_another_machine_blames_nobody(run: Run, gone: int) -> None:
    run.write_ranks(gone, gone, gone, host="another-machine")
    run.write(0, lost(0, 10.0, peer=2))
    diagnose(run.folder)
    assert run.saved().failed_rank == 2


def test_a_rank_that_was_told_to_end_did_not_vanish(run: Run, gone: int) -> None:
    run.write_ranks(gone, gone, gone)
    run.write(0, lost(0, 10.0))
    run.write(1, {"kind": "signal", "signal": 15, "time": 9.0})
    diagnose(run.folder)
    assert run.saved().failed_rank == 2


def test_a_rank_that_others_waited_for_in_vain_is_blamed(run: Run) -> None:
    run.write_ranks(os.getpid(), os.getpid(), os.getpid())
    run.write(0, lost(0, 11.0, peer=1, timeout=True))
    run.write(2, lost(2, 10.0, peer=1, timeout=True))
    ending = diagnose(run.folder)
    assert run.saved().failed_rank == 1
    assert ending.message.startswith(f"rank 1 failed: {LOST.format(2)}")


def test_a_rank_that_lost_one_that_had_given_up_waiting_is_no_cause(run: Run) -> None:
    run.write(0, lost(0, 11.0, peer=2))
    run.write(1, lost(1, 11.2, peer=0, timeout=True))
    run.write(2, lost(2, 11.1, peer=1, timeout=True))
    diagnose(run.folder)
    waits = "rank 1 for rank 0, rank 2 for rank 1"
    assert run.saved().error == f"the ranks waited for each other until the deadline ({waits}): is a link down?"
    assert run.saved().failed_rank is None


def test_in_a_ring_a_neighbour_that_waited_too_is_not_blamed(run: Run) -> None:
    run.write(0, lost(0, 10.0, peer=2, timeout=True))
    run.write(2, lost(2, 11.0, peer=1, timeout=True))
    diagnose(run.folder, {0: 1, 2: 1})
    assert run.saved().failed_rank == 1


def test_a_rank_that_was_ended_because_others_had_waited_too_long_is_blamed_for_that(run: Run) -> None:
    run.write(0, lost(0, 10.0, peer=1, timeout=True))
    run.write(2, lost(2, 10.5))
    ending = diagnose(run.folder, {0: 1, 1: -9, 2: 1})
    assert run.saved().failed_rank == 1
    assert LOST.format(0) in ending.message


def test_a_stopped_process_is_found(run: Run) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            run.write_ranks(os.getpid(), process.pid, os.getpid())
            assert find_stopped(run.folder, 3) is None
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            assert find_stopped(run.folder, 3) == 1
        finally:
            process.kill()


def test_ranks_that_end_without_a_word_are_not_called_rank_none(run: Run) -> None:
    ending = diagnose(run.folder, {0: 0, 1: 0, 2: 0})
    assert (ending.exit_code, run.saved().status, run.saved().failed_rank) == (1, FAILED, None)
    assert "None" not in ending.message


def test_a_training_that_diverged_is_nobodys_fault(run: Run) -> None:
    for rank in range(3):
        run.write(rank, own("the loss is nan after step 3", 10.0 + rank, everyone=True))
    ending = diagnose(run.folder, {0: 1, 1: 1, 2: 1})
    assert ending.exit_code == 1
    assert ending.message.startswith("the loss is nan after step 3\n")
    assert (run.saved().status, run.saved().failed_rank) == (FAILED, None)


def test_a_usage_error_of_a_rank_is_a_usage_error_of_the_run(run: Run) -> None:
    run.write(0, lost(0, 10.0))
    run.write(1, own("--weights w are of another model", 11.0, exit_code=2))
    assert diagnose(run.folder, {0: 1, 1: 2, 2: 1}).exit_code == 2
    assert run.saved().status == FAILED


def test_interrupted_ranks_that_lost_each_other_are_interrupted(run: Run) -> None:
    run.write(0, lost(0, 10.0))
    run.write(1, {"kind": "signal", "signal": 2, "time": 9.0})
    ending = diagnose(run.folder, {0: 1, 1: 130}, interrupted=True)
    assert (ending.exit_code, run.saved().status, run.saved().failed_rank) == (130, INTERRUPTED, None)
    assert run.saved().steps == 3


def test_an_error_counts_though_ctrl_c_came_too(run: Run) -> None:
    run.write(1, own("ValueError: bad sample", 11.0))
    assert diagnose(run.folder, {0: 1, 1: 1, 2: 1}, interrupted=True).exit_code == 1
    assert (run.saved().status, run.saved().failed_rank) == (FAILED, 1)


def test_a_run_that_has_failed_is_not_interrupted_by_what_mpiexec_sends_the_ranks_then(run: Run) -> None:
    """A rank that waited in vain settles the run and aborts; MPI_Abort's SIGTERM makes the others settle it, too."""
    run.write_ranks(os.getpid(), os.getpid(), os.getpid())
    run.write(0, lost(0, 10.0, peer=1, timeout=True))
    before = diagnose(run.folder)
    run.write(2, {"kind": "signal", "signal": 15, "time": 9.0})
    assert diagnose(run.folder, interrupted=True) == before
    assert (run.saved().status, run.saved().failed_rank, run.saved().error) == (FAILED, 1, LOST.format(0))


def test_ranks_that_settle_a_run_at_the_same_time_agree(run: Run) -> None:
    """One by one, each 20 times; without a lock, what one has read is old when it writes."""
    run.write_ranks(os.getpid(), os.getpid(), os.getpid())
    run.write(0, lost(0, 10.0, peer=1, timeout=True))
    for _ in range(20):
        write_summary(run.folder, Summary(RUNNING, "ring", 3, "gloo", "mlp", "mnist-mini", 8, 24, 5, 0))
        with ThreadPoolExecutor(4) as pool:
            codes = set(pool.map(lambda by_signal: diagnose(run.folder, interrupted=by_signal).exit_code, [0, 1, 1, 1]))
        assert codes == {130 if run.saved().status == INTERRUPTED else 1}


def test_a_summary_that_cannot_be_written_is_told_with_the_rank(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write(1, own("no space left", 11.0))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.launch.diagnose.write_summary", full)
    ending = diagnose(run.folder, {0: 1, 1: 1, 2: 1})
    assert ending.exit_code == 1
    assert ending.message.startswith("rank 1 failed: no space left\n")
    assert "its summary cannot be written (No space left on device)" in ending.message


@pytest.mark.parametrize(("status", "code"), [(COMPLETED, 0), (INTERRUPTED, 130)])
def test_what_rank_0_has_settled_stays(tmp_path: Path, status: str, code: int) -> None:
    run = Run(tmp_path, status)
    before = (tmp_path / "summary.json").read_bytes()
    run.write(1, lost(1, 10.0, peer=0))
    assert diagnose(tmp_path, {0: 0, 1: 1, 2: -9}, interrupted=True).exit_code == code
    assert (tmp_path / "summary.json").read_bytes() == before


def test_a_rank_waits_for_the_one_with_the_real_error_and_no_longer(
    run: Run, gone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            run.write(1, own("ValueError: bad sample", 11.0))

    monkeypatch.setattr("time.sleep", nap)
    run.write_ranks(os.getpid(), os.getpid(), os.getpid())
    run.write(0, lost(0, 10.0))
    wait_for_blame(run.folder, 0, 60)
    assert len(naps) == 3
    (run.folder / "rank_1.jsonl").unlink()
    run.write_ranks(os.getpid(), os.getpid(), gone)
    wait_for_blame(run.folder, 0, 60)
    assert len(naps) == 3


# Before rank 0 has written a summary.


def test_a_run_that_never_began_points_to_its_logs(tmp_path: Path) -> None:
    ending = diagnose(Run(tmp_path, None).folder, {0: 1})
    assert (ending.summary, ending.exit_code) == (None, 1)
    assert str(tmp_path / "logs") in ending.message


def just_begun(folder: Path) -> Path:
    """A run folder as the launcher makes it, before any rank is up."""
    (folder / "logs").mkdir()
    write_summary(folder, Summary(RUNNING, "ring", 2, "gloo", "mlp", "mnist-mini", 8, 24, 5, 0))
    return folder


def test_a_usage_error_before_the_first_step_is_told_with_its_reason(tmp_path: Path) -> None:
    lines = RawWriter(just_begun(tmp_path) / "rank_0.jsonl")
    lines.write(**own("--device cuda: this PyTorch sees no GPU here", 10.0, exit_code=2))
    lines.close()
    ending = diagnose(tmp_path, {0: 2})
    assert ending.message == "rank 0 failed: --device cuda: this PyTorch sees no GPU here"
    assert ending.exit_code == 2


def test_an_error_of_the_only_process_is_told_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    write_summary(tmp_path, Summary(RUNNING, "sequential", 1, "single", "mlp", "mnist-mini", 8, 8, 5, 0))
    lines = RawWriter(tmp_path / "rank_0.jsonl")
    lines.write(**own("--model x: there is no such module", 10.0, exit_code=2, everyone=True))
    lines.close()
    assert diagnose(tmp_path, {0: 2}).message == "--model x: there is no such module"


def test_ctrl_c_before_the_ranks_are_up_is_an_interruption(tmp_path: Path) -> None:
    assert diagnose(just_begun(tmp_path), {0: -2, 1: -2}, interrupted=True).exit_code == 130
