"""paceline.record: a run folder from a user's loop, whatever the loop does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from raw_lines import raw_lines
from torch import Tensor, nn
from worlds import ThreadWorld

import paceline
from paceline.analysis.learning import moments
from paceline.analysis.runs import Run, read_run
from paceline.analysis.setting import setting_of
from paceline.comm.base import Comm
from paceline.comm.single import SingleComm
from paceline.errors import AgreedError, CommError, UsageError
from paceline.launch.recorded_rank import is_own
from paceline.loop.record import RecordedLoop, Terminated, record
from paceline.run.folder import read_nodes, read_summary
from paceline.run.liveness import current_summary
from paceline.run.records import COMPLETED, FAILED, INTERRUPTED

INPUTS = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.tensor([0, 1, 2, 0, 1, 2])


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


class Loop:
    """A loop of the user's: a model, an optimizer, and a step."""

    def __init__(self, folder: Path, model: nn.Module | None = None, comm: Comm | None = None, **options: Any) -> None:
        self.folder, self.model = folder, model or make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.recorded = record(folder, self.model, comm=comm or SingleComm(), **options)

    def update(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(INPUTS), TARGETS)
        loss.backward()
        self.optimizer.step()
        return loss

    def steps(self, run: RecordedLoop, count: int, epoch: int | None = None, **figures: Any) -> None:
        for _ in range(count):
            with run.step(epoch=epoch) as step:
                step.log(**{"loss": self.update(), **figures})

    def lines(self, kind: str = "step") -> list[dict[str, Any]]:
        return [line for line in raw_lines(self.folder / "rank_0.jsonl") if line["kind"] == kind]

    def status(self) -> tuple[str, str | None]:
        summary = read_summary(self.folder)
        assert summary
        return summary.status, summary.error


def complete(folder: Path) -> Run:
    run = read_run(folder)
    assert isinstance(run, Run), run
    return run


def test_a_plain_loop_leaves_a_run_that_analysis_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It counts epochs from 1, validates twice in each, and says what it was set to."""
    loop = Loop(tmp_path / "run", settings={"lr": 0.5, "gamma": 0.7, "folder": tmp_path / "run"}, epochs=2)
    with loop.recorded as run:
        for epoch in (1, 2):
            for _ in range(2):
                loop.steps(run, 3, epoch, accuracy=0.5)
                run.validation(loss=1.0 / run._next, accuracy=0.25, f1=0.1)
        run.test(loss=torch.tensor(0.5), accuracy=0.75)
    found = complete(loop.folder)
    summary = found.summary
    assert (summary.status, summary.strategy, summary.model, summary.task) == (
        COMPLETED,
        "own-loop",
        "Linear",
        "classification",
    )
    assert (summary.steps, summary.epochs, summary.batch_size, summary.parameters) == (12, 2, 6, 15)
    assert summary.train_accuracy == [0.5, 0.5]
    assert (summary.validation_steps, summary.validation_metrics) == ([3, 6, 9, 12], [{"f1": 0.1}] * 4)
    assert (summary.test_loss, summary.test_accuracy) == (0.5, 0.75)
    assert [line["step"] for line in loop.lines()] == list(range(12))
    assert [line["epoch"] for line in loop.lines()] == [0] * 6 + [1] * 6
    losses = [line["loss"] for line in loop.lines()]
    assert summary.train_loss == [pytest.approx(sum(losses[:6]) / 6), pytest.approx(sum(losses[6:]) / 6)]
    assert {line["lr"] for line in loop.lines()} == {0.5}, "the optimizer's"
    assert [m.validation_loss for m in moments(found)] == pytest.approx([1 / 3, 1 / 6, 1 / 9, 1 / 12])
    said = setting_of(found).given()
    assert "gamma 0.7" in said
    assert "learning rate 0.5" in said
    assert "folder" not in said
    assert read_nodes(loop.folder), "the node was sampled"
    assert json.loads((loop.folder / "env.json").read_text())["ranks"][0]["pid"] == os.getpid()
    assert capsys.readouterr().out == f"Run folder: {loop.folder}\n"


def test_the_spans_of_a_step_are_found_by_hooks(tmp_path: Path) -> None:
    loop, found = Loop(tmp_path), dict[str, str]()

    def note(where: str) -> None:
        found.setdefault(where, run._spans._phase)

    def when_a_gradient_is_there(_: Tensor) -> None:
        note("layer")
        torch.autograd.Variable._execution_engine.queue_callback(lambda: note("averaging"))  # as DDP does

    next(loop.model.parameters()).register_hook(when_a_gradient_is_there)
    loop.model.register_forward_hook(lambda *_: note("model"))
    loop.optimizer.register_step_pre_hook(lambda *_: note("optimizer"))
    with loop.recorded as run:
        with run.step() as step:
            note("begin")
            outputs = loop.model(INPUTS)
            note("loss")
            F.cross_entropy(outputs, TARGETS).backward()
            note("after backward")
            loop.optimizer.step()
            with run.span("clip"), run.span("norm"):
                loop.model(INPUTS)
                note("span")
            note("end")
            step.log(loss=1)
        with run.span("save"):
            pass
        loop.steps(run, 1)
    assert found == {"begin": "", "model": "forward", "loss": "forward", "layer": "backward", "averaging": "wait",
                     "after backward": "", "optimizer": "optimizer", "span": "norm", "end": ""}  # fmt: skip
    first, second = (line["spans"] for line in loop.lines())
    assert list(first) == ["input", "forward", "backward", "wait", "optimizer", "clip", "norm"]
    assert list(second) == ["input", "save", "forward", "backward", "wait", "optimizer"]
    for line in loop.lines():
        assert 0 < sum(line["spans"].values()) <= line["seconds"] + 1e-5


def test_time_in_which_the_model_was_evaluated_is_no_input(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with loop.recorded as run:
        loop.steps(run, 2)
        with torch.no_grad():
            loop.model(INPUTS)
        loop.steps(run, 2)
        run.validation(loss=0.5)  # by a part of the model, perhaps
        loop.steps(run, 1)
    assert ["input" in line["spans"] for line in loop.lines()] == [True, True, False, True, False]


class Nested(nn.Module):
    """Takes keywords, and returns a table."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = make_model()

    def forward(self, *, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"out": [self.layer(batch["x"])], "n": 1}


def test_parts_of_a_batch_add_up_and_the_samples_of_each_are_counted(tmp_path: Path) -> None:
    loop = Loop(tmp_path, Nested())
    with loop.recorded as run:
        with run.step():
            for part in INPUTS.split(4):
                loop.model(batch={"x": part})["out"][0].sum().backward()
            with torch.no_grad():
                loop.model(batch={"x": INPUTS})
            loop.optimizer.step()
        with run.step(samples=17):
            loop.model(batch={"x": INPUTS})
    assert [(line["own"], line["samples"]) for line in loop.lines()] == [(6, 6), (17, 17)]
    assert loop.lines()[0]["spans"].keys() == {"input", "forward", "backward", "wait", "optimizer"}


def misuse(wrong: Callable[[Loop, RecordedLoop], Any]) -> Callable[[Path], None]:
    def case(folder: Path) -> None:
        loop = Loop(folder)
        with loop.recorded as run:
            loop.steps(run, 1)
            wrong(loop, run)

    return case


def nest(loop: Loop, run: RecordedLoop) -> None:
    with run.step(), run.step():
        pass


def leave_open(loop: Loop, run: RecordedLoop) -> None:
    run.step().__enter__()


def do_nothing(loop: Loop, run: RecordedLoop) -> None:
    with run.step():
        pass


MISUSES = {
    "step 1 has not ended: steps cannot be nested": nest,
    "step 1 was not closed: use run.step() in a with statement": leave_open,
    "run.step(samples=0): give this rank's number of samples, at least 1": lambda loop, run: run.step(samples=0),
    "run.step(epoch=-1): give the number of the epoch": lambda loop, run: run.step(epoch=-1),
    "step 1: the number of samples is not known": do_nothing,
    "step.log(loss=…): a tensor of shape [6]": lambda loop, run: loop.steps(run, 1, loss=torch.zeros(6)),
    "step.log(note='high'): give a number": lambda loop, run: loop.steps(run, 1, note="high"),
}


@pytest.mark.parametrize("message", MISUSES)
def test_a_wrong_use_ends_the_run_with_a_message(message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        misuse(MISUSES[message])(tmp_path)
    assert str(caught.value).startswith(message)
    summary = read_summary(tmp_path)
    assert summary
    assert (summary.status, summary.steps) == (FAILED, 1)
    assert (summary.error or "").startswith(message)


def test_steps_and_spans_are_only_within_the_run(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for use in (lambda: loop.steps(loop.recorded, 1), lambda: loop.recorded.span("x"), lambda: loop.recorded.test(1.0)):
        with pytest.raises(UsageError, match=r"outside of `with paceline\.record"):
            use()
    with loop.recorded as run:
        loop.steps(run, 1)
    with pytest.raises(UsageError, match="outside"):
        loop.steps(loop.recorded, 1)
    assert complete(tmp_path).summary.steps == 1


def test_a_folder_is_not_written_to_by_two(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot make the run folder .*Not a directory"):
        Loop(tmp_path / "file" / "run").recorded.__enter__()
    with pytest.raises(UsageError, match=r"start=5: .* has no run to continue"):
        Loop(tmp_path / "run", start=5).recorded.__enter__()
    loop = Loop(tmp_path / "run")
    with loop.recorded as run:
        with pytest.raises(AgreedError, match=rf"in use by process {os.getpid()} on .*: wait until it ends, or choose"):
            Loop(tmp_path / "run").recorded.__enter__()
        loop.steps(run, 2)
    with pytest.raises(UsageError, match="has a run that is complete, and start=2: leave start out"):
        Loop(tmp_path / "run", start=2).recorded.__enter__()
    for name in ("run-2", "run-3"):  # the script is run again
        again = Loop(tmp_path / "run")
        with again.recorded as run:
            again.steps(run, 1)
        assert run.folder == tmp_path / name
        assert complete(tmp_path / name).summary.steps == 1
    assert complete(tmp_path / "run").summary.steps == 2
    (tmp_path / "run" / "summary.json").write_text("")
    with pytest.raises(UsageError, match="has records without a summary"):
        Loop(tmp_path / "run").recorded.__enter__()


@pytest.mark.parametrize(("settings", "message"), [
    ({"validation": "val.txt"}, "validation is 'val.txt', and a number .*`paceline train` has an option of this name"),
    ({"rate": float("inf")}, "a value is inf"),
])  # fmt: skip
def test_settings_that_a_folder_cannot_have_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        Loop(tmp_path / "run", settings=settings).recorded.__enter__()
    assert not (tmp_path / "run").exists()


def test_settings_may_be_anything_that_has_a_text(tmp_path: Path) -> None:
    odd = {"a b": "\x7f\"'\n", "sizes": (1, 2), "where": Path("x"), "none": None, "nested": {"a": 1}, "flag": True}
    loop = Loop(tmp_path, settings=odd)
    with loop.recorded as run:
        loop.steps(run, 2)
    spec = complete(tmp_path).spec
    assert {name: spec.get(name) for name in odd} == odd | {
        "sizes": [1, 2], "where": "x", "nested": "{'a': 1}"
    }  # fmt: skip


def test_a_loss_that_is_not_finite_is_reported_once_and_does_not_end_the_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop(tmp_path)
    with loop.recorded as run:
        loop.steps(run, 1)
        loop.steps(run, 2, loss=float("nan"), norm=1)
        run.validation(loss=float("inf"))
    assert capsys.readouterr().err.endswith("warning: rank 0: loss is nan in step 1; later ones are not reported\n")
    assert (tmp_path / "logs" / "rank_0.log").read_text().count("nan") == 1
    assert ["loss" in line for line in loop.lines()] == [True, False, False]
    summary = complete(tmp_path).summary
    assert summary.train_loss == [pytest.approx(loop.lines()[0]["loss"])]
    assert summary.validation_loss == []


def test_a_loop_that_raises_says_so_in_its_folder_and_goes_on_raising(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with pytest.raises(ZeroDivisionError), loop.recorded as run:  # noqa: PT012
        loop.steps(run, 2)
        with run.step():
            _ = 1 // 0
    assert (loop.status()[0], len(loop.lines())) == (FAILED, 2)
    assert (loop.status()[1] or "").startswith(f"ZeroDivisionError: integer division or modulo by zero ({__file__}")
    assert "ZeroDivisionError" in (tmp_path / "logs" / "rank_0.log").read_text()


def test_an_interrupted_loop_is_interrupted_not_failed(tmp_path: Path) -> None:
    for folder, stop in ((tmp_path / "a", signal.SIGINT), (tmp_path / "b", signal.SIGTERM)):
        loop = Loop(folder)
        with pytest.raises((KeyboardInterrupt, Terminated)), loop.recorded as run:  # noqa: PT012
            loop.steps(run, 2)
            os.kill(os.getpid(), stop)
            time.sleep(10)  # the handler ends it
        assert loop.status() == (INTERRUPTED, None)
        assert [line["signal"] for line in loop.lines("signal")] == [stop]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_of_the_loop_stays(tmp_path: Path) -> None:
    loop, caught = Loop(tmp_path), list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
    try:
        with loop.recorded as run:
            loop.steps(run, 1)
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught == [signal.SIGTERM]
    assert loop.status() == (COMPLETED, None)


KILLED = """
import os, signal, sys, torch, paceline
from paceline.run.recorder import flush_all
model = torch.nn.Linear(2, 1)
with paceline.record(sys.argv[1], model) as run:
    for number in range(5):
        with run.step(epoch=number // 2) as step:
            step.log(loss=model(torch.ones(3, 2)).sum())
    flush_all()  # as Checkpoints does
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_loop_that_was_killed_has_failed_and_can_be_continued_as_one_run(tmp_path: Path) -> None:
    """From step 3, in the middle of an epoch that counts from 1 before and after."""
    script = KILLED.replace("number // 2", "1 + number // 2")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=100)
    assert done.returncode == -signal.SIGKILL
    summary = current_summary(tmp_path)
    assert summary.status == FAILED
    assert "is gone: was it killed?" in (summary.error or "")
    model = nn.Linear(2, 1)
    with record(tmp_path, model, start=3, comm=SingleComm()) as run:
        for number in range(3, 7):
            with run.step(epoch=1 + number // 2) as step:
                step.log(loss=model(torch.ones(3, 2)).sum() * 0 + number)
    found = complete(tmp_path)
    assert [step.step for step in found.steps[0]] == list(range(7))
    assert [step.epoch for step in found.steps[0]] == [0, 0, 1, 1, 2, 2, 3]
    assert (found.summary.steps, found.summary.resumed, found.summary.epochs) == (7, [3], 4)
    first, *_ = (step.loss or 0.0 for step in found.steps[0])
    assert found.summary.train_loss == [pytest.approx(first), pytest.approx((first + 3) / 2), 4.5, 6]


def test_a_loop_that_failed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    for failing in (True, False):
        loop = Loop(tmp_path)
        try:
            with loop.recorded as run:
                loop.steps(run, 2)
                if failing:
                    raise LookupError("nothing there")
        except LookupError:
            assert failing
    summary = complete(tmp_path).summary
    assert (summary.steps, summary.resumed) == (2, [0])


# Several ranks


def test_the_summary_of_several_ranks_has_the_mean_over_their_samples(tmp_path: Path) -> None:
    def case(comm: Comm) -> None:
        model = make_model()
        with record(tmp_path, model, comm=comm) as run:
            for number in range(2):
                with run.step(samples=1 + 2 * comm.rank) as step:
                    step.log(loss=4.0 * comm.rank, accuracy=1.0 if comm.rank else 0.0, only=number)

    ThreadWorld(2).run(case)
    summary = complete(tmp_path).summary
    assert (summary.workers, summary.transport, summary.steps) == (2, "threads", 2)
    assert (summary.train_loss, summary.train_accuracy, summary.train_metrics) == ([3.0], [0.75], [{"only": 0.5}])
    assert len(summary.cpu_seconds) == len(summary.input_seconds) == 2
    assert (tmp_path / "rank_1.jsonl").exists()


def test_every_rank_learns_that_the_folder_cannot_be_used(tmp_path: Path) -> None:
    with record(tmp_path, make_model(), comm=SingleComm()):
        pass

    def case(comm: Comm) -> None:
        with pytest.raises(AgreedError, match="has a run that is complete"):
            record(tmp_path, make_model(), comm=comm, start=3).__enter__()

    ThreadWorld(2).run(case)


@pytest.mark.parametrize("how", ["raises", "leaves a step open"])
def test_a_rank_that_fails_does_not_leave_the_others_waiting(how: str, tmp_path: Path) -> None:
    def case(comm: Comm) -> None:
        run = record(tmp_path, make_model(), comm=comm)
        if comm.rank == 0:
            with pytest.raises(CommError), run:
                pass
        elif how == "raises":
            with pytest.raises(LookupError), run:
                raise LookupError("mine")
        else:
            with pytest.raises(UsageError, match="was not closed"), run:
                run.step().__enter__()

    ThreadWorld(2).run(case)
    summary = read_summary(tmp_path)
    assert summary
    assert (summary.status, summary.failed_rank) == (FAILED, 1)
    assert ("mine" if how == "raises" else "was not closed") in (summary.error or "")


def test_ranks_of_torch_without_a_launcher_are_told_what_to_set(tmp_path: Path) -> None:
    """As after torch.multiprocessing.spawn: each of them would be rank 0 of a run of its own."""
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with pytest.raises(
            UsageError, match=r"torch.distributed has 2 ranks, .* no launcher: start them with torchrun"
        ):
            record(tmp_path, make_model(), comm=SingleComm()).__enter__()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("error", "own"), [
    (RuntimeError("[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), False),
    (dist.DistNetworkError("the store is gone"), False),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), True),
    (KeyError("x"), True),
])  # fmt: skip
def test_a_rank_that_lost_another_has_not_failed_itself(error: Exception, own: bool) -> None:
    assert is_own(error, 0) == own


def test_record_is_a_name_of_the_package() -> None:
    assert paceline.record is record
