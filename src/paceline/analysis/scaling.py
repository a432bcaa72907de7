"""Settings and their names; speedup and efficiency over workers: of a fixed problem (strong), and of fixed work for
each worker (weak).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from paceline.analysis import division
from paceline.analysis.runs import MACHINE, Run
from paceline.analysis.statistics import ENOUGH_SAMPLES, Interval, Series, amdahl, gustafson, median, middle, ratio
from paceline.analysis.wording import count, link
from paceline.spec import OWN, Common
from paceline.strategies.base import Strategy

# What makes two runs repeats of each other is all of the spec but these, and the machine.
NOT_THE_SETTING = ("seed", "name", "output_dir", "timeout", "log_every", "check_replicas")
# Of strategies' options, what changes the function that is trained, as options of the model do.
OF_MODEL = ("sync_batchnorm",)
# What a strategy has of its own: it tells its settings apart, and not one strategy from another.
OF_STRATEGY = ("transport", "read", "threads", "scale_lr",
               *(key for key in OWN if key not in (*division.IN_SPEC, *OF_MODEL)), *division.KEYS)  # fmt: skip
# What may differ between a run and the run of one worker that it is compared with.
BY_DIVISION = ("strategy", "workers", "batch_size", "global_batch", *OF_STRATEGY)
# How long a run was and what came after it: its speed is not of them.
LENGTH = ("epochs", "steps", "test", "validation")
# What follows from the number of workers, and so may differ along a line.
BY_WORKERS = ("workers", "batch_size", "global_batch", "threads", "lab", *LENGTH)
# What is left of the options that all runs have, and of the machine.
SAME_PROBLEM = tuple(key for key in (*(f.name for f in fields(Common)), *MACHINE) if key not in (*BY_DIVISION, *LENGTH))
# Of a lab, what is between its nodes; one worker has nothing of it.
NETWORK = ("mtu", "racks", "faults")
USUAL_MTU = 1500
# What is told apart only where these are the same.
ONLY_WITHIN: dict[str, tuple[str, ...]] = dict.fromkeys(OF_STRATEGY, ("strategy",))
ONLY_WITHIN["averaging"] = ("strategy", "workers")
ONLY_WITHIN["nodes"] = ("strategy", "workers", "servers", "model", "compute")
# What is said only where nothing else tells two settings apart.
AT_LAST = ("normalize", "steps", "test", *MACHINE)
# What settings in labs are told apart by; others have none of it.
OF_LAB = ("links", "shrink", "speed", "cpu", "mtu", "racks")


@dataclass(frozen=True)
class Group:
    """Repeats of one setting."""

    setting: dict[str, Any]
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def workers(self) -> int:
        return self.first.summary.workers

    @property
    def strategy(self) -> str:
        return self.first.summary.strategy

    @property
    def method(self) -> Strategy:
        return self.first.method

    @property
    def series(self) -> list[Series]:
        """Seconds an image, by run: what all that is said of speed is computed from."""
        return [run.seconds_per_image for run in self.runs]

    @cached_property
    def speed(self) -> float:
        """Images/s, of the middle run: the value of `images_per_second`."""
        return 1 / middle(self.series)

    @cached_property
    def said(self) -> tuple[dict[str, str], dict[str, str]]:
        """In words: as it ran, and as what it stands for."""
        return _words(self, scaled=False), _words(self, scaled=True)

    @property
    def too_short(self) -> bool:
        """Whether its runs together are too short to be ranked."""
        return sum(run.effective_samples for run in self.runs) < ENOUGH_SAMPLES

    @property
    def crowded(self) -> bool:
        """Whether its workers had to take turns on fewer cores."""
        return any(run.crowded for run in self.runs)

    def step(self) -> Interval:
        """Seconds of one update."""
        return median([run.step_seconds for run in self.runs])

    def images_per_second(self) -> Interval:
        found = median(self.series)
        return Interval(1 / found.value, 1 / found.high, 1 / found.low)


def disturbed(one: Group) -> list[str]:
    """Why each of its disturbed runs was."""
    return [run.disturbed for run in one.runs if run.disturbed]


def certain(one: Group) -> bool:
    """Whether its speed can be ranked: its runs are long enough, and nothing disturbed them."""
    return not one.too_short and not disturbed(one)


def nodes_of(run: Run) -> int:
    """How many machines, of the lab or real."""
    return max(1, len({row["host"] for row in run.environment.get("ranks", [])}))


def stands_for(one: Group) -> float | None:
    """The links, in bit/s, that those of its lab stand for: slower, as gradients are smaller and devices faster.

    None where nothing is scaled, outside a lab, and where devices are not of one speed.
    """
    s, nodes = one.first.summary, one.setting["lab"]
    speeds = {float(node["speed"] or 1.0) for node in nodes}
    if not one.first.emulated or len(speeds) != 1 or (s.shrink == 1 and speeds == {1.0}):
        return None
    return float(min(node["up"] for node in nodes) * s.shrink / speeds.pop())


def telling(rows: Iterable[Sequence[str]]) -> list[int]:
    """Which places of these rows tell them apart: from the first on, only as many as are needed."""
    kinds, shown = {tuple(row) for row in rows}, list[int]()

    def told(places: Sequence[int]) -> int:
        return len({tuple(row[i] for i in places) for row in kinds})

    for i in range(min(map(len, kinds), default=0)):
        if told([*shown, i]) > told(shown):
            shown.append(i)
    return shown


def label(one: Group, among: Sequence[Group]) -> str:
    """A short name of a setting: its strategy and workers, and what else tells it from these."""
    scaled = len({(each.first.summary.shrink, _each(each, "speed")) for each in (one, *among) if _ranks(each) > 1}) > 1
    mine, others = words(one, scaled), [(words(each, scaled), _ranks(each)) for each in among]
    facts = {MACHINE[i] for i in telling([machine_of(each) for each in (one, *among)])}
    shown = []
    for key in mine:
        alike = [o for o, ranks in others if all(o[k] == mine[k] for k in ONLY_WITHIN.get(key, ()))
                 and (key not in OF_LAB or (min(ranks, _ranks(one)) > 1 and o["links"] and mine["links"]))]  # fmt: skip
        differs = key in facts if key in AT_LAST else any(o.get(key, "") != mine[key] for o in alike)
        if key in ("strategy", "workers") or differs:
            shown.append(key)
    rivals = [o for o, _ in others if all(o.get(key, "") == mine[key] for key in shown)]
    for key in mine:
        if any(rival.get(key, "") != mine[key] for rival in rivals):
            shown.append(key)
            rivals = [rival for rival in rivals if rival.get(key, "") == mine[key]]
    return ", ".join(dict.fromkeys(mine[key] for key in mine if key in shown and mine[key]))


def words(one: Group, scaled: bool = False) -> dict[str, str]:
    """What a setting is, by what it is about. `scaled`: its links are those that they stand for."""
    return dict(one.said[scaled])


def _words(one: Group, *, scaled: bool) -> dict[str, str]:
    s, setting = one.first.summary, dict(one.setting)
    links = sorted({(node["up"], node["down"]) for node in setting.pop("lab")})
    faults = [f"{fault['node']} {fault['do']} at {fault['at']:g} s" for fault in setting.pop("faults", [])]
    racks = sorted({_ends(rack["up"], rack["down"]) for rack in setting.pop("racks", [])})
    divided = {key: text for key, text in division.words(setting).items() if key not in division.PARTS}
    said = {"model": s.model, "data": s.data, "strategy": s.strategy, "workers": division.workers(one.first),
            "servers": count(s.servers, "server") if s.servers else "", **divided,
            "nodes": count(nodes_of(one.first), "node"), "batch": f"batch {s.batch_size}",
            "threads": count(setting["threads"], "thread") if setting.get("threads") else "",
            "transport": s.transport, "read": f"read {setting.get('read', 'own')}",
            "links": " and ".join(_ends(up, down) for up, down in links), "compute": s.compute,
            "shrink": f"shrink {s.shrink}" if s.shrink > 1 else "", "speed": _each(one, "speed", "node speed {:g}"),
            "cpu": _each(one, "cpu", "{:g} cores a node"), "mtu": f"MTU {setting['mtu']}" if setting.get("mtu") else "",
            "racks": f"{' and '.join(racks)} between racks" if racks else "", "faults": " and ".join(faults),
            "encrypt": "encrypted" if setting.get("encrypt", True) else "not encrypted"}  # fmt: skip
    if scaled and (stands := stands_for(one)):
        said |= {"links": f"as {link(stands)}", "shrink": ""}
    facts = {key: text for key, text in zip(MACHINE, machine_of(one), strict=True) if text}
    rest = {key: value for key, value in setting.items()
            if key not in (*said, *MACHINE, *division.KEYS, "batch_size")}  # fmt: skip
    return said | {key: f"{key.replace('_', ' ')} {value}" for key, value in sorted(rest.items())} | facts


def _ranks(one: Group) -> int:
    return one.workers + one.first.summary.servers


def _ends(up: float, down: float) -> str:
    return f"{up / 1e6:g}/{down / 1e6:g} Mbit/s"


def _each(one: Group, key: str, form: str = "{:g}") -> str:
    """A number of the lab's nodes, of each kind of them."""
    return " and ".join(
        form.format(value) for value in sorted({node[key] or 0 for node in one.setting["lab"]}) if value
    )


def machine_of(one: Group) -> tuple[str, ...]:
    """What its runs were made on, in words, in the order of MACHINE; empty where that is not known."""
    given = one.setting
    gpus = given.get("gpus")
    names = {"processor": given.get("processor"), "cores": count(given["cores"], "core") if given.get("cores") else "",
             "gpus": "" if gpus is None else " and ".join(map(str, gpus)) or "no GPU",
             "torch": f"torch {given['torch']}" if given.get("torch") else "",
             "python": f"Python {given['python']}" if given.get("python") else "",
             "platform": given.get("platform")}  # fmt: skip
    return tuple(str(names[key] or "") for key in MACHINE)


def setting_of(run: Run) -> dict[str, Any]:
    """The spec, the machine, and the lab that it ran in: its nodes, and what else a lab has where it is unusual."""
    lab = run.environment.get("lab") or {}
    nodes = [{key: node.get(key) for key in ("up", "down", "cpu", "speed", "rack")} for node in lab.get("nodes", [])]
    machine = {key: run.environment[key] for key in MACHINE if run.environment.get(key) is not None}
    rest = {key: lab[key] for key in NETWORK if lab.get(key) and (key, lab[key]) != ("mtu", USUAL_MTU)}
    left_out = (*NOT_THE_SETTING, *(division.IN_SPEC if run.method.installed else ()))
    spec = {key: value for key, value in run.spec.items() if key not in left_out}
    return spec | division.division(run) | machine | rest | {"lab": nodes}


def group(runs: Iterable[Run]) -> list[Group]:
    """Runs by their setting, in the order they come."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(repr((sorted(setting_of(run).items()), nodes_of(run))), []).append(run)
    return [Group(setting_of(same[0]), tuple(same)) for same in found.values()]


@dataclass(frozen=True)
class Point:
    """One number of workers: how much faster than one, what part of the ideal that is, and what it stands on.

    `certain`: both can be ranked, its own speed and that of the one worker.
    """

    group: Group
    workers: int
    speedup: Interval
    efficiency: Interval
    certain: bool


@dataclass(frozen=True)
class Curve:
    """A strategy over its numbers of workers, beside one worker. `serial` is the part that the law leaves which was
    fitted to the points that are certain.
    """

    kind: str  # strong or weak
    label: dict[str, Any]
    baseline: Group
    points: tuple[Point, ...]
    serial: float | None


def links(one: Group) -> tuple[tuple[Any, ...], ...]:
    """The kinds of nodes and links of its lab, however many there are of each: up, down, cpu, speed."""
    rows = {tuple(node[key] for key in ("up", "down", "cpu", "speed")) for node in one.setting["lab"]}
    return tuple(sorted(rows, key=repr))


def size(one: Group, kind: str) -> float:
    """The batch that is the same along a line: of each worker, or of all. Workers of a replica share its batch."""
    s = one.first.summary
    if kind != "weak":
        return s.global_batch
    if not one.method.part:
        return s.batch_size
    return s.global_batch // s.workers if s.global_batch % s.workers == 0 else s.global_batch / s.workers


def along_workers(groups: Iterable[Group], kind: str) -> list[dict[int, Group]]:
    """Settings that differ in their number of workers alone, by workers, rising. Workers whose batches are
    updates of their own have no batch to divide: their scaling is weak.

    The same workers on several numbers of nodes, or with several numbers of threads, make lines of their own; of
    settings that differ in their length alone, the longest counts. Workers of a model in parts are more replicas of as
    many parts each, or one replica of more parts.
    """
    found: dict[str, list[Group]] = {}
    for one in groups:
        if kind == "strong" and one.method.updates_by_worker:
            continue
        for but in ((), division.PARTS) if one.method.part and one.first.replicas == 1 else ((),):
            kept = {key: value for key, value in one.setting.items() if key not in (*BY_WORKERS, *but)}
            key = repr((sorted(kept.items()), but, links(one), one.first.summary.transport, size(one, kind)))
            found.setdefault(key, []).append(one)
    made = list[dict[int, Group]]()
    for members in _whole(list(found.values())):
        ordered = sorted(members, key=lambda one: (one.workers, -sum(len(run.steady) for run in one.runs)))
        apart: dict[tuple[Any, ...], dict[int, Group]] = {}
        for one in ordered:
            apart.setdefault(_varied(one, ordered), {}).setdefault(one.workers, one)
        made += apart.values()
    return made


def _whole(lines: Sequence[list[Group]]) -> list[list[Group]]:
    """Without those that are a part of another, or the same."""
    kinds = [frozenset(map(id, members)) for members in lines]
    return [members for i, members in enumerate(lines)
            if not any(kinds[i] < other or (kinds[i] == other and j < i) for j, other in enumerate(kinds))]  # fmt: skip


def _varied(one: Group, among: Sequence[Group]) -> tuple[Any, ...]:
    """Its nodes and threads, each if the same number of workers had several of them."""
    workers, found = {each.workers for each in among}, list[Any]()
    for what in (lambda each: nodes_of(each.first), lambda each: each.setting.get("threads")):
        several = len({(each.workers, what(each)) for each in among}) > len(workers)
        found.append(what(one) if several else None)
    return tuple(found)


def problem_of(one: Group) -> dict[str, Any]:
    """Of its setting, what speeds can be compared within; a strategy that lacks an option of OF_MODEL has it off."""
    return {key: value for key, value in one.setting.items()
            if key in SAME_PROBLEM or (key in OF_MODEL and value)}  # fmt: skip


def family(one: Group) -> str:
    """Settings that differ only in how the work is divided, how long it goes on, and in links; on one machine."""
    kept = problem_of(one)
    devices = {(node["cpu"], node["speed"]) for node in one.setting["lab"]}
    return repr(sorted(kept.items())) + repr(sorted(devices, key=repr))


def curves(groups: Sequence[Group], kind: str) -> list[Curve]:
    """All strong or weak scaling that the groups have a baseline for."""
    found = []
    alone = [one for one in groups if one.workers == 1 and not one.first.summary.servers]
    for members in along_workers([one for one in groups if _ranks(one) > 1], kind):
        one = next(iter(members.values()))
        fitting = [each for each in alone if (family(each), size(each, kind)) == (family(one), size(one, kind))
                   and each.setting.get("faults") in (None, one.setting.get("faults"))]  # fmt: skip
        if not fitting:
            continue
        # With as many threads a worker; if one worker had other numbers of them only, the fastest is the honest rival.
        same = [each for each in fitting if each.setting.get("threads") == one.setting.get("threads")]
        baseline = max(same or fitting, key=lambda each: each.speed)
        points = [_point(baseline, each) for each in members.values()]
        s, nodes = one.first.summary, {nodes_of(each.first) for each in members.values()}
        label = {"strategy": one.strategy, "servers": s.servers, "transport": s.transport, "batch": size(one, kind),
                 "nodes": nodes.pop() if len(nodes) == 1 else None, "model": s.model, "compute": s.compute}  # fmt: skip
        found.append(Curve(kind, label, baseline, tuple(points), serial_part(kind, points)))
    return found


def _point(baseline: Group, one: Group) -> Point:
    speedup, n = ratio(baseline.series, one.series), one.workers
    efficiency = Interval(speedup.value / n, speedup.low / n, speedup.high / n)
    return Point(one, n, speedup, efficiency, certain(one) and certain(baseline))


def serial_part(kind: str, points: Sequence[Point]) -> float | None:
    known = [point for point in points if point.certain]
    workers, speedups = [point.workers for point in known], [point.speedup.value for point in known]
    if kind == "weak":
        return gustafson(workers, speedups)
    return amdahl([1, *workers], [1.0, *(1 / speedup for speedup in speedups)])
