"""Finds the best cut of a model into stages, exactly, by dynamic programming, and predicts its cost; no torch.

The slowest stage determines the speed of a pipeline, so the best cut is the one whose slowest stage is fastest, among
those whose stages fit into their devices' memory; of several such cuts, the one that sends the fewest bytes. If the
schedule runs one stage at a time, a step takes the sum of the stages' times, and the best cut has the least sum. Cuts
are between two nodes in program order: a stage is a range of nodes [i, j).

    best[s][j] = min over i of max(best[s - 1][i], time of nodes [i, j) on device s)

is the time of the slowest of the first s stages if they have the first j nodes (PipeDream, Narayanan et al., 2019, has
the same recurrence); with + instead of max, it is their sum. With k stages and n nodes it takes k n² / 2 steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf
from operator import add
from typing import NamedTuple

from paceline.errors import UsageError, nearest
from paceline.pipeline.plan import MEMORY, Copied, Cut, Device, Node, Profile, Stage, StagePlan
from paceline.pipeline.schedule import SCHEDULES, in_flight
from paceline.pipeline.sizes import in_bytes

__all__ = (
    "Cut",
    "Device",
    "Node",
    "Profile",
    "Stage",
    "StagePlan",
    "after_layers",
    "check_fits",
    "cut_by",
    "equal_layers",
    "equal_parameters",
    "find",
    "plan_at",
)

# Times that differ by less count as equal: sums of the same numbers, rounded differently.
SAME = 1e-9
# The most prepared batches on the first stage: one in use, two ready, one being prepared.
BATCHES = 4


def cut_by(
    how: str,
    profile: Profile,
    devices: Sequence[Device],
    schedule: str,
    micros: int,
    bandwidth: float | None,
    recompute: bool,
) -> StagePlan:
    """The plan for a value of `--cut`, with one stage per device, in their order."""
    rest = (schedule, micros, bandwidth, recompute)
    if how == "measured":
        return find(profile, devices, *rest)
    ways: dict[str, Callable[[], Sequence[int]]] = {
        "layers": lambda: equal_layers(profile, len(devices)),
        "parameters": lambda: equal_parameters(profile, len(devices)),
    }
    names = [name.strip() for name in how.split(",")]
    positions = ways.get(how, lambda: after_layers(profile, names))()
    plan = plan_at(profile, positions, devices, *rest, how if how in ways else "given")
    check_fits(plan, devices)
    return plan


def find(
    profile: Profile, devices: Sequence[Device], schedule: str, micros: int, bandwidth: float | None, recompute: bool
) -> StagePlan:
    """The best cut into one stage per device, in their order."""
    check_stages(profile, len(devices))
    prices = _Prices(profile, devices, schedule, micros, bandwidth, recompute)
    positions = _best(prices)
    if positions is None:
        closest = _least(prices, prices.excess, max, -inf)
        assert closest, "without memory limits, every valid cut is possible"
        raise _too_little(prices.plan(closest[1], "measured"), devices, _remedies(prices))
    return prices.plan(positions, "measured")


def plan_at(
    profile: Profile,
    positions: Sequence[int],
    devices: Sequence[Device],
    schedule: str,
    micros: int,
    bandwidth: float | None,
    recompute: bool,
    how: str,
) -> StagePlan:
    """The predicted cost of a cut at these positions, even if it does not fit in memory."""
    if len(positions) != len(devices) - 1:
        raise UsageError(
            f"{len(positions)} cuts make {len(positions) + 1} stages instead of {len(devices)}: give {len(devices) - 1}"
        )
    if not all(a < b for a, b in pairwise((0, *positions, len(profile.nodes)))):
        after = ", ".join(profile.nodes[position - 1].name for position in positions)
        raise UsageError(
            f"cuts after {after} would leave a stage without layers: give them in the model's order, each once, and "
            f"none at its end"
        )
    for position in positions:
        if reason := profile.cuts[position].reason:
            raise UsageError(_not_here(profile, position, reason))
    return _Prices(profile, devices, schedule, micros, bandwidth, recompute).plan(positions, how)


def _not_here(profile: Profile, position: int, reason: str) -> str:
    valid, name = profile.valid(), [node.name for node in profile.nodes]
    around = (max(p for p in valid if p < position), min(p for p in valid if p > position))
    near = [f"after {name[p - 1]}" for p in around if 0 < p < len(name)]
    where = f"; near it, it can be cut {' or '.join(near)}" if near else ""
    return f"the model cannot be cut between {name[position - 1]} and {name[position]}: {reason}{where}"


def equal_layers(profile: Profile, stages: int) -> tuple[int, ...]:
    """The valid cuts nearest to equal numbers of nodes per stage."""
    return _nearest(profile, stages, range(len(profile.nodes) + 1))


def equal_parameters(profile: Profile, stages: int) -> tuple[int, ...]:
    """The valid cuts nearest to equal numbers of parameters per stage; a shared one counts wherever it is used."""
    amounts = [node.parameters for node in profile.nodes]
    for each in profile.copied:
        for position in each.nodes:
            amounts[position] += each.parameters
    return _nearest(profile, stages, [0, *accumulate(amounts)])


def after_layers(profile: Profile, names: Sequence[str]) -> tuple[int, ...]:
    """The positions after the nodes with these names, or after the last node inside the layer with such a name."""
    found = []
    for name in names:
        inside = [p for p, node in enumerate(profile.nodes) if node.name == name]
        inside = inside or [p for p, node in enumerate(profile.nodes) if node.name.startswith(f"{name}.")]
        if not inside:
            known = [profile.nodes[p - 1].name for p in profile.valid()[1:-1]]
            more = f" and {len(known) - 12} more" if len(known) > 12 else ""
            raise UsageError(
                f"no layer of the model is called {name!r}{nearest(name, known)} (it can be cut after "
                f"{', '.join(known[:12])}{more})"
            )
        found.append(inside[-1] + 1)
    return tuple(found)


def check_stages(profile: Profile, stages: int) -> None:
    """Refuse more stages than the model can be cut into."""
    possible = len(profile.valid()) - 1
    if stages <= possible:
        return
    reasons = Counter(cut.reason for cut in profile.cuts if cut.reason)
    commonest = [f"{reason} ({count} place{'s' if count > 1 else ''})" for reason, count in reasons.most_common(3)]
    more = f", and {len(reasons) - 3} other reasons" if len(reasons) > 3 else ""
    why = f"; not elsewhere, because {', '.join(commonest)}{more}" if reasons else ""
    raise UsageError(
        f"{stages} stages: the model has {len(profile.nodes)} layers and can be cut into up to {possible} "
        f"stage{'s' if possible > 1 else ''}{why}. Use fewer stages"
    )


def check_fits(plan: StagePlan, devices: Sequence[Device]) -> None:
    """Refuse a plan whose stages need more memory than their devices have."""
    if any(device.memory is not None and stage.memory_bytes > device.memory
           for stage, device in zip(plan.stages, devices, strict=True)):  # fmt: skip
        raise _too_little(plan, devices, ["another cut (--cut measured finds one that fits, if there is one)"])


class _Range(NamedTuple):
    """The nodes of a stage, and the bytes that it would hold."""

    start: int
    stop: int
    micro: int  # kept from forward to backward, for one micro-batch
    inputs: int  # its inputs for one micro-batch
    working: int
    copied: int = 0  # weights that other stages may have, too, with their gradients and optimizer state
    update: float = 0.0  # seconds of the optimizer for these


class _Prices:
    """The cost of every range of nodes on every device."""

    def __init__(
        self,
        profile: Profile,
        devices: Sequence[Device],
        schedule: str,
        micros: int,
        bandwidth: float | None,
        recompute: bool,
    ) -> None:
        self.profile, self.devices, self.schedule, self.micros = profile, devices, schedule, micros
        self.bandwidth, self.recompute = bandwidth, recompute
        self.slowest = inf  # the longest time allowed for a stage
        self.stops = profile.valid()
        nodes = profile.nodes
        self._seconds = [0.0, *accumulate(n.forward + n.backward + n.update / micros for n in nodes)]
        self._forward = [0.0, *accumulate(n.forward for n in nodes)]
        self._transfer = [cut.bytes / bandwidth if bandwidth else 0.0 for cut in profile.cuts]
        self._fixed = [0, *accumulate(map(self._held_by, nodes))]
        self._held = [in_flight(schedule, len(devices), micros, stage) for stage in range(len(devices))]
        # A stage that holds one micro-batch at a time saves nothing by recomputing it, and does not.
        self._again = [recompute and held > 1 for held in self._held]
        self._limits = [inf if device.memory is None else device.memory for device in devices]
        self._fast = max(device.speed for device in devices)
        self.even = self._seconds[-1] / sum(device.speed for device in devices)
        # Seconds per byte, so small that all bytes of a cut together do not make two times differ.
        most = len(devices) * max(cut.bytes for cut in profile.cuts)
        self._tiny = SAME * (self._seconds[-1] / self._fast or 1.0) / (1 + most)

    def ranges(self, start: int) -> Iterator[_Range]:
        """The ranges that start here, with sums that grow from node to node."""
        profile, sizes = self.profile, self.profile.storage_bytes
        inside = set(profile.cuts[start].storages)
        micro = inputs = sum(sizes[storage] for storage in inside)
        working, begun = 0, start
        for stop in self.stops:
            if stop <= start:
                continue
            for node in profile.nodes[begun:stop]:
                fresh = node.kept - inside
                inside |= fresh
                micro += node.internal_bytes + sum(sizes[storage] for storage in fresh)
                working = max(working, node.working_bytes)
            begun = stop
            if (self._seconds[stop] - self._seconds[start]) / self._fast > self.slowest:
                return  # longer ranges do not fit either
            outputs = sum(sizes[storage] for storage in profile.cuts[stop].storages if storage not in inside)
            working_now, copied = working + self._on_their_way(start, stop), self._copied(start, stop)
            more = (sum(map(self._held_by, copied)), sum(each.update for each in copied)) if copied else ()
            yield _Range(start, stop, micro + outputs, inputs, working_now, *more)

    def _copied(self, start: int, stop: int) -> list[Copied]:
        return [each for each in self.profile.copied if any(start <= node < stop for node in each.nodes)]

    def _weights(self, of: Node | Copied) -> int:
        return of.weight_bytes + round(self.profile.copies * of.weight_bytes)

    def _held_by(self, of: Node | Copied) -> int:
        return self._weights(of) + of.gradient_bytes + of.optimizer_bytes

    def _on_their_way(self, start: int, stop: int) -> int:
        """Bytes of messages: the next activation and gradient to be received, and the last two gradients being sent."""
        before, behind = self.profile.cuts[start], self.profile.cuts[stop]
        return before.forward_bytes + 2 * before.backward_bytes + behind.backward_bytes

    def activations(self, stage: int, of: _Range) -> int:
        held = self._held[stage]
        inputs = BATCHES * self.profile.batch_bytes if of.start == 0 else 0
        return inputs + (of.inputs * held + of.micro if self._again[stage] else of.micro * held)

    def excess(self, stage: int, of: _Range) -> float:
        """Bytes that the device lacks; negative if it has more than enough."""
        needed = self.profile.base_bytes + self._fixed[of.stop] - self._fixed[of.start] + of.copied + of.working
        return needed + self.activations(stage, of) - self._limits[stage]

    def compute(self, stage: int, of: _Range) -> float:
        seconds = self._seconds[of.stop] - self._seconds[of.start] + of.update / self.micros
        if self._again[stage]:
            seconds += self._forward[of.stop] - self._forward[of.start]
        return seconds / self.devices[stage].speed

    def transfer(self, of: _Range) -> float:
        return self._transfer[of.start] + self._transfer[of.stop]

    def time(self, stage: int, of: _Range) -> float:
        """Seconds for a micro-batch; infinite if it does not fit."""
        return self.compute(stage, of) + self.transfer(of) if self.excess(stage, of) <= 0 else inf

    def traffic(self, stage: int, of: _Range) -> float:
        """Bytes over the cut after it; infinite if it does not fit, or takes too long."""
        return self.profile.cuts[of.stop].bytes if self.time(stage, of) <= self.slowest else inf

    def time_first(self, stage: int, of: _Range) -> float:
        """Seconds for a micro-batch, plus a tiny cost for bytes over the cut after it, to break ties."""
        return self.time(stage, of) + self._tiny * self.profile.cuts[of.stop].bytes

    def plan(self, positions: Sequence[int], how: str) -> StagePlan:
        ends = pairwise((0, *positions, len(self.profile.nodes)))
        stages = tuple(self._stage(number, start, stop) for number, (start, stop) in enumerate(ends))
        return StagePlan(stages, self.schedule, self.micros, self.profile.micro_size, self.bandwidth, how)

    def _stage(self, number: int, start: int, stop: int) -> Stage:
        nodes, of = self.profile.nodes[start:stop], next(r for r in self.ranges(start) if r.stop == stop)
        held: list[Node | Copied] = [*nodes, *self._copied(start, stop)]
        memory = (
            self.profile.base_bytes,
            sum(map(self._weights, held)),
            sum(each.gradient_bytes for each in held),
            sum(each.optimizer_bytes for each in held),
            self.activations(number, of),
            of.working,
        )
        return Stage(
            start=start,
            stop=stop,
            layers=tuple(node.name for node in nodes),
            parameters=sum(each.parameters for each in held),
            seconds=self.compute(number, of),
            transfer_seconds=self.transfer(of),
            forward_bytes=self.profile.cuts[stop].forward_bytes,
            memory=dict(zip(MEMORY, memory, strict=True)),
        )


def _best(prices: _Prices) -> list[int] | None:
    """The positions of the best cut; None if no cut fits.

    Ranges much longer than equal stages are left out at first: if a cut is found without them, it is the best. That
    holds for the slowest stage, but not for the sum, where one fast device may be best with nearly all nodes.
    """
    if not SCHEDULES[prices.schedule].overlaps:
        least = _least(prices, prices.time_first, add, 0.0)
        return least[1] if least else None
    for times in (1.25, 3, inf):
        prices.slowest = prices.even * times if prices.even else inf
        found = _least(prices, prices.time, max, -inf)
        if found and found[0] <= prices.slowest:
            prices.slowest = found[0] * (1 + SAME)
            lightest = _least(prices, prices.traffic, add, 0.0)
            assert lightest, "the fastest cut is one of the candidates"
            return lightest[1]
    return None


def _least(
    prices: _Prices,
    price: Callable[[int, _Range], float],
    joined: Callable[[float, float], float],
    start: float,
) -> tuple[float, list[int]] | None:
    """The cut with the least joined cost of its stages (their max, or their sum), or None if none is finite.

    Ranges are visited once, from the left: when those that start at i are, best[s][i] is known for all s.
    """
    stages, end = len(prices.devices), len(prices.profile.nodes)
    best = [[inf] * (end + 1) for _ in range(stages + 1)]
    back = [[0] * (end + 1) for _ in range(stages + 1)]
    best[0][0] = start
    for i in prices.stops[:-1]:
        inner = [s for s in range(stages - 1) if best[s][i] < inf]
        last = [stages - 1] if best[stages - 1][i] < inf else []
        for of in prices.ranges(i) if inner or last else ():
            j = of.stop
            for s in last if j == end else inner:
                known = best[s][i]
                if known >= best[s + 1][j]:  # another stage does not improve it
                    continue
                value = joined(known, price(s, of))
                if value < best[s + 1][j]:
                    best[s + 1][j], back[s + 1][j] = value, i
    if best[stages][end] == inf:
        return None
    positions = [end]
    for s in range(stages, 1, -1):
        positions.append(back[s][positions[-1]])
    return best[stages][end], positions[:0:-1]


def _nearest(profile: Profile, stages: int, amounts: Sequence[int]) -> tuple[int, ...]:
    """The valid cuts nearest to equal amounts per stage; of equally near ones, those that send the fewest bytes."""
    check_stages(profile, stages)
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0.0, 0, ())}
    for stage in range(1, stages):
        target, found = amounts[-1] * stage / stages, dict[int, tuple[float, int, tuple[int, ...]]]()
        before: tuple[float, int, tuple[int, ...]] = (inf, 0, ())  # the best of the cuts to the left
        for position in profile.valid()[:-1]:
            if before[0] < inf:
                away, sent = abs(amounts[position] - target), profile.cuts[position].bytes
                found[position] = (before[0] + away, before[1] + sent, (*before[2], position))
            before = min(before, best.get(position, before))
        best = found
    return min(best.values())[2]


def _remedies(prices: _Prices) -> list[str]:
    """What could be done about too little memory and, if that can be computed, whether it would be enough."""
    p, found = prices, []
    if not p.recompute:
        other = _Prices(p.profile, p.devices, p.schedule, p.micros, p.bandwidth, True)
        found.append("--recompute" + _enough(other))
    if p.schedule == "gpipe" and p.micros > len(p.devices):
        other = _Prices(p.profile, p.devices, "1f1b", p.micros, p.bandwidth, p.recompute)
        found.append("--schedule 1f1b" + _enough(other))
    if p.profile.micro_size > 1:
        found.append("smaller micro-batches (more --microbatches, or a lower --batch-size)")
    return [*found, "more stages", "more memory"]


def _enough(prices: _Prices) -> str:
    return ", which would be enough" if _best(prices) is not None else ", which alone is not enough"


def _too_little(plan: StagePlan, devices: Sequence[Device], remedies: Sequence[str]) -> UsageError:
    limits = [device.memory for device in devices]
    short = [-inf if limit is None else stage.memory_bytes - limit
             for stage, limit in zip(plan.stages, limits, strict=True)]  # fmt: skip
    worst = short.index(max(short))
    stage, limit = plan.stages[worst], limits[worst]
    assert limit is not None
    parts = ", ".join(f"{name} {in_bytes(size)}" for name, size in stage.memory.items() if size)
    best = plan.how == "measured"
    what = f"no cut into {len(devices)} stages fits" if best else f"this cut into {len(devices)} stages does not fit"
    advice = f"What may help: {'; '.join(remedies)}"
    if stage.memory["base"] > limit:
        advice = "The process alone, without any layer, needs more than it has: give it more memory"
    return UsageError(
        f"{what} the memory: stage {worst} has {in_bytes(limit)} and needs {'at best ' if best else ''}"
        f"{in_bytes(stage.memory_bytes)}, {in_bytes(short[worst])} more than it has ({parts}). {advice}"
    )
