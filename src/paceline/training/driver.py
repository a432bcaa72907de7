"""The driver: runs any strategy's engine through epochs, validation and test, records it, and saves the model."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from paceline.analysis.slow import judge_folder
from paceline.checkpoint.carried import Carried
from paceline.checkpoint.load import Checkpoint
from paceline.comm.metered import MeteredComm
from paceline.comm.words import all_or_none, tell
from paceline.data.batch import Batch
from paceline.data.course import START, Course, Position
from paceline.data.input import Input
from paceline.disturbance import disturbance
from paceline.errors import CommError, UsageError
from paceline.run.folder import MODEL, conclude, read_nodes, write_summary
from paceline.run.recorder import Recorder
from paceline.run.records import COMPLETED, INTERRUPTED, RUNNING, End, Planned, Summary
from paceline.spec import RunSpec
from paceline.strategies.engine import STOP, Engine, Lockstep, StepResult, StepTimer
from paceline.strategies.finite import MOST_SKIPPED, SKIP, Watch
from paceline.strategies.saving import division_of
from paceline.strategies.setup import Place, confusion_of, no_confusion, seed_dropout
from paceline.tasks.base import Sums
from paceline.training.checkpoints import Checkpoints
from paceline.training.console import Console
from paceline.training.elastic import Elastic, Regroup
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
    resume: Checkpoint | None = None  # to continue from
    remote: Sequence[int] = ()  # ranks that do not see the run folder
    elastic: Elastic | None = None  # with --elastic: `comm` is then of this rank alone until the first generation
    start: Position = START
    folder: Path = field(init=False)  # this and `recorder` are set when the run folder is known
    recorder: Recorder = field(init=False)
    _source: Input | None = None
    _start: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if self.resume:
            self.start = self.resume.manifest.position

    @property
    def same_division(self) -> bool:
        """Whether every rank has the part of the work that it had in the checkpoint."""
        same = self.resume is not None and self.resume.manifest.division == division_of(self.spec)
        return same and not self.elastic

    def seconds(self) -> float:
        """Since the start of the run, without the time between two of its processes."""
        before: float = self.resume.manifest.facts["seconds"] if self.resume else 0.0
        return before + time.perf_counter() - self._start

    def has_taken(self, seconds: float) -> None:
        """The run has taken so long until now; this process may be new in it."""
        self._start += self.seconds() - seconds

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
        self._skipped: list[int] = []  # the last updates in a row that were skipped

    def begin(self, engine: Engine, course: Course) -> Progress:
        """Before the first step: print the introduction, and check that there is disk space for the result."""
        job, spec = self.job, self.spec
        job.summary.parameters, job.summary.model_properties = engine.parameters, list(engine.properties)
        if engine.fresh:
            job.console.line(f"Initialised, because not in {spec.weights}: {', '.join(engine.fresh)}")
        all_or_none(lambda: None if job.comm.rank else check_space(job, engine), job.comm)
        total = spec.steps or course.end(spec.epochs - 1)
        if job.comm.rank == 0:
            job.recorder.write(Planned(total, course.after(total).epoch + 1))
        progress = Progress(spec, job.console, job.recorder, job.summary, course, total)
        if job.resume:
            progress.restore(job.resume.manifest.facts["progress"])
        return progress

    def run(self, engine: Lockstep) -> None:
        """Run all epochs; with a validation set, go back to the best validation; then test."""
        job, spec, source = self.job, self.spec, self.job.source
        course = Course(len(source.numbers["train"]), spec.update_batch, job.start)
        progress = self.begin(engine, course)
        self._watch, self._best = Watch(engine.model), dict[str, Tensor]()
        self._checkpoints = None if spec.emulated or job.remote else Checkpoints(job, engine, course)
        if job.remote and not spec.emulated:
            job.console.line(f"No checkpoints: rank {job.remote[0]} does not see the run folder of rank 0", always=True)
        if job.resume:
            self._restore(engine, job.resume)
        engine.keeps_buffers = spec.on_nan == SKIP or job.elastic is not None
        if job.elastic:
            job.elastic.train(self, engine, course, progress)
        else:
            self.go_on(engine, course, progress)

    def go_on(self, engine: Lockstep, course: Course, progress: Progress) -> None:
        """Train from where the training is to its end."""
        job, spec, done = self.job, self.spec, self.job.summary.steps
        first, last = course.after(done).epoch, course.after(max(progress.total, job.start.step)).epoch
        if done < min(course.end(first), progress.total):
            progress.reopen(first)  # it was recorded when a rank asked to stop, and lost another one then
        first += progress.has_epoch(first) and not progress.validations.is_due(done)
        epoch, ended = last, "exhausted" if job.elastic and progress.validations.exhausted else ""
        for epoch in range(first, last + 1) if not ended else ():
            ended = self._run_epoch(engine, course, epoch, progress)
            if ended:
                break
        stopped = ended == INTERRUPTED
        if self._checkpoints:
            self._checkpoints.wait()
        if self._best and not stopped:
            engine.load_state_dict(self._best)
            progress.ending = True
        if spec.test and not stopped:
            progress.evaluated("test", epoch, job.summary.steps, self._evaluate(engine, "test"))
        engine.agree()
        self.finish(engine, progress, interrupted=stopped)

    def _restore(self, engine: Lockstep, checkpoint: Checkpoint) -> None:
        job = self.job
        restored = all_or_none(lambda: engine.restore(checkpoint, same=job.same_division), job.comm)
        self._best = restored.best
        for what in restored.discarded:
            job.console.line(f"Not continued: {what}", always=True)
        if not job.same_division:
            seed_dropout(self.spec, engine.stream, job.start.step)

    def _run_epoch(self, engine: Lockstep, course: Course, epoch: int, progress: Progress) -> str:
        """Run the rest of an epoch, or the remaining steps, and validate when it is due.

        Returns why training ends here: a rank asked to stop, or validations are no longer better; or "".
        """
        summary, validations = self.job.summary, progress.validations
        end = min(course.end(epoch), progress.total)
        progress.start_epoch(epoch, range(summary.steps, end))
        while True:
            until = int(min(end, validations.due(summary.steps)))
            stopped = self._run_steps(engine, course, epoch, range(summary.steps, until), progress)
            progress.pause()
            over, due = stopped or summary.steps >= end, validations.is_due(summary.steps) and not stopped
            if over and not progress.has_epoch(epoch):
                progress.end_epoch(epoch, progress.epoch_seconds(), progress.learned.sums, progress.samples)
            if not self.spec.emulated and (stopped or due or summary.steps == progress.total):
                self._watch.check(engine.state_dict(), self.job.comm, summary.steps)
            exhausted = due and self._validate(engine, epoch, progress)
            if exhausted and not over:
                progress.end_epoch(epoch, progress.epoch_seconds(), progress.learned.sums, progress.samples)
            if over or exhausted:
                return INTERRUPTED if stopped else "exhausted" if exhausted else ""
            progress.go_on(epoch, range(summary.steps, end))

    def _validate(self, engine: Lockstep, epoch: int, progress: Progress) -> bool:
        """Keep the weights if no validation was better; true if training must stop because too many were not."""
        job, sums, validations = self.job, self._evaluate(engine, "validation"), progress.validations
        better = validations.add(job.summary.steps, sums)
        try:
            # Rank 0 knows of all validations; a rank that is new in a run that was continued does not.
            decision = tell("better" if better else "stop" if validations.exhausted else "", job.comm)
            if decision == "better":
                engine.agree()
                self._best = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        except CommError:
            validations.forget(job.summary.steps)
            raise
        progress.evaluated("validation", epoch, job.summary.steps, sums)
        return decision == "stop"

    def _run_steps(self, engine: Lockstep, course: Course, epoch: int, steps: range, progress: Progress) -> bool:
        """Run these steps of an epoch; true if a rank asked to stop."""
        job, spec, watch, checkpoints = self.job, self.spec, self._watch, self._checkpoints
        ended = time.perf_counter()
        job.recorder.clock.lap()  # the time before belongs to no step
        shares = job.source.readers
        for step, batch in zip(steps, job.source.epoch(course, epoch, steps), strict=True):
            # A step begins where the last one ended, so that all time is counted.
            timer = StepTimer(last=ended, clock=job.recorder.clock)
            if spec.method.timelines and step < TIMELINES:
                timer.events = []
            timer.mark("input")
            watch.begin(everything=step == steps[-1])
            engine.made = None
            try:
                result = engine.advance(batch, shares, progress.learning_rate(step), self._ask(step), timer)
                watch.end(step + 1)
                if result.own is None and not result.finite:
                    self._not_finite(engine, result, step)
                saves = checkpoints if result.save or result.stop else None
                if saves:
                    if spec.check_replicas:
                        engine.check_replicas()  # a replica that differs is never saved
                    if result.stop:
                        saves.wait()
                    saves.copy(step + 1, self._best)
                    timer.mark("save")
            except CommError:
                # A rank was lost, but the update is made, and counts; so does one that is skipped.
                if engine.made and (engine.made.finite or spec.on_nan == SKIP):
                    self._count_skipped(engine.made, step)
                    progress.step(step, epoch, engine.made, max(timer.last - ended, 1e-9), timer, own=batch.count)
                raise
            seconds, ended = timer.last - ended, timer.last
            progress.step(step, epoch, result, seconds, timer, own=batch.count)
            if saves:
                saves.write(progress)
            if checkpoints:
                checkpoints.report()
            if result.stop:
                return True
            if result.regroup:
                raise Regroup("other workers take part from the next step on")
        return False

    def _ask(self, step: int) -> int:
        """What this rank asks of all ranks, to be done after this step."""
        job, checkpoints = self.job, self._checkpoints
        ask = (STOP if job.stop() else 0) + (checkpoints.ask(step) if checkpoints else 0)
        return ask + (job.elastic.ask() if job.elastic else 0)

    # Elastic runs: other ranks take part from here on.

    def pack(self, engine: Lockstep, course: Course, progress: Progress) -> Carried:
        """This rank's state of the training."""
        facts = {"progress": progress.facts(), "history": progress.history(), "skipped": self._skipped,
                 "seconds": self.job.seconds()}  # fmt: skip
        return Carried.pack(engine.held(self._best), course.after(self.job.summary.steps), facts)

    def adopt(self, state: Carried, engine: Lockstep, progress: Progress) -> None:
        """Go on from another rank's state."""
        self._best = dict(engine.restore(state, same=False).best)
        facts = state.manifest.facts
        progress.adopt(state.manifest.position, facts["progress"], facts["history"])
        self._skipped = facts["skipped"]
        self.job.has_taken(facts["seconds"])

    def regroup(self, engine: Lockstep, comm: MeteredComm, facts: Mapping[str, Any], *, lost: bool) -> None:
        """Train with the ranks of this communicator, which have the same state; all of them call this.

        `lost`: one of the ranks before is not there any more.
        """
        job = self.job
        job.comm = comm
        job.console.leads = comm.rank == 0
        job.source.share_with(comm)
        engine.regroup(comm, facts)
        engine.stream = comm.rank
        seed_dropout(self.spec, engine.stream, job.summary.steps)
        if self._checkpoints:
            self._checkpoints.regroup(lost=lost)

    def _count_skipped(self, result: StepResult, step: int) -> None:
        """Keep the numbers of the last updates in a row that were skipped."""
        if not result.finite and self._skipped[-1:] != [step]:
            self._skipped = [*(self._skipped if self._skipped[-1:] == [step - 1] else ()), step]

    def _not_finite(self, engine: Lockstep, result: StepResult, step: int) -> None:
        """No rank has made this update. Skip it, or end the training."""
        what = "a gradient is not finite" if result.sums.finite else f"the loss is {result.sums.loss}"
        self._count_skipped(result, step)
        if self.spec.on_nan == SKIP and len(self._skipped) <= MOST_SKIPPED:
            self.job.console.line(f"Skipped update {step + 1}: {what}", always=True)
            return
        self._watch.check(engine.gradients(), self.job.comm, step + 1, what)

    def _evaluate(self, engine: Lockstep, name: str) -> Sums:
        """The sums over the `validation` or `test` set."""
        job = self.job
        count, batches = job.source.evaluation(name)

        def shown() -> Iterator[Batch]:
            for batch in batches:
                yield batch
                job.console.advance()
                if job.elastic:
                    job.elastic.alive()

        job.console.start_bar(count, name)
        counts = no_confusion(self.spec, job.source.info) if name == "test" else None
        engine.scorer.confusion = counts
        result = engine.evaluate(shown())
        job.console.end_bar()
        if counts is not None:
            engine.scorer.confusion, counts = None, counts.to(job.comm.device)
            job.comm.allreduce(counts.view(-1))
            job.summary.confusion = confusion_of(counts, job.source.info.test)
        if not result.finite:
            self._watch.check(engine.state_dict(), job.comm, job.summary.steps, f"the {name} loss is {result.loss}")
        return result

    def finish(self, engine: Engine, progress: Progress, *, interrupted: bool) -> None:
        """After the last step: save the summary and the weights in the run folder, on rank 0."""
        job, summary, folder = self.job, self.job.summary, self.job.folder
        job.recorder.flush()  # before the summary can say that the run is complete
        summary.total_seconds = job.seconds()
        progress.finish(interrupted=interrupted)
        engine.measure(job)  # all ranks of a synchronous run have flushed by then
        if job.comm.rank == 0:
            summary.disturbed = self._disturbance()
            if judged := judge_folder(folder, summary):
                summary.verdict, summary.slow_rank = judged.text, judged.rank
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


def check_space(job: Job, engine: Engine) -> None:
    """Raise an error if the disk has no space for the weights; warn if it has none for checkpoints."""
    spec, folder = job.spec, job.folder
    if spec.emulated:
        return
    free = shutil.disk_usage(folder).free
    weights = engine.parameters * (8 if spec.dtype == "float64" else 4)
    if free < weights:
        raise UsageError(
            f"{folder} is on a disk with {free / 1e6:,.1f} MB free, and the weights take {weights / 1e6:,.1f} MB: "
            "free some space, or choose another --output-dir"
        )
    each = weights * (2 if spec.optimizer == "sgd" else 3) + weights * (spec.validation > 0)
    needed = weights + each * (spec.keep_checkpoints + 1)  # old ones are removed when a new one is complete
    if free < needed and (spec.checkpoint_every or spec.checkpoint_seconds):
        what = f"the weights and {spec.keep_checkpoints + 1} checkpoints take {needed / 1e6:,.1f} MB"
        job.console.line(f"warning: {folder} is on a disk with {free / 1e6:,.1f} MB free; {what}", always=True)
