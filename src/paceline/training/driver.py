"""The driver: runs any strategy's engine through epochs, validation and test, records it, and saves the model."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from paceline.comm.metered import MeteredComm
from paceline.comm.words import all_or_none
from paceline.data.batch import Batch
from paceline.data.input import Input
from paceline.data.sampler import Sampler
from paceline.disturbance import disturbance
from paceline.errors import UsageError
from paceline.run.folder import MODEL, conclude, read_nodes, write_summary
from paceline.run.recorder import Recorder
from paceline.run.records import COMPLETED, INTERRUPTED, RUNNING, End, Summary
from paceline.spec import RunSpec
from paceline.strategies.engine import Engine, Evaluation, Lockstep, StepTimer
from paceline.strategies.finite import Watch
from paceline.strategies.setup import Place
from paceline.training.console import Console
from paceline.training.progress import Progress
from paceline.training.setup import make_input

if TYPE_CHECKING:
    from paceline.strategies.parameter_server.engine import Membership

TIMELINES = 20  # the first steps, of which every event is recorded if the strategy has timelines


@dataclass
class Job:
    """What one rank needs to train: the spec, its communicator and device, its console and trace."""

    spec: RunSpec
    comm: MeteredComm
    place: Place
    console: Console
    stop: Callable[[], bool]
    summary: Summary
    membership: Membership | None = None  # with parameter servers
    folder: Path = field(init=False)  # this and `recorder` are set when the run folder is known
    recorder: Recorder = field(init=False)
    _source: Input | None = None

    def opened(self, folder: Path, recorder: Recorder) -> Self:
        self.folder, self.recorder = folder, recorder
        return self

    @property
    def source(self) -> Input:
        """The data set, opened on first use; all ranks that need it must ask for it at the same time."""
        if self._source is None:  # not a cached property: its lock would deadlock ranks that are threads
            start = time.perf_counter()
            self._source = make_input(self.spec, self.comm, self.place)
            self.comm.barrier()
            self.summary.read_seconds = time.perf_counter() - start
            if self.spec.reads:
                self.console.line(f"Time taken to read the data: {self.summary.read_seconds:.2f} s")
        return self._source


def train(job: Job) -> None:
    """Train as the spec says; fill in the summary, and save it and the model in the run folder."""
    driver = Driver(job)
    job.summary.threads = torch.get_num_threads()
    engine = job.spec.method.prepare(job)
    try:
        engine.run(driver)
    finally:
        engine.close()


class Driver:
    """Runs one rank through a training.

    It calls the steps of a `Lockstep` engine; other engines run their own loop, and report to the `Progress` that
    `begin` returns. All of them end with `finish`.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.spec = job, job.spec
        self._start = time.perf_counter()

    def begin(self, engine: Engine, per_epoch: int) -> Progress:
        """Before the first step: print the introduction, and check that there is disk space for the result."""
        job, spec = self.job, self.spec
        job.summary.parameters, job.summary.model_properties = engine.parameters, list(engine.properties)
        if engine.fresh:
            job.console.line(f"Initialised, because not in {spec.weights}: {', '.join(engine.fresh)}")
        all_or_none(lambda: None if job.comm.rank else check_space(job.folder, spec, engine), job.comm)
        total = spec.steps or spec.epochs * per_epoch
        return Progress(spec, job.console, job.recorder, job.summary, per_epoch, total)

    def run(self, engine: Lockstep) -> None:
        """Run all epochs; with a validation set, go back to the best epoch; then test."""
        job, spec, source = self.job, self.spec, self.job.source
        sampler = Sampler(len(source.numbers["train"]), spec.update_batch, source.reader, source.readers, spec.seed)
        progress = self.begin(engine, len(sampler))
        watch, best, stopped = Watch(engine.model), dict[str, Tensor](), False
        for epoch in range(-(-progress.total // len(sampler))):
            stopped = self._run_epoch(engine, sampler, epoch, progress, watch)
            if not spec.emulated and (stopped or spec.validation or job.summary.steps == progress.total):
                watch.check(engine.state_dict(), job.comm, job.summary.steps)
            if stopped:
                break
            if len(source.numbers["validation"]) and progress.evaluated(
                "validation", epoch, self._evaluate(engine, "validation", watch)
            ):
                engine.agree()
                best = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        if best and not stopped:
            engine.load_state_dict(best)
        if spec.test and not stopped:
            progress.evaluated("test", epoch, self._evaluate(engine, "test", watch))
        engine.agree()
        self.finish(engine, progress, interrupted=stopped)

    def _run_epoch(self, engine: Lockstep, sampler: Sampler, epoch: int, progress: Progress, watch: Watch) -> bool:
        """Run one epoch, or the remaining steps; true if a rank asked to stop."""
        job, first = self.job, self.job.summary.steps
        steps = min(len(sampler), progress.total - first)
        progress.start_epoch(epoch, steps)
        start = ended = time.perf_counter()
        job.recorder.clock.lap()  # the time before belongs to no step
        stopped = False
        for step, batch in enumerate(job.source.epoch(sampler, steps), first):
            # A step begins where the last one ended, so that all time is counted.
            timer = StepTimer(last=ended, clock=job.recorder.clock)
            if self.spec.method.timelines and step < TIMELINES:
                timer.events = []
            timer.mark("input")
            watch.begin(everything=step == first + steps - 1)
            result = engine.advance(batch, sampler.size, progress.learning_rate(step), job.stop(), timer)
            seconds, ended = timer.last - ended, timer.last
            watch.end(step + 1)
            if result.own is None and not math.isfinite(result.loss_sum):
                watch.check(engine.state_dict(), job.comm, step + 1, f"the loss is {result.loss_sum}")
            progress.step(step, epoch, result, seconds, timer, own=len(batch.labels))
            if result.stop:
                stopped = True
                break
        learned = progress.learned
        progress.end_epoch(epoch, time.perf_counter() - start, learned.loss, learned.correct, learned.count)
        return stopped

    def _evaluate(self, engine: Lockstep, name: str, watch: Watch) -> Evaluation:
        """Mean loss and accuracy on the `validation` or `test` set."""
        job = self.job
        count, batches = job.source.evaluation(name)

        def shown() -> Iterator[Batch]:
            for batch in batches:
                yield batch
                job.console.advance()

        job.console.start_bar(count, name)
        result = engine.evaluate(shown())
        job.console.end_bar()
        if not math.isfinite(result.loss):
            watch.check(engine.state_dict(), job.comm, job.summary.steps, f"the {name} loss is {result.loss}")
        return result

    def finish(self, engine: Engine, progress: Progress, *, interrupted: bool) -> None:
        """After the last step: save the summary and the weights in the run folder, on rank 0."""
        job, summary, folder = self.job, self.job.summary, self.job.folder
        summary.total_seconds = time.perf_counter() - self._start
        progress.finish(interrupted=interrupted)
        engine.measure(job)
        if job.comm.rank == 0:
            summary.disturbed = self._disturbance()
        summary.status = INTERRUPTED if interrupted else COMPLETED
        job.console.total(summary)
        if job.comm.rank == 0:  # first the summary, in case the weights cannot be saved
            write_summary(folder, replace(summary, status=RUNNING))
        if not self.spec.emulated:
            engine.save(folder / MODEL)
        if job.comm.rank == 0:
            conclude(folder, summary)
        job.recorder.write(End(time.time(), summary.status))
        job.comm.barrier()

    def _disturbance(self) -> str | None:
        """Why the times of this run should not be compared, from the nodes' samples in its folder."""
        recorder = self.job.recorder
        try:
            nodes = read_nodes(recorder.folder).values()
        except ValueError:  # a damaged file of samples; the training itself is sound
            return None
        return disturbance(nodes, recorder.began, recorder.ended, emulated=self.spec.emulated)


def check_space(folder: Path, spec: RunSpec, engine: Engine) -> None:
    """Raise an error if the disk has no space for the weights and the snapshots."""
    free = shutil.disk_usage(folder).free
    weights = 0 if spec.emulated else engine.parameters * (8 if spec.dtype == "float64" else 4)
    each = weights * (3 if spec.optimizer == "adam" else 2)  # with the optimizer's state
    snapshots = engine.states_on_disk * each
    if free < weights + snapshots:
        what = f"the weights take {weights / 1e6:,.1f} MB" + (
            f", snapshots {snapshots / 1e6:,.1f} MB" if snapshots else ""
        )
        raise UsageError(
            f"{folder} is on a disk with {free / 1e6:,.1f} MB free, and {what}: free some space, or choose another "
            "--output-dir"
        )
