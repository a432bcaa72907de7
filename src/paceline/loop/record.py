"""Records a user's own training loop in a run folder, which reports and comparisons read like any other."""

from __future__ import annotations

import atexit
import json
import re
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import nn

from paceline.analysis.slow import judge_folder
from paceline.comm import table as transports
from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.comm.seat import Seat
from paceline.comm.words import all_or_none, tell
from paceline.data.course import Position
from paceline.disturbance import disturbance
from paceline.errors import UsageError
from paceline.export.trackers import check_tensorboard
from paceline.launch.env import find_seat
from paceline.launch.folder import continue_run, in_use, write_start
from paceline.launch.recorded_rank import RecordedRank, code_of, is_own
from paceline.layout import peak_rss_bytes
from paceline.loop.spans import Spans
from paceline.loop.world import world
from paceline.loop.wrapped import name_of, strategy_of, traffic_of
from paceline.messages import LOGGER, quiet
from paceline.run.folder import (
    LOGS,
    conclude,
    rank_file,
    rank_files,
    read_nodes,
    read_summary,
    sole_writer,
    write_summary,
)
from paceline.run.lines import read_sound_lines
from paceline.run.liveness import owner_name
from paceline.run.records import (
    CLASSIFICATION,
    COMPLETED,
    RUNNING,
    End,
    Epoch,
    FinalTest,
    Signal,
    Summary,
    Validation,
)
from paceline.run.records import Step as StepLine
from paceline.spec import RunSpec, toml
from paceline.strict_json import build, plain

OWN_TASK = "own task"
END_SECONDS = 600.0  # ranks may reach the end of a loop at different times: one of them may evaluate


def record(
    folder: str | Path,
    model: nn.Module,
    *,
    settings: Mapping[str, Any] | None = None,
    model_name: str | None = None,
    data: str | None = None,
    strategy: str | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    start: int = 0,
    tensorboard: bool = False,
    comm: Comm | None = None,
) -> RecordedLoop:
    """Record a training loop in a run folder. All ranks call it, with the same folder.

        with paceline.record("runs/mnist", model) as run:
            for inputs, targets in loader:
                with run.step() as step:
                    loss = F.cross_entropy(model(inputs), targets)
                    ...
                    step.log(loss=loss)

    `model` is what the loop calls: a plain module, or one wrapped by DDP, FSDP2 or paceline.DataParallel. `settings`,
    such as vars(args), are what comparisons say about this run; `steps` or `epochs` is how long it will be, if that is
    known. `model_name` and `strategy` are names: the model's class and how it is wrapped, unless given. With `start`,
    the number of steps that `Checkpoints.restore()` has returned, the run in this folder is continued. With
    `tensorboard`, rank 0 also writes events for TensorBoard into the folder.
    """
    settings = {name: value for name, value in (settings or {}).items() if str(value) != str(folder)}
    planned = {name: value for name, value in (("steps", steps), ("epochs", epochs)) if value is not None}
    options = {
        **settings,
        **planned,
        "model": model_name or settings.get("model") or name_of(model),
        "data": data or settings.get("data") or "custom data",
        "strategy": strategy or strategy_of(model),
    }
    return RecordedLoop(Path(folder).absolute(), model, options, start, comm, tensorboard=tensorboard)


class Terminated(SystemExit):
    """SIGTERM, where the loop has no handler of its own."""


@dataclass
class EpochSums:
    """What the steps of an epoch on this rank add up to: seconds, samples, and each figure times its samples."""

    seconds: float = 0.0
    samples: int = 0
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, seconds: float, samples: int, own: int, figures: Mapping[str, float]) -> None:
        self.seconds += seconds
        self.samples += samples
        for name, value in figures.items():
            if isfinite(value):
                total, weight = self.sums.get(name, (0.0, 0))
                self.sums[name] = total + value * own, weight + own

    def line(self, epoch: int) -> Epoch:
        return epoch_line(epoch, self, {name: total / weight for name, (total, weight) in self.sums.items() if weight})


def epoch_line(epoch: int, made: EpochSums, means: Mapping[str, float]) -> Epoch:
    loss, accuracy, others = split_figures(means)
    return Epoch(epoch, made.seconds, made.samples, loss, accuracy, others)


def split_figures(figures: Mapping[str, float]) -> tuple[float | None, float | None, dict[str, float]]:
    """Loss, accuracy, and the others by name."""
    others = {name: value for name, value in figures.items() if name not in ("loss", "accuracy")}
    return figures.get("loss"), figures.get("accuracy"), others


class RecordedStep:
    """One step of a loop: what it logs is read when it ends."""

    def __init__(self, run: RecordedLoop, samples: int | None, epoch: int | None) -> None:
        self._run, self.samples, self.epoch = run, samples, epoch
        self.logged: dict[str, Any] = {}

    def log(self, **figures: Any) -> None:
        """Record numbers, or tensors of one element: `loss`, `accuracy`, others. `lr` is the optimizer's by default."""
        self.logged |= figures

    def __enter__(self) -> Self:
        self._run.begin_step(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._run.end_step(self, failed=error is not None)


class RecordedLoop:
    """A training loop that is recorded, on one rank: made by `paceline.record`."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        options: dict[str, Any],
        start: int,
        comm: Comm | None,
        *,
        tensorboard: bool = False,
    ) -> None:
        self._model, self._start, self._tensorboard = model, start, tensorboard
        self._options, self._given = options, comm
        self._path = folder
        self._step: RecordedStep | None = None
        self._open = False
        self._warned = False
        self._handler: Any = None
        self._closing = ExitStack()

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._path

    def step(self, samples: int | None = None, epoch: int | None = None) -> RecordedStep:
        """One update: use it in a with statement.

        `samples` is how many this rank has in it; unless given, it is the first dimension of what the model is called
        with, or what `paceline.shard` has given this rank.
        """
        if samples is not None and (not isinstance(samples, int) or samples < 1):
            raise UsageError(f"run.step(samples={samples!r}): give this rank's number of samples, at least 1")
        if epoch is not None and (not isinstance(epoch, int) or epoch < 0):
            raise UsageError(f"run.step(epoch={epoch!r}): give the number of the epoch, 0 or more")
        return RecordedStep(self, samples, epoch)

    def span(self, name: str) -> AbstractContextManager[None]:
        """A part of a step, or of the time between two, that hooks cannot see: use it in a with statement."""
        self._check_open("run.span()")
        return self._spans.mark(name)

    def validation(self, loss: Any, accuracy: Any = None, **metrics: Any) -> None:
        """Record figures of the validation set after the steps so far; rank 0's are those of the run."""
        self._evaluated(Validation, "validation", loss, accuracy, metrics)

    def test(self, loss: Any, accuracy: Any = None, **metrics: Any) -> None:
        """Record figures of the test set; rank 0's are those of the run."""
        self._evaluated(FinalTest, "test", loss, accuracy, metrics)

    # The life of a run

    def __enter__(self) -> Self:
        if self._open:
            raise UsageError("this run is open already: call paceline.record() for each with statement")
        comm = self._given or world()
        seat = _seat(comm)
        own = comm.inner if isinstance(comm, MeteredComm) else comm  # these messages are not the training's
        self._comm = own.dup() if comm.size > 1 else own
        self._comm.timeout = max(END_SECONDS, comm.timeout)
        all_or_none(self._check_options, self._comm)
        self._summary = self._begin_summary(comm)
        self._rank = RecordedRank(seat)
        self._rank.open(self._comm, self._make_folder)
        if self._rank.folder and not self._rank.forwarder:
            self._path = self._rank.folder
        self._started = time.perf_counter()
        try:
            self._recorder = self._rank.make_recorder(self._options if self._tensorboard else None)
            self._closing.callback(self._recorder.close)
            self._begin()
        except BaseException as wrong:
            self._fail(wrong)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open = False
        self._spans.close()
        if self._handler is not None and signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            self._fail(error)
            return
        try:
            if self._step is not None:
                raise UsageError(f"step {self._next} was not closed: use run.step() in a with statement")
            self._complete()
        except BaseException as wrong:
            self._fail(wrong)
            raise

    def _begin(self) -> None:
        self._epochs: dict[int, EpochSums] = {}
        self._epoch, self._next = 0, self._start
        # Loops count epochs from 0 or from 1; records count them from 0.
        first = tell(json.dumps(self._summary.own_figures.get("first_epoch")), self._comm)
        self._first_epoch: int | None = json.loads(first)
        self._validations: dict[int, Validation] = {}
        self._tested: FinalTest | None = None
        self._restore()
        self._traffic = traffic_of(self._model)
        self._spans = Spans(self._model, self._recorder.clock)
        self._catch_termination()
        self._open = True

    def _check_options(self) -> None:
        if self._tensorboard:
            check_tensorboard("tensorboard=True")
        self._options = _checked(self._options | {"workers": self._comm.size})

    def _begin_summary(self, comm: Comm) -> Summary:
        options = self._options
        used = dist.get_backend() if dist.is_available() and dist.is_initialized() else comm.transport
        return Summary(
            status=RUNNING,
            strategy=options["strategy"],
            workers=comm.size,
            transport=used if comm.size > 1 else "single",
            model=options["model"],
            task=options.get("task") or OWN_TASK,
            data=options["data"],
            batch_size=options.get("batch_size") or 1,
            global_batch=(options.get("batch_size") or 1) * comm.size,
            epochs=options.get("epochs") or 0,
            seed=options.get("seed") or 0,
            parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            threads=torch.get_num_threads(),
        )

    def _make_folder(self) -> None:
        """On rank 0: make the folder a running run's. It must be free, or have a run that did not complete."""
        lines = [f"{_key(name)} = {toml(value)}" for name, value in self._options.items()]
        folder = self._path = self._path if self._start else _next_to_complete(self._path)
        try:
            (folder / LOGS).mkdir(parents=True, exist_ok=True)
            with sole_writer(folder):
                before = read_summary(folder)
                if before is None:
                    self._check_new()
                    write_start(folder, lines, self._summary)
                else:
                    self._check_free(before)
                    self._summary.figures = before.figures
                    earlier = [
                        s.epoch for s in read_sound_lines(rank_file(folder, 0), StepLine) if s.step < self._start
                    ]
                    position = Position(self._start, earlier[-1] if earlier else 0)
                    continue_run(folder, position, lines, self._summary)
        except OSError as error:
            raise UsageError(f"cannot make the run folder {folder}: {error.strerror}") from error
        self._rank.folder = folder

    def _check_new(self) -> None:
        if rank_files(self._path):
            raise UsageError(f"{self._path} has records without a summary that can be read: choose another folder")
        if self._start:
            raise UsageError(f"start={self._start}: {self._path} has no run to continue; leave start out, or give the "
                             "folder of the run that the checkpoint is of")  # fmt: skip

    def _check_free(self, before: Summary) -> None:
        if in_use(self._path):
            raise UsageError(f"the run {self._path} is in use by {owner_name(self._path)}: wait until it ends, or "
                             "choose another folder")  # fmt: skip
        if before.status == COMPLETED:
            raise UsageError(
                f"{self._path} has a run that is complete, and start={self._start}: leave start out for a new run"
            )

    def _restore(self) -> None:
        """Count what earlier processes of this run have recorded on this rank."""
        path = self._recorder.path
        self._recorder.restore()
        for line in read_sound_lines(path, StepLine):
            figures = line.metrics if line.loss is None else {"loss": line.loss, **line.metrics}
            self._sums(line.epoch).add(line.seconds, line.samples, line.own or 0, figures)
            self._epoch = line.epoch
        for seen in read_sound_lines(path, Validation):
            self._validations[seen.step or 0] = seen

    def _sums(self, epoch: int) -> EpochSums:
        return self._epochs.setdefault(epoch, EpochSums())

    def _catch_termination(self) -> None:
        """Let SIGTERM end the loop in order, unless the loop has a handler of its own."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._handler = _terminate
            signal.signal(signal.SIGTERM, _terminate)

    # Steps

    def begin_step(self, step: RecordedStep) -> None:
        self._check_open("run.step()")
        if self._step is not None:
            raise UsageError(f"step {self._next} has not ended: steps cannot be nested")
        self._step = step
        self._spans.begin()

    def end_step(self, step: RecordedStep, *, failed: bool) -> None:
        if step is not self._step:
            return
        self._step = None
        if failed:
            self._spans.leave()
            return
        figures = {name: self._number(name, value) for name, value in step.logged.items() if value is not None}
        seconds, spans, queued = self._spans.end()
        own, total = self._samples(step)
        self._begin_epoch(step)
        lr = figures.pop("lr", self._spans.lr)
        known = {name: value for name, value in figures.items() if isfinite(value)}
        if len(known) < len(figures):
            self._warn_not_finite(figures)
        metrics = {name: value for name, value in figures.items() if name != "loss"}
        first = not self._recorder.step_seconds
        self._recorder.step(self._next, self._epoch, seconds, total, spans, queued, own=own, loss=known.get("loss"),
                            lr=lr, metrics=metrics)  # fmt: skip
        self._sums(self._epoch).add(seconds, total, own, figures)
        self._next += 1
        if first:
            self._tell_batch(own, total)
        self._spans.recorded()

    def _samples(self, step: RecordedStep) -> tuple[int, int]:
        """Of this rank, and of all ranks."""
        own = step.samples or self._spans.own
        total = (self._spans.total if own == self._spans.own else 0) or own * self._comm.size
        if not total:
            raise UsageError(f"step {self._next}: the number of samples is not known, because the model given to "
                             "paceline.record() was not called with a batch; give run.step(samples=…)")  # fmt: skip
        return own, total

    def _begin_epoch(self, step: RecordedStep) -> None:
        if self._first_epoch is None:
            self._first_epoch = step.epoch
        epoch = self._epoch if step.epoch is None else max(0, step.epoch - (self._first_epoch or 0))
        if epoch != self._epoch and self._epoch in self._epochs:
            self._recorder.write(self._epochs[self._epoch].line(self._epoch))
        self._epoch = epoch

    def _tell_batch(self, own: int, total: int) -> None:
        """Let the summary of the running run have the size of the batches."""
        self._summary.batch_size, self._summary.global_batch = max(own, 1), total
        if self._first_epoch is not None:
            self._summary.figures = {self._summary.strategy: {"first_epoch": self._first_epoch}}
        if self._comm.rank == 0:
            with sole_writer(self._path):
                now = read_summary(self._path)
                if now and now.status == RUNNING:
                    write_summary(self._path, self._summary)

    def _number(self, name: str, value: Any) -> float:
        """A number, or a tensor of one element."""
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise UsageError(f"step.log({name}=…): a tensor of shape {list(value.shape)}; give one number, its mean")
        try:
            return float(value.item() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError):
            raise UsageError(f"step.log({name}={value!r}): give a number, or a tensor of one element") from None

    def _warn_not_finite(self, figures: Mapping[str, float]) -> None:
        if not self._warned:
            self._warned = True
            name, value = next((name, value) for name, value in figures.items() if not isfinite(value))
            text = f"rank {self._comm.rank}: {name} is {value} in step {self._next}; later ones are not reported"
            LOGGER.warning(text)
            self._rank.add_to_log(text)

    def _evaluated(self, kind: type[Validation], name: str, loss: Any, accuracy: Any, metrics: dict[str, Any]) -> None:
        self._check_open(f"run.{name}()")
        given = {"loss": loss, "accuracy": accuracy, **metrics}
        figures = {key: self._number(key, value) for key, value in given.items() if value is not None}
        if self._step is None:
            self._spans.leave()
        if not all(map(isfinite, figures.values())):
            self._warn_not_finite(figures)
            figures = {key: value for key, value in figures.items() if isfinite(value)}
        if "loss" not in figures:
            return
        others = split_figures(figures)[2]
        line = kind(self._epoch, figures["loss"], figures.get("accuracy"), None, others, self._next)
        self._recorder.write(line)
        if isinstance(line, FinalTest):
            self._tested = line
        else:
            self._validations[self._next] = line

    def _check_open(self, what: str) -> None:
        if not self._open:
            raise UsageError(f"{what} outside of `with paceline.record(...) as run`")

    # The end

    def _complete(self) -> None:
        """All steps are done, on all ranks."""
        recorder, summary, comm, folder = self._recorder, self._summary, self._comm, self._path
        if self._epoch in self._epochs:
            recorder.write(self._epochs[self._epoch].line(self._epoch))
        recorder.flush()
        self._measure()
        epochs = self._all_epochs()
        if comm.rank == 0:
            steps = recorder.step_samples
            summary.steps, summary.epochs = len(steps), len(epochs)
            summary.global_batch = max(steps, default=summary.global_batch)
            summary.add_epochs(epochs)
            summary.add_validations([self._validations[step] for step in sorted(self._validations)])
            if self._tested:
                summary.add_test(self._tested)
            if summary.task == OWN_TASK and summary.train_accuracy:
                summary.task = CLASSIFICATION
            summary.update_seconds = recorder.update_seconds()
            summary.samples_per_second = recorder.samples_per_second()
            summary.total_seconds = time.perf_counter() - self._started
            summary.disturbed = self._disturbance()
            if judged := judge_folder(folder, summary):  # all ranks have flushed: `_measure` has heard from them
                summary.verdict, summary.slow_rank = judged.text, judged.rank
            summary.status = COMPLETED
            conclude(folder, summary)
        recorder.write(End(time.time(), COMPLETED))
        recorder.close()
        comm.barrier()
        self._rank.watching.close()
        self._rank.hand_in()
        self._comm.close()
        if comm.rank == 0 and not quiet():
            print(*([summary.verdict] if summary.verdict else []), f"Run folder: {folder}", sep="\n", flush=True)

    def _measure(self) -> None:
        """Every rank's processor time, memory and communication."""
        seconds, traffic, comm, summary = self._traffic.seconds(), self._traffic.bytes(), self._comm, self._summary
        mine = [self._recorder.cpu_seconds(), self._recorder.input_seconds, peak_rss_bytes(), seconds or 0.0, *traffic]
        table = torch.zeros(comm.size, len(mine), dtype=torch.float64)
        table[comm.rank] = torch.tensor(mine, dtype=torch.float64)
        table = table.to(comm.device)
        comm.allreduce(table.view(-1))
        cpu, waited, memory, averaging, sent, received = table.T.tolist()
        summary.cpu_seconds, summary.input_seconds = cpu, waited
        summary.peak_rss_bytes = list(map(int, memory))
        if seconds is not None:
            summary.comm_seconds, summary.wire = averaging, self._traffic.wire
            summary.bytes_sent, summary.bytes_received = list(map(int, sent)), list(map(int, received))

    def _all_epochs(self) -> list[Epoch]:
        """The epochs of rank 0, with the mean of each figure over the samples of all ranks."""
        mine = {str(epoch): list(made.sums) for epoch, made in self._epochs.items()}
        asked: dict[str, list[str]] = json.loads(tell(json.dumps(mine), self._comm))
        keys = [(int(epoch), name) for epoch, names in asked.items() for name in names]
        own = [self._sums(epoch).sums.get(name, (0.0, 0)) for epoch, name in keys]
        table = torch.tensor([own], dtype=torch.float64, device=self._comm.device).view(-1)
        if len(table):
            self._comm.allreduce(table)
        means: dict[int, dict[str, float]] = {int(epoch): {} for epoch in asked}
        for (epoch, name), (total, weight) in zip(keys, table.view(-1, 2).tolist(), strict=True):
            if weight:
                means[epoch][name] = total / weight
        return [epoch_line(epoch, self._sums(epoch), means[epoch]) for epoch in sorted(means)]

    def _disturbance(self) -> str | None:
        try:
            return disturbance(read_nodes(self._path).values(), self._recorder.began, self._recorder.ended)
        except ValueError:  # a damaged file of samples
            return None

    def _fail(self, error: BaseException) -> None:
        """Record why the loop ended, and find out from all ranks' records which of them failed."""
        rank, reason = self._rank, str(error)
        self._closing.close()
        if isinstance(error, Terminated | KeyboardInterrupt):
            reason = "interrupted"
            number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
            rank.record(Signal(number, time.time()))
            rank.diagnose(interrupted=True)
        else:
            ending = rank.end_with(error)
            if ending and not is_own(error, rank.seat.rank):
                LOGGER.error("rank %d: %s", rank.seat.rank, ending.message)
        rank.watching.close()
        rank.hand_in(failed=True)
        carrier = transports.TABLE.get(self._comm.transport)
        if carrier and carrier.by_mpiexec:  # it ends the processes, and this one has to show its error first
            atexit.register(self._comm.abort, reason, code_of(error))
        else:
            self._comm.abort(reason)


def _next_to_complete(folder: Path) -> Path:
    """The folder; if it has a run that is complete, that with the first number which has none."""
    for number in range(2, 10_000):
        made = folder if number == 2 else folder.with_name(f"{folder.name}-{number - 1}")
        before = read_summary(made)
        if before is None or before.status != COMPLETED:
            return made
    raise UsageError(f"{folder} and thousands of numbered ones have complete runs: remove some")


def _seat(comm: Comm) -> Seat:
    """This process's place by its launcher; by the communicator, if ranks are threads or there is no launcher."""
    found = find_seat()
    if found and (found.rank, found.size) == (comm.rank, comm.size):
        return found
    if comm.size == 1 and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise UsageError(
            f"torch.distributed has {dist.get_world_size()} ranks, but paceline.record() found no launcher: start them "
            "with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process's environment"
        )
    return Seat(comm.rank, comm.size, comm.rank, comm.size, "none")


def _terminate(*_: Any) -> NoReturn:
    raise Terminated(128 + signal.SIGTERM)


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a spec.toml can have them; one that has the name of Paceline's own must have its type."""
    found = {str(name): _plain(value) for name, value in options.items() if value is not None}
    try:
        plain(found, "a value")
        build(RunSpec, found, extra=True)
    except ValueError as error:
        raise UsageError(f"the settings of this run: {error} (`paceline train` has an option of this name); change the "
                         "value, or its name") from None  # fmt: skip
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str) else str(value)


def _key(name: str) -> str:
    """A key of TOML."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)
