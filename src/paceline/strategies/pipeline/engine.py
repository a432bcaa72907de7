"""The engine of pipeline parallelism: runs one stage, and averages it with the same stage of other replicas."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.state import Cut
from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.comm.base import Comm
from paceline.comm.metered import Meter, MeteredComm
from paceline.comm.words import all_or_none, tell
from paceline.data.batch import Batch
from paceline.errors import AgreedError, UsageError
from paceline.layout import Grid
from paceline.pipeline.devices import stage_devices
from paceline.pipeline.executor import Executor, Neighbours
from paceline.pipeline.graph import Graph
from paceline.pipeline.plan import StagePlan
from paceline.pipeline.schedule import instructions, recomputes
from paceline.pipeline.showing import lines
from paceline.run.atomic import write_whole
from paceline.run.folder import PLAN
from paceline.spec import RunSpec
from paceline.strategies.bucket_layout import together
from paceline.strategies.engine import Restored, StepResult, StepTimer, micro_batches, parts_of
from paceline.strategies.partitioned import PartEngine, Parts, rows
from paceline.strategies.pipeline.planning import make_plan, measure_link, trace_model
from paceline.strategies.replicas import average_buffers, check_equal
from paceline.strategies.setup import make_optimizer, make_scorer, seed_dropout
from paceline.strategies.weights import Piece
from paceline.strict_json import dump
from paceline.tasks.base import Sums

if TYPE_CHECKING:
    from paceline.training.driver import Job


@dataclass(frozen=True)
class PipelineOptions:
    grid: Grid
    schedule: str
    micros: int
    batch_size: int  # of a replica
    averaging: str = "allreduce"
    bucket_mb: float = 4.0
    check_replicas: int = 0

    @property
    def micro_size(self) -> int:
        """Samples of a micro-batch, for which memory is planned; evaluation uses the same size."""
        return -(-self.batch_size // self.micros)


class Pipeline(PartEngine):
    """Runs one stage; `executor` has its layers, and communicates with neighbouring stages.

    `stages_of` says which stages have each parameter and buffer: if there are several, they sum its gradient, so that
    their copies stay equal.
    """

    def __init__(
        self,
        comm: Comm,
        executor: Executor,
        optimizer: torch.optim.Optimizer | None,
        options: PipelineOptions,
        stages_of: Mapping[str, Sequence[int]],
    ) -> None:
        super().__init__(comm, executor.training, optimizer)
        self.scorer = executor.scorer
        self.executor, self.options, self.stages_of, self._steps = executor, options, stages_of, 0
        self.plan: dict[str, Any] = {}  # where the model is cut
        self._besides = Meter()

    def setup(self) -> None:
        self._connect()
        for comm, weights in self._groups:
            for weight in weights:
                comm.broadcast(_row(weight))  # one by one: memory may not suffice for a copy of all
        if self.replicas:
            for buffer in self.model.buffers():
                self.replicas.broadcast(_row(buffer))
        self._beginning = self._sent()

    def _connect(self) -> None:
        """Create the communicators with the ranks that have the same weights."""
        grid = self.options.grid
        self.spot = grid.spot(self.comm.rank)
        self.replicas = self.comm.group(grid.replicas_of(self.comm.rank)) if grid.replicas > 1 else None
        self.averaging = AVERAGINGS[self.options.averaging]
        self._groups = self._by_holders()

    def _by_holders(self) -> list[tuple[Comm, list[Tensor]]]:
        """The weights that other ranks have, too, with a communicator of all that have them.

        Groups are in the same order on all ranks: those that communicate first on one rank do so on the others.
        """
        found: dict[tuple[int, ...], list[Tensor]] = {}
        for name, weight in self.named_model.named_parameters():
            if not weight.is_meta:
                found.setdefault(self.holders(name, None), []).append(weight)
        groups = []
        for ranks in sorted(ranks for ranks in found if len(ranks) > 1):
            own = list(ranks) == self.options.grid.replicas_of(self.comm.rank)
            groups.append((self.replicas if own and self.replicas else self.comm.group(list(ranks)), found[ranks]))
        return groups

    def step(self, batch: Batch, lr: float, ask: int, timer: StepTimer) -> StepResult:
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
        mine, stages, stage = Sums(), self.options.grid.stages, self.spot.stage
        for part in parts_of(batch, self.accumulate):
            if micros := micro_batches(part, self.options.micros, self.options.batch_size):
                program = instructions(self.options.schedule, stages, len(micros), stage)
                mine = mine.plus(self.executor.run(program, micros, 1 / batch.nominal, timer.mark))
        if self._groups:
            self._average(computed=batch.count > 0)
            timer.mark("average")
        totals = torch.tensor([*mine, ask, not self.gradients_finite(), self.squares()], dtype=torch.float64)
        self.comm.allreduce(totals)
        timer.mark("wait")
        *found, asked, bad, squares = totals.tolist()
        sums = Sums(*found)
        finite = sums.finite and not bad
        if self._optimizer is not None and finite:
            self.update(lr, batch.nominal, sums.weight, squares)
        timer.mark("optimizer")
        self._steps += 1
        if self._groups and self.options.check_replicas and self._steps % self.options.check_replicas == 0:
            self.check_replicas()
            timer.mark("check")
        return StepResult(sums, batch.global_count, asked, finite=finite)

    def check_replicas(self) -> None:
        for comm, weights in self._groups:
            check_equal(weights, comm, self._steps)

    @property
    def named_model(self) -> nn.Module:
        assert self.whole is not None
        return self.whole.model

    def holders(self, name: str, cut: Cut | None) -> tuple[int, ...]:
        grid = self.options.grid
        return tuple(grid.rank(replica, s, 0) for replica in range(grid.replicas) for s in self.stages_of[name])

    @property
    def own_buffers(self) -> bool:
        return self.replicas is not None

    def facts(self) -> dict[str, Any]:
        return {"plan": self.plan}

    def restore(self, checkpoint: Checkpoint, *, same: bool) -> Restored:
        self._steps = checkpoint.manifest.position.step
        return super().restore(checkpoint, same=same)

    def _average(self, *, computed: bool) -> None:
        """Sum gradients over all ranks that have the weights: they are already divided by the global batch.

        That is one sum over replicas and stages, so that all copies of a weight get the same bits. A replica without
        samples adds nothing.
        """
        for comm, weights in self._groups:
            if comm is not self.replicas:
                reached = [weight for weight in weights if weight.requires_grad]
            elif computed:
                reached = self._reached = [weight for weight in weights if weight.grad is not None]
            else:  # the graph is fixed: parameters with an earlier gradient have one on the other replicas
                reached = self._reached
            for weight in reached:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
            self._sum(comm, [_row(weight.grad) for weight in reached if weight.grad is not None])

    def _sum(self, comm: Comm, gradients: list[Tensor]) -> None:
        """Large gradients are summed in place, small ones in buckets."""
        limit = int(self.options.bucket_mb * 2**20)
        for numbers in together([gradient.nbytes for gradient in gradients], limit):
            if gradients[numbers[0]].nbytes >= limit:
                self.averaging.run(comm, gradients[numbers[0]])
            else:
                self._sum_together(comm, [gradients[number] for number in numbers])

    def _sum_together(self, comm: Comm, small: list[Tensor]) -> None:
        together = torch.cat(small)
        self.averaging.run(comm, together)
        torch._foreach_copy_(small, list(together.split([len(gradient) for gradient in small])))

    def evaluate(self, batches: Iterable[Batch]) -> Sums:
        self.agree()
        before, size = self._sent(), self.options.micro_size
        self.executor.evaluation.eval()
        with torch.inference_mode():
            micros = (micro for batch in batches for micro in parts_of(batch, -(-batch.count // size)))
            sums = self.executor.evaluate(micros)
        self.executor.training.train()
        self._besides = self._besides.plus(self._sent()).plus(before, -1)
        return self.sum_over_ranks(sums)

    def agree(self, weight: float | None = None) -> None:
        if self.replicas:
            before = self._sent()
            average_buffers(self.model, self.replicas, weight)
            self._besides = self._besides.plus(self._sent()).plus(before, -1)

    def notes(self) -> dict[str, Any]:
        exact = not self._groups or self.averaging.cost(2, 1).exact
        return {"wire": "exact" if exact else "opaque"}

    def gradient_meter(self) -> Meter:
        """Traffic of training steps: activations and gradients between stages, and averaging."""
        return self._sent().plus(self._besides, -1).plus(self._beginning, -1)

    def _sent(self) -> Meter:
        return Meter(children=[comm.meter for comm in self._comms() if isinstance(comm, MeteredComm)]).total()

    def close(self) -> None:
        for comm in self._comms():
            comm.close()

    def _comms(self) -> list[Comm]:
        every = {id(comm): comm for comm in (self.executor.comm, self.replicas, *(comm for comm, _ in self._groups))}
        return [comm for comm in every.values() if comm is not None and comm is not self.comm]


def _row(tensor: Tensor) -> Tensor:
    """A flat view of its values in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def prepare(job: Job) -> PartEngine:
    spec, comm, grid = job.spec, job.comm, job.spec.grid
    spot, parts = grid.spot(comm.rank), Parts(job)
    graph = all_or_none(lambda: trace_model(spec, job.source.info, parts.deferred.model, job.place), comm)
    if spec.emulated:
        from paceline.strategies.pipeline.emulated import emulate

        return emulate(job, parts, graph)
    plan = _agree_on_cuts(job, graph)
    edges = [0, *StagePlan.from_dict(plan).positions(), len(graph.nodes)]
    having = stages_of(graph, edges)
    parts.fill(graph.model, [name for name, stages in having.items() if spot.stage in stages])
    again = spec.recompute and recomputes(spec.schedule, grid.stages, spec.microbatches, spot.stage)
    executor = Executor(
        graph,
        edges[spot.stage],
        edges[spot.stage + 1],
        comm.dup() if comm.size > 1 else comm,
        neighbours_of(grid, comm.rank),
        make_scorer(spec),
        recompute=again,
    )
    trained = [p for p in executor.training.parameters() if p.requires_grad]
    options = options_of(spec)
    engine = Pipeline(comm, executor, make_optimizer(spec, trained) if trained else None, options, having)
    pieces = {name: [Piece(grid.rank(0, having[name][0], 0), 0, 0, rows(tensor))]
              for name, tensor in parts.whole.items()}  # fmt: skip
    engine.plan, engine.stream = plan, comm.rank
    seed_dropout(spec, comm.rank)
    return parts.ready(engine, graph.model, pieces)


def options_of(spec: RunSpec) -> PipelineOptions:
    return PipelineOptions(
        spec.grid,
        spec.schedule,
        spec.microbatches,
        spec.batch_size,
        spec.averaging,
        spec.bucket_mb / spec.shrink,
        spec.check_replicas,
    )


def neighbours_of(grid: Grid, rank: int) -> Neighbours:
    spot = grid.spot(rank)
    return Neighbours(
        grid.rank(spot.replica, spot.stage - 1, 0) if spot.stage else None,
        grid.rank(spot.replica, spot.stage + 1, 0) if spot.stage < grid.stages - 1 else None,
    )


def stages_of(graph: Graph, edges: Sequence[int]) -> dict[str, list[int]]:
    """Which stages have each parameter and buffer: those whose layers use it, under any name; or else the last one."""
    found: dict[str, list[int]] = {}
    for stage, (start, stop) in enumerate(pairwise(edges)):
        for name in graph.owned(start, stop):
            found.setdefault(name, []).append(stage)
    tensors, users = graph.model.state_dict(keep_vars=True), dict[int, set[int]]()
    for name, stages in found.items():
        if name in tensors:  # not a buffer that is not saved
            users.setdefault(id(tensors[name]), set()).update(stages)
    last = len(edges) - 2
    return found | {name: sorted(users.get(id(tensor), {last})) for name, tensor in tensors.items()}


def _agree_on_cuts(job: Job, graph: Graph) -> dict[str, Any]:
    """The plan. One rank measures, plans, and sends the result to the others; a run that is continued has one.

    It runs each layer, and so needs memory for the largest: the rank with the most memory does it, or the last, whose
    layers are usually the largest.
    """
    spec, comm = job.spec, job.comm
    kept: dict[str, Any] | None = job.resume.manifest.parts[0].facts.get("plan") if job.resume else None
    if kept and job.same_division:
        return kept
    link = measure_link(spec, comm)
    devices = stage_devices(spec.grid.stages, spec.memory, spec.speed)
    planner = spec.grid.rank(0, max(range(len(devices)), key=lambda stage: (devices[stage].memory or 0, stage)), 0)
    if spec.cut == "measured":
        job.console.line("Running each layer to find the best cut ...")

    def make() -> dict[str, Any]:
        try:
            speed = devices[spec.grid.spot(planner).stage].speed
            made = make_plan(spec, graph, link, speed=speed) if comm.rank == planner else None
            return {"plan": made.as_dict()} if made else {}
        except UsageError as error:
            return {"error": str(error)}

    found = json.loads(tell(json.dumps(all_or_none(make, comm)), comm, planner))
    if "error" in found:
        raise AgreedError(found["error"])
    plan = StagePlan.from_dict(found["plan"])
    tell_plan(job, plan)
    made: dict[str, Any] = found["plan"]
    return made


def tell_plan(job: Job, plan: StagePlan) -> None:
    """Rank 0 prints and records the plan."""
    if job.comm.rank == 0:
        for line in lines(plan):
            job.console.line(line)
        write_whole(job.folder / PLAN, dump(plan.as_dict(), indent=1) + "\n")
