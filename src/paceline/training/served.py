"""Training with parameter servers: what each rank does, as the server that leads, another server, or a worker."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.comm.single import SingleComm
from paceline.data import table as datasets
from paceline.data.load import load
from paceline.data.table import DataInfo
from paceline.errors import DivergedError
from paceline.records import COMPLETED, INTERRUPTED, RUNNING, Summary, conclude, write_summary
from paceline.server.client import Client
from paceline.server.core import Core
from paceline.server.lead import Leader
from paceline.server.ledger import TRAIN, Part, Plan
from paceline.server.roles import Meeting, Rules, mismatch
from paceline.server.serve import lead, serve
from paceline.server.shard import CHUNK_BYTES, Layout, Shard
from paceline.server.snapshot import Snapshots
from paceline.server.sockets import Listener
from paceline.server.wire import take
from paceline.spec import FIELDS, RunSpec
from paceline.strategies.base import Batch
from paceline.strategies.flat import FlatModel
from paceline.training.chronicle import Chronicle
from paceline.training.console import Console
from paceline.training.finite import not_finite
from paceline.training.input import CountedInput, OwnInput, evaluation_batch
from paceline.training.rate import learning_rate
from paceline.training.sampler import shuffle
from paceline.training.setup import Place, make_emulation, make_input, make_model, make_optimizer
from paceline.training.trace import Trace
from paceline.training.weights import check_space, save
from paceline.training.work import Work

# What may differ from machine to machine.
OWN_OPTIONS = ("output_dir", "name", "data_dir", "threads", "device", "timeout", "log_every")
# A worker shows that it lives this many times before it would be given up.
BEATS = 5


@dataclass
class ServedJob:
    """What one rank needs: the spec, where the servers are, who it is."""

    spec: RunSpec
    meeting: Meeting
    place: Place
    rank: int
    life: int
    about: dict[str, Any]
    stop: Callable[[], bool]
    gone: Callable[[], dict[int, str]] = dict  # workers that will not come, and why, as far as a launcher knows


def plan_of(spec: RunSpec, info: DataInfo) -> Plan:
    samples = info.train - spec.validation_samples(info)
    per_epoch = -(-samples // spec.global_batch)
    return Plan(samples, spec.global_batch, spec.steps or spec.epochs * per_epoch, spec.staleness)


def _creed(spec: RunSpec, flat: FlatModel, info: DataInfo) -> dict[str, str]:
    """What every rank of a run must have alike, by the words that people know it by."""
    options = {"--" + name.replace("_", "-"): repr(getattr(spec, name)) for name in FIELDS if name not in OWN_OPTIONS}
    return {
        "version of paceline": __version__,
        **options,
        "data set": f"{info.train} + {info.test} samples of shape {info.shape}, {info.classes} classes",
        "model": flat.digest(),
    }


class Server:
    """A server's rank: builds the model for its first weights, keeps its shard of them."""

    def __init__(self, job: ServedJob, listener: Listener) -> None:
        self.job, self.listener, spec = job, listener, job.spec
        assert spec.servers is not None
        folder = Path(spec.data_dir) if spec.data_dir else None
        self.info = datasets.describe(spec.data) or load(spec.data, folder).info
        model, self.fresh = make_model(spec, self.info, job.place)
        self.emulation = make_emulation(spec, self.info, model, job.place)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.flat = FlatModel(self.emulation.model if self.emulation else model)
        self.layout = layout_of(spec, self.flat)
        self.plan = plan_of(spec, self.info)

    def shard(self) -> Shard:
        spec, plan, layout = self.job.spec, self.plan, self.layout
        values, kept = {}, {}
        for chunk in layout.of_server(self.job.rank):
            span = layout.span(chunk)
            trainable = min(len(span), max(0, self.flat.trainable - span.start))
            values[chunk] = self.flat.weights[span.start : span.stop], trainable
            first = span.start + trainable - self.flat.trainable
            kept[chunk] = self.flat.kept[first : first + len(span) - trainable]
        return Shard(
            values,
            lambda parameters: make_optimizer(spec, parameters),
            lambda update: learning_rate(spec, update, plan.per_epoch, plan.updates),
            spec.staleness,
            adapt=spec.staleness_lr,
            updates=plan.updates,
            kept=kept,
        )

    def serve(self, folder: Path | None, opened: Callable[[Path], object]) -> bool:
        """Of a server that does not lead; `opened` is told the run folder when the leader has named it.

        True if it was asked to stop.
        """
        job, spec = self.job, self.job.spec
        core = Core(job.rank, job.meeting.run, job.life, self.shard(), self._snapshots(folder), spec.snapshot_every)
        core.about = job.about

        def attached(words: dict[str, Any]) -> str | None:
            path, creed = take(words, folder=str, creed=dict)
            opened(Path(path))
            if core.store is None and spec.snapshot_every:
                core.store = self._snapshots(Path(path))
                if spec.staleness is None:
                    core.restore(max(core.snapshots()))
            return mismatch(job.rank, _creed(spec, self.flat, self.info), creed)

        core.on_attach = attached
        with closing(self.listener):
            return serve(core, self.listener, spec.timeout, job.stop)

    def _snapshots(self, folder: Path | None) -> Snapshots | None:
        return Snapshots(folder / "snapshots", self.job.rank) if folder and self.job.spec.snapshot_every else None

    def _introduce(self, console: Console, summary: Summary) -> None:
        summary.parameters = self.parameters
        summary.threads = torch.get_num_threads()
        if self.fresh:
            console.line(f"New weights, not from {self.job.spec.weights}: {', '.join(self.fresh)}")
        if self.emulation:
            summary.compute_seconds = self.emulation.batch_seconds
            console.line(self.emulation.about)

    def lead(
        self,
        folder: Path,
        console: Console,
        trace: Trace,
        summary: Summary,
        ranks_up: Callable[[dict[int, dict[str, Any]]], None],
        restarted: bool,
    ) -> None:
        """Of the server that leads: until the run is over; leaves the summary and the model in the run folder."""
        job, spec, info = self.job, self.job.spec, self.info
        start = time.perf_counter()
        chronicle = Chronicle(spec, self.plan, console, trace, summary, ranks_up)
        self._introduce(console, summary)
        check_space(folder, spec, self.parameters)
        leader = Leader(
            job.meeting.run,
            job.life,
            self.shard(),
            self.layout,
            self.plan,
            _rules(spec, info),
            _creed(spec, self.flat, info),
            chronicle,
            self._snapshots(folder),
            spec.snapshot_every,
            {"folder": str(folder)},
            restarted,
        )

        constants = not_finite(dict(self.flat.model.named_buffers()))

        def bad_tensor() -> str | None:
            """Put the weights that are here into the model; the first tensor that is not finite."""
            collected = {n: torch.frombuffer(v, dtype=self.flat.weights.dtype) for n, v in leader.collected.items()}
            for n, values in (collected | {n: chunk.values for n, chunk in leader.shard.chunks.items()}).items():
                span = self.layout.span(n)
                self.flat.weights[span.start : span.stop].copy_(values)
            self.flat.arrived()
            return next(iter(not_finite(self.flat.model.state_dict(), constants)), None)

        def save_all() -> None:
            if bad_tensor():
                leader.fail(DivergedError.found("the model is not finite", leader.tally.updates, {}))
                return
            summary.total_seconds = time.perf_counter() - start
            chronicle.close(leader)
            summary.status = INTERRUPTED if leader.stopping else COMPLETED
            summary.security = job.meeting.security
            _count(leader, spec, summary)
            console.total(summary)
            write_summary(folder, replace(summary, status=RUNNING))  # kept even if the weights cannot be
            if not spec.emulated:
                save(self.flat.model.state_dict(), folder / "model.safetensors")
            conclude(folder, summary)
            shutil.rmtree(folder / "snapshots", ignore_errors=True)
            trace.record("end", time=time.time(), status=summary.status)

        with closing(self.listener):
            lead(leader, self.listener, job.meeting.endpoints, job.meeting.secret, job.stop, save_all, job.gone)
        if isinstance(leader.error, DivergedError):
            raise leader.error.naming(self.flat.name(leader.spoiled_place) or bad_tensor())
        if leader.error:
            raise leader.error
        if not leader.begun:  # there is nothing to save
            summary.status = INTERRUPTED
            conclude(folder, summary)


def _rules(spec: RunSpec, info: DataInfo) -> Rules:
    assert spec.servers is not None
    return Rules(
        workers=tuple(range(spec.servers, spec.ranks)),
        servers=spec.servers,
        silent=spec.worker_timeout,
        patience=spec.timeout,
        validation=spec.validation_samples(info),
        test=info.test if spec.test else 0,
        evaluation_batch=evaluation_batch(spec.image_shape(info)),
    )


def layout_of(spec: RunSpec, flat: FlatModel) -> Layout:
    assert spec.servers is not None
    chunk = CHUNK_BYTES // spec.shrink
    return Layout(flat.length, flat.trainable, spec.servers, flat.weights.element_size(), chunk)


def _count(leader: Leader, spec: RunSpec, summary: Summary) -> None:
    """Every rank's numbers, in the order of the ranks."""
    ranks: list[list[dict[str, Any]]] = [[] for _ in range(spec.ranks)]  # one row for each life
    ranks[0].append(vars(leader.traffic))
    fellows = leader.fellows
    for server, traffic in [*fellows.past, *((server, state.traffic) for server, state in fellows.states.items())]:
        ranks[server].append(traffic)
    for (rank, _), about in leader.said.items():
        ranks[rank].append(about)

    def column(name: str) -> list[Any]:
        return [sum(row.get(name, 0) for row in rows) for rows in ranks]

    summary.bytes_sent, summary.bytes_received = column("bytes_sent"), column("bytes_received")
    summary.messages_sent, summary.messages_received = column("messages_sent"), column("messages_received")
    summary.wait_seconds, summary.cpu_seconds = column("wait_seconds"), column("cpu_seconds")
    summary.input_seconds, summary.comm_seconds = column("input_seconds"), summary.wait_seconds
    summary.peak_rss_bytes = [max((row.get("peak_rss_bytes", 0) for row in rows), default=0) for rows in ranks]
    summary.wire = "exact"
    tally = leader.tally
    summary.gradients = [tally.gradients.get(rank, 0) for rank in range(spec.ranks)]
    summary.staleness = {str(missed): count for missed, count in sorted(tally.staleness.items())}
    if tally.staleness:
        summary.staleness_mean = sum(m * c for m, c in tally.staleness.items()) / tally.staleness.total()
        summary.staleness_max = max(tally.staleness)
    dropped: Counter[str] = Counter()
    for rows in ranks[: leader.rules.servers]:
        for row in rows:
            dropped.update(row["dropped"])
    summary.dropped_messages = dict(dropped)
    summary.returns = [asdict(each) for each in leader.returns]


def work(job: ServedJob, opened: Callable[[Path], Trace]) -> bool:
    """Of a worker: until the leader says that it is over, or until asked to stop: then true.

    `opened` is told the run folder, and opens the trace.
    """
    spec = job.spec
    assert spec.servers is not None
    start = time.perf_counter()
    source = make_input(spec, SingleComm(), job.place)
    about = job.about | {"read_seconds": time.perf_counter() - start}
    assert isinstance(source, OwnInput | CountedInput)
    model, _ = make_model(spec, source.info, job.place)
    emulation = make_emulation(spec, source.info, model, job.place)
    flat = FlatModel(emulation.model if emulation else model)
    if emulation:
        flat.gradient.zero_()  # new memory costs nothing until it is written to
    samples = len(source.numbers["train"])
    order = lru_cache(maxsize=2)(lambda epoch: shuffle(samples, spec.seed, epoch))

    def make_batch(part: Part) -> Batch:
        if part.kind == TRAIN:
            return source.pick(TRAIN, order(part.epoch)[part.start : part.stop], part.epoch)
        return source.pick(part.kind, torch.arange(part.start, part.stop))

    client = Client(job.rank, job.meeting.run, job.life, layout_of(spec, flat), flat.weights, job.meeting.endpoints,
                    job.meeting.secret, spec.timeout, spec.staleness, spec.worker_timeout / BEATS)  # fmt: skip
    with closing(client):
        task = Work(
            client,
            flat,
            make_batch,
            spec.seed,
            opened,
            job.stop,
            device=emulation.device if emulation else None,
            ends_epoch=plan_of(spec, source.info).ends_epoch,
        )
        return task.run(_creed(spec, flat, source.info), about)
