"""The only training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.comm.metered import MeteredComm
from paceline.comm.words import all_or_none
from paceline.data.table import DataInfo
from paceline.layout import peak_rss_bytes
from paceline.records import COMPLETED, INTERRUPTED, RUNNING, Summary, conclude, write_summary
from paceline.spec import RunSpec
from paceline.strategies.base import Batch, Evaluation, Laps, StepResult, Strategy
from paceline.training.console import Console
from paceline.training.divided import prepare_divided
from paceline.training.finite import Watch
from paceline.training.input import Input
from paceline.training.learned import Learned
from paceline.training.prepared import Prepared
from paceline.training.rate import learning_rate
from paceline.training.sampler import Sampler
from paceline.training.setup import Place, make_emulation, make_input, make_model, prepare_strategy
from paceline.training.trace import Trace
from paceline.training.weights import check_space, save

TIMELINES = 20  # steps whose every event is written down, where a strategy has some


@dataclass
class Job:
    """What one rank needs to train: the spec, its place among the ranks, and where its words go."""

    spec: RunSpec
    comm: MeteredComm
    place: Place
    folder: Path
    console: Console
    trace: Trace
    stop: Callable[[], bool]
    summary: Summary


def train(job: Job) -> None:
    """Train as the spec says and fill in the summary; rank 0 leaves it and the model in the run folder."""
    start = time.perf_counter()
    summary = job.summary
    summary.threads = torch.get_num_threads()
    source = make_input(job.spec, job.comm, job.place)
    job.comm.barrier()
    summary.read_seconds = time.perf_counter() - start
    if job.spec.reads:
        job.console.line(f"Time taken to read the data: {summary.read_seconds:.2f} s")

    prepared = prepare_divided(job, source.info) if job.spec.divided else _prepare_whole(job, source.info)
    strategy, summary.parameters = prepared.strategy, prepared.parameters
    if prepared.fresh:
        job.console.line(f"New weights, not from {job.spec.weights}: {', '.join(prepared.fresh)}")
    watch = Watch(strategy.model)
    try:
        all_or_none(
            lambda: check_space(job.folder, job.spec, prepared.parameters) if not job.comm.rank else None, job.comm
        )
        interrupted = _run_epochs(job, strategy, source, summary, watch)
        if job.spec.test and not interrupted:
            test = _evaluate(job, strategy, source, "test", watch)
            summary.test_loss, summary.test_accuracy = test.loss, test.accuracy
            which = f" (weights of epoch {summary.best_epoch})" if summary.best_epoch is not None else ""
            job.console.line(f"\nTest loss: {test.loss:.4f}, test accuracy: {test.accuracy:.2%}{which}")
        strategy.agree()
        summary.total_seconds = time.perf_counter() - start
        _measure(job, strategy, summary)
        summary.epochs = len(summary.epoch_seconds)
        summary.status = INTERRUPTED if interrupted else COMPLETED
    finally:
        strategy.close()
    job.console.total(summary)
    if job.comm.rank == 0:  # the results are kept even if the weights cannot be
        write_summary(job.folder, replace(summary, status=RUNNING))
    prepared.save(job.folder / "model.safetensors")
    if job.comm.rank == 0:
        conclude(job.folder, summary)
    job.trace.record("end", time=time.time(), status=summary.status)
    job.comm.barrier()


def _prepare_whole(job: Job, data: DataInfo) -> Prepared:
    """Of ranks that each have the whole model, or an emulation of it."""
    spec, comm = job.spec, job.comm
    model, fresh = all_or_none(lambda: make_model(spec, data, job.place), comm)
    parameters = sum(p.numel() for p in model.parameters())
    emulation = all_or_none(lambda: make_emulation(spec, data, model, job.place), comm)
    if emulation:
        job.summary.compute_seconds = emulation.batch_seconds
        job.console.line(emulation.about)
        strategy = prepare_strategy(spec, comm, emulation.model, emulation.device)
        return Prepared(strategy, parameters, fresh, lambda path: None)
    strategy = prepare_strategy(spec, comm, model)
    return Prepared(strategy, parameters, fresh, lambda path: save(strategy.state(), path) if not comm.rank else None)


def _run_epochs(job: Job, strategy: Strategy, source: Input, summary: Summary, watch: Watch) -> bool:
    """All epochs, and back to the best one where there is a validation set; true if a rank wanted to stop."""
    spec = job.spec
    sampler = Sampler(
        len(source.numbers["train"]), spec.batch_size * source.readers, source.reader, source.readers, spec.seed
    )
    total_steps = spec.steps or spec.epochs * len(sampler)
    best: dict[str, Tensor] | None = None
    for epoch in range(-(-total_steps // len(sampler))):
        stopped = _run_epoch(job, strategy, source, sampler, summary, epoch, total_steps, watch)
        if not spec.emulated and (stopped or spec.validation or summary.steps == total_steps):
            watch.check(strategy.state(), job.comm, summary.steps)
        if stopped:
            summary.best_epoch = None  # the weights that are saved are the last ones
            job.console.line(f"\nInterrupted: stopped after step {summary.steps} of {total_steps}.")
            return True
        if len(source.numbers["validation"]):
            result = _evaluate(job, strategy, source, "validation", watch)
            summary.validation_loss.append(result.loss)
            summary.validation_accuracy.append(result.accuracy)
            job.console.line(f"Validation acc: {result.accuracy:.4f}, validation loss: {result.loss:.4f}")
            if result.loss == min(summary.validation_loss):
                summary.best_epoch = epoch
                strategy.agree()
                best = {name: tensor.clone() for name, tensor in strategy.state().items()}
    if best is not None:
        strategy.load_state(best)
    return False


def _run_epoch(
    job: Job,
    strategy: Strategy,
    source: Input,
    sampler: Sampler,
    summary: Summary,
    epoch: int,
    total_steps: int,
    watch: Watch,
) -> bool:
    """One epoch, or what is left of the steps; true if a rank wanted to stop."""
    spec, console = job.spec, job.console
    console.line(f"\nStart of epoch {epoch}")
    steps = min(len(sampler), total_steps - summary.steps)
    console.start_bar(steps, f"epoch {epoch}{', emulated' if spec.emulated else ''}")
    start = ended = time.perf_counter()
    job.trace.clock.lap()  # what was before belongs to no step
    learned, stopped = Learned(spec), False
    for number, batch in enumerate(source.epoch(sampler, steps), 1):
        # A step begins where the last one ended: no time goes uncounted.
        laps = Laps(last=ended, clock=job.trace.clock)
        if strategy.timeline and summary.steps < TIMELINES:
            laps.events = []
        laps.mark("input")
        lr = learning_rate(spec, summary.steps, len(sampler), total_steps)
        watch.begin(everything=number == steps)
        result = _step(strategy, batch, sampler.size, lr, job.stop(), laps)
        seconds, ended = laps.last - ended, laps.last
        summary.steps += 1
        watch.end(summary.steps)
        learned.add(result.loss_sum, result.correct, result.count)
        if not math.isfinite(result.loss_sum):
            watch.check(strategy.state(), job.comm, summary.steps, f"the loss is {result.loss_sum}")
        job.trace.step(
            summary.steps - 1,
            epoch,
            seconds,
            result.count,
            laps.parts,
            laps.queued,
            own=len(batch.labels),
            **({} if spec.emulated else {"loss": result.loss_sum / result.count, "lr": lr}),
        )
        if laps.events:
            job.trace.timeline(summary.steps - 1, laps.events)
        console.step(number, seconds, result.count, total_steps - summary.steps, spec.log_every, learned.bar())
        if result.stop:
            stopped = True
            break
    console.end_bar()
    summary.epoch_seconds.append(time.perf_counter() - start)
    means = learned.means()
    if means:
        summary.train_loss.append(means["loss"])
        summary.train_accuracy.append(means["accuracy"])
    job.trace.record("epoch", epoch=epoch, seconds=summary.epoch_seconds[-1], samples=learned.count, **means)
    console.line(f"Time taken: {summary.epoch_seconds[-1]:.2f} s")
    console.line(learned.line())
    return stopped


def _step(strategy: Strategy, batch: Batch, shares: int, lr: float, stop: bool, laps: Laps) -> StepResult:
    """One update. Running statistics move by the mean of what each rank's samples do to them, weighted by the samples.

    Where all ranks have as many, each can go on with its own: running statistics are a linear recursion, so their mean,
    taken when it is needed, is what a mean after every update would have come to.
    """
    uneven = batch.global_count % shares != 0
    if uneven:
        strategy.agree()
        laps.mark("wait")
    result = strategy.step(batch, lr, stop, laps)
    if uneven:
        strategy.agree(len(batch.labels) / batch.global_count)
        laps.mark("wait")
    return result


def _evaluate(job: Job, strategy: Strategy, source: Input, name: str, watch: Watch) -> Evaluation:
    """Mean loss and accuracy on the `validation` or `test` set."""
    count, batches = source.evaluation(name)

    def shown() -> Iterator[Batch]:
        for batch in batches:
            yield batch
            job.console.advance()

    job.console.start_bar(count, name)
    result = strategy.evaluate(shown())
    job.console.end_bar()
    if not math.isfinite(result.loss):
        watch.check(strategy.state(), job.comm, job.summary.steps, f"the {name} loss is {result.loss}")
    return result


def _measure(job: Job, strategy: Strategy, summary: Summary) -> None:
    """Put every rank's counts into the summary: bytes and messages of averaging gradients, seconds of all."""
    meter, gradients = job.comm.meter.total(), strategy.gradient_meter()
    mine = [
        gradients.bytes_sent + gradients.opaque_bytes,
        gradients.bytes_received + gradients.opaque_bytes,
        gradients.messages_sent,
        gradients.messages_received,
        peak_rss_bytes(),
    ]
    seconds = [meter.seconds, job.trace.input_seconds, job.trace.cpu_seconds()]
    table = torch.zeros(job.comm.size, len(mine) + len(seconds), dtype=torch.float64)
    table[job.comm.rank] = torch.tensor([*mine, *seconds], dtype=torch.float64)
    table = table.to(job.comm.device)
    job.comm.allreduce(table.view(-1))
    columns = table.T.tolist()
    counts = [[int(value) for value in column] for column in columns[: len(mine)]]
    summary.bytes_sent, summary.bytes_received, summary.messages_sent, summary.messages_received = counts[:4]
    summary.peak_rss_bytes = counts[4]
    summary.comm_seconds, summary.input_seconds, summary.cpu_seconds = columns[len(mine) :]
    summary.disturbed = job.trace.disturbance(emulated=job.spec.emulated) if job.comm.rank == 0 else None
    summary.update_seconds = job.trace.update_seconds()
    summary.images_per_second = job.trace.images_per_second()
    for name, value in strategy.notes().items():
        setattr(summary, name, value)
