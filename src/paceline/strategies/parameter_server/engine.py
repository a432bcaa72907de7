"""Training with parameter servers: the engines of the leading server, other servers, and workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, astuple, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline import __version__
from paceline.checkpoint import manifest as checkpoints
from paceline.checkpoint.file_format import save
from paceline.checkpoint.save import Saver
from paceline.data import table as datasets
from paceline.data.batch import Batch
from paceline.data.course import Course, Position
from paceline.data.input import CountedInput, OwnInput, evaluation_batch
from paceline.data.load import load
from paceline.data.sampler import shuffle
from paceline.data.table import DataInfo
from paceline.errors import DivergedError
from paceline.models.properties import properties_of
from paceline.options import flag
from paceline.run.folder import CHECKPOINTS, conclude
from paceline.run.liveness import is_here
from paceline.run.recorder import Recorder
from paceline.run.records import INTERRUPTED, Summary
from paceline.server.client import Client
from paceline.server.core import Core
from paceline.server.layout import CHUNK_BYTES, Layout
from paceline.server.lead import Leader
from paceline.server.ledger import TRAIN, Part, UpdatePlan
from paceline.server.roles import Meeting, Rules, mismatch
from paceline.server.serve import lead, serve
from paceline.server.shard import Shard
from paceline.server.sockets import Listener
from paceline.server.wire import numbers, take
from paceline.spec import RunSpec
from paceline.strategies.engine import Engine
from paceline.strategies.finite import MOST_SKIPPED, SKIP, not_finite
from paceline.strategies.parameter_server import CHECKPOINT_EVERY, ParameterServer
from paceline.strategies.parameter_server.event_log import EventLog, lost_workers
from paceline.strategies.parameter_server.figures import Figures
from paceline.strategies.parameter_server.flat import FlatModel
from paceline.strategies.parameter_server.store import CheckpointStore
from paceline.strategies.parameter_server.work import Work
from paceline.strategies.rate import learning_rate
from paceline.strategies.saving import describe
from paceline.strategies.setup import (
    Emulation,
    confusion_of,
    make_emulation,
    make_model,
    make_optimizer,
    make_scorer,
    no_confusion,
)
from paceline.tasks.base import Sums

if TYPE_CHECKING:
    from paceline.training.driver import Driver, Job

# Options that may differ from machine to machine.
OWN_OPTIONS = ("output_dir", "name", "data_dir", "threads", "device", "timeout", "log_every", "resume")
# A worker sends this many heartbeats within --worker-timeout.
BEATS = 5


@dataclass
class Membership:
    """A rank among servers and workers: who it is, where the servers are, and its callbacks."""

    meeting: Meeting
    listener: Listener | None  # of a server
    rank: int
    life: int
    about: dict[str, Any]
    opened: Callable[[dict[str, str]], Any]  # told where the run folder is; returns the recorder of a worker
    ranks_up: Callable[[dict[int, dict[str, Any]]], None] = lambda ranks: None
    gone: Callable[[], dict[int, str]] = dict  # workers that will not join, and why, if a launcher knows
    folder: Path | None = None  # if Paceline's launcher created it
    restarted: bool = False
    where: dict[str, str] = field(default_factory=dict)  # the leader's: what others must know of the run folder
    left: bool = False  # it was asked to stop, and has left a run that continues


def prepare(job: Job) -> Engine:
    """Create the engine of a rank: servers are the first ranks, and rank 0 is the leader."""
    assert job.membership is not None
    if job.membership.rank >= job.spec.servers:
        return Worker(job, job.membership)
    return LeadServer(job, job.membership) if job.membership.rank == 0 else Server(job, job.membership)


def staleness_of(spec: RunSpec) -> int | None:
    assert isinstance(spec.method, ParameterServer)
    return spec.method.bound(spec)


def plan_of(spec: RunSpec, info: DataInfo, start: Position) -> UpdatePlan:
    samples = info.train - spec.validation_samples(info)
    course = Course(samples, spec.update_batch, start)
    return UpdatePlan(samples, spec.update_batch, spec.steps or course.end(spec.epochs - 1), staleness_of(spec), start)


def _fingerprint(spec: RunSpec, flat: FlatModel, info: DataInfo) -> dict[str, str]:
    """What must be the same on every rank of a run, by its name in error messages."""
    options = {flag(name): repr(getattr(spec, name)) for name in spec.names if name not in OWN_OPTIONS}
    return {
        "version of paceline": __version__,
        **options,
        "data set": f"{info.train} + {info.test} samples of shape {info.shape}, {info.classes} classes",
        "model": flat.digest(),
    }


class Served(Engine):
    """Holds the model as one flat vector, or an emulation of it."""

    def __init__(self, job: Job, membership: Membership, info: DataInfo) -> None:
        self.job, self.membership, self.info, spec = job, membership, info, job.spec
        model, self.fresh = make_model(spec, info, job.place)
        self.emulation: Emulation | None = make_emulation(spec, info, model, job.place, membership.rank)
        self.parameters, self.properties = sum(p.numel() for p in model.parameters()), properties_of(model)
        self.flat = FlatModel(self.emulation.model if self.emulation else model)
        self.layout, self.plan = layout_of(spec, self.flat), plan_of(spec, info, job.start)
        super().__init__(self.flat.model)

    def save(self, path: Path) -> None:
        save(self.state_dict(), path)

    def measure(self, job: Job) -> None:
        """Do nothing: the leader counts for all ranks."""


class Server(Served):
    """Holds a shard of the weights; builds the model for their initial values."""

    def __init__(self, job: Job, membership: Membership) -> None:
        spec = job.spec
        folder = Path(spec.data_dir) if spec.data_dir else None
        super().__init__(job, membership, datasets.describe(spec.data) or load(spec.data, folder).info)
        assert membership.listener is not None
        self.listener = membership.listener

    def shard(self) -> Shard:
        spec, plan, layout = self.job.spec, self.plan, self.layout
        values, kept = {}, {}
        for chunk in layout.of_server(self.membership.rank):
            span = layout.span(chunk)
            trainable = min(len(span), max(0, self.flat.trainable - span.start))
            values[chunk] = self.flat.weights[span.start : span.stop], trainable
            first = span.start + trainable - self.flat.trainable
            kept[chunk] = self.flat.kept[first : first + len(span) - trainable]
        return Shard(
            values,
            lambda parameters: make_optimizer(spec, parameters),
            self.rate,
            plan.staleness,
            adapt=spec.staleness_lr,
            updates=plan.updates,
            kept=kept,
            clip=(spec.clip_norm or 0.0) if plan.staleness is not None else 0.0,
            memory=self.listener.memory_of_weights(layout.bytes_of_server(self.membership.rank), spec.ranks),
        )

    def rate(self, update: int) -> float:
        return learning_rate(self.job.spec, update, self.plan.per_epoch, self.plan.updates)

    def store(self, folder: Path, recorder: Recorder | None = None) -> CheckpointStore | None:
        """Where this server saves its part of checkpoints; nowhere with emulated compute, which trains nothing."""
        spec, rank = self.job.spec, self.membership.rank
        if spec.emulated:
            return None
        saver = Saver(folder / CHECKPOINTS, rank, range(spec.servers), spec.keep_checkpoints, spec.timeout, recorder)
        return CheckpointStore(saver, self.flat, self.layout, self.layout.of_server(rank), self.describe)

    def describe(self, number: int, facts: dict[str, Any], parts: tuple[checkpoints.Part, ...]) -> checkpoints.Manifest:
        """The manifest, which the leader writes."""
        position = self.plan.course.after(number)
        epoch = facts["tally"]["epochs"].get(position.epoch, {"sums": Sums(), "count": 0})
        progress = {"sums": epoch["sums"], "samples": epoch["count"], "skipped": self.job.summary.skipped}
        facts = {"progress": progress, **facts}
        return describe(self.job, self.plan.course, number, facts, parts)

    def run(self, driver: Driver) -> None:
        """Serve until the leader ends the run."""
        job, spec, member = self.job, self.job.spec, self.membership
        core = Core(member.rank, member.meeting.run, member.life, self.shard())
        core.about = member.about

        def attached(words: dict[str, Any]) -> str | None:
            path, start, fingerprint = take(words, folder=str, start=list, fingerprint=dict)
            self.plan = plan_of(spec, self.info, Position(*numbers(start)))
            core.shard.rate, core.shard.updates = self.rate, self.plan.updates
            member.opened({name: text for name, text in words.items() if isinstance(text, str)})
            here = member.folder is not None or is_here(Path(path), str(words.get("owner", "")))
            if core.store is None and here:
                core.store = self.store(Path(path))
                if self.plan.staleness is None:
                    core.restore(max(core.checkpoints()))
            return mismatch(member.rank, _fingerprint(spec, self.flat, self.info), fingerprint)

        core.on_attach = attached
        with closing(self.listener):
            member.left = serve(core, self.listener, spec.timeout, job.stop)
        if isinstance(core.store, CheckpointStore):
            core.store.saver.wait(spec.timeout)


class LeadServer(Server):
    """The leading server reports every update to the driver, and saves the summary and the model."""

    leader: Leader

    def run(self, driver: Driver) -> None:
        job, spec, member, info = self.job, self.job.spec, self.membership, self.info
        if self.emulation:
            job.summary.compute_seconds = self.emulation.batch_seconds
            job.console.line(self.emulation.about)
        self.progress = progress = driver.begin(self, self.plan.course)
        store = self.store(job.folder, job.recorder)
        events = EventLog(job, self.plan, progress, member.ranks_up, store.saver if store else None)
        self.leader = leader = Leader(
            member.meeting.run,
            member.life,
            self.shard(),
            self.layout,
            self.plan,
            _rules(spec, info),
            progress.validations,
            _fingerprint(spec, self.flat, info),
            events,
            store,
            {"folder": str(job.folder), "start": list(astuple(job.start)), **member.where},
            member.restarted,
        )
        events.can_save = lambda: leader.can_save
        constants = not_finite(dict(self.model.named_buffers()))

        def bad_tensor() -> str | None:
            """Load this server's weights into the model; return the first tensor that is not finite."""
            collected = {n: torch.frombuffer(v, dtype=self.flat.weights.dtype) for n, v in leader.collected.items()}
            for n, values in (collected | {n: chunk.values for n, chunk in leader.shard.chunks.items()}).items():
                span = self.layout.span(n)
                self.flat.weights[span.start : span.stop].copy_(values)
            self.flat.arrived()
            return next(iter(not_finite(self.model.state_dict(), constants)), None)

        def save_all() -> None:
            if bad_tensor():
                leader.fail(DivergedError.found("the model is not finite", leader.tally.updates, {}))
                return
            job.summary.steps = leader.tally.updates
            if store:
                store.saver.wait(spec.timeout)
                events.report()
            driver.finish(self, progress, interrupted=leader.stopping)

        with closing(self.listener):
            meeting = member.meeting
            lead(leader, self.listener, meeting.endpoints, meeting.secret, job.stop, save_all, member.gone)
        if isinstance(leader.error, DivergedError):
            raise leader.error.naming(self.flat.name(leader.nonfinite_place) or bad_tensor())
        if leader.error:
            raise leader.error
        if not leader.begun:  # there is nothing to save
            job.summary.status = INTERRUPTED
            conclude(job.folder, job.summary)

    def measure(self, job: Job) -> None:
        figures = Figures(security=self.membership.meeting.security, lost_workers=lost_workers(job.recorder))
        _count(self.leader, job.spec, job.summary, figures)
        rows = [about["confusion"] for about in self.leader.said.values() if about.get("confusion")]
        if rows and len({len(row) for row in rows}) == 1:
            counts = torch.tensor(rows, dtype=torch.float64).sum(0)
            job.summary.confusion = confusion_of(counts.view(self.info.classes, -1), self.info.test)
        job.summary.figures[job.summary.strategy] = asdict(figures)


class Worker(Served):
    """Computes the gradients that the leader leases to it, until the leader ends the run."""

    def __init__(self, job: Job, membership: Membership) -> None:
        super().__init__(job, membership, job.source.info)

    def run(self, driver: Driver) -> None:
        job, spec, member, source = self.job, self.job.spec, self.membership, self.job.source
        assert isinstance(source, OwnInput | CountedInput)
        samples = len(source.numbers["train"])
        order = lru_cache(maxsize=2)(lambda epoch: shuffle(samples, spec.seed, epoch))

        def make_batch(part: Part) -> Batch:
            if part.kind == TRAIN:
                return source.pick(TRAIN, order(part.epoch)[part.start : part.stop], part.epoch)
            return source.pick(part.kind, torch.arange(part.start, part.stop))

        client = Client(member.rank, member.meeting.run, member.life, self.layout, self.flat.weights,
                        member.meeting.endpoints, member.meeting.secret, spec.timeout, self.plan.staleness,
                        spec.worker_timeout / BEATS)  # fmt: skip
        with closing(client):
            task = Work(
                client,
                self.flat,
                make_batch,
                make_scorer(spec),
                spec.accumulate,
                (spec.clip_norm or 0.0) if self.plan.staleness is None else 0.0,
                spec.seed,
                member.opened,
                job.stop,
                device=self.emulation.device if self.emulation else None,
                confusion=no_confusion(spec, source.info),
            )
            about = member.about | {"read_seconds": job.summary.read_seconds}
            member.left = task.run(_fingerprint(spec, self.flat, source.info), about)


def _rules(spec: RunSpec, info: DataInfo) -> Rules:
    return Rules(
        workers=tuple(range(spec.servers, spec.ranks)),
        servers=spec.servers,
        silent=spec.worker_timeout,
        patience=spec.timeout,
        validation=spec.validation_samples(info),
        test=info.test if spec.test else 0,
        evaluation_batch=evaluation_batch(info, spec.input_shape(info)),
        save_every=CHECKPOINT_EVERY if spec.checkpoint_every is None else spec.checkpoint_every,
        save_seconds=spec.checkpoint_seconds,
        skips=MOST_SKIPPED if spec.on_nan == SKIP else 0,
    )


def layout_of(spec: RunSpec, flat: FlatModel) -> Layout:
    chunk = CHUNK_BYTES // spec.shrink
    return Layout(flat.length, flat.trainable, spec.servers, flat.weights.element_size(), chunk)


def _count(leader: Leader, spec: RunSpec, summary: Summary, figures: Figures) -> None:
    """Add every rank's counts to the summary, in rank order."""
    ranks: list[list[dict[str, Any]]] = [[] for _ in range(spec.ranks)]  # one row for each start of the rank
    ranks[0].append(vars(leader.traffic))
    others = leader.others
    for server, traffic in [*others.past, *((server, state.traffic) for server, state in others.states.items())]:
        ranks[server].append(traffic)
    for (rank, _), about in leader.said.items():
        ranks[rank].append(about)

    def column(name: str) -> list[Any]:
        return [sum(row.get(name, 0) for row in rows) for rows in ranks]

    summary.bytes_sent, summary.bytes_received = column("bytes_sent"), column("bytes_received")
    summary.messages_sent, summary.messages_received = column("messages_sent"), column("messages_received")
    figures.wait_seconds, summary.cpu_seconds = column("wait_seconds"), column("cpu_seconds")
    summary.input_seconds, summary.comm_seconds = column("input_seconds"), figures.wait_seconds
    summary.peak_rss_bytes = [max((row.get("peak_rss_bytes", 0) for row in rows), default=0) for rows in ranks]
    summary.wire = "exact"
    tally = leader.tally
    figures.gradients = [tally.gradients.get(rank, 0) for rank in range(spec.ranks)]
    figures.staleness = {str(missed): count for missed, count in sorted(tally.staleness.items())}
    if tally.staleness:
        figures.staleness_mean = sum(m * c for m, c in tally.staleness.items()) / tally.staleness.total()
        figures.staleness_max = max(tally.staleness)
    dropped: Counter[str] = Counter()
    for rows in ranks[: leader.rules.servers]:
        for row in rows:
            dropped.update(row["dropped"])
    figures.dropped_messages = dict(dropped)
    figures.returns = [asdict(each) for each in leader.returns]
