"""Reads an experiment, a TOML file with fixed values, grids, repeats and charts, and checks it as a whole."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.analysis.claim_file import read_claims
from paceline.analysis.setting import ALWAYS, Setting, setting_from
from paceline.bench.papers import read_paper
from paceline.comm.table import count_gpus
from paceline.errors import UsageError, nearest, refuse_pipe, unknown
from paceline.lab.plan import PRESETS, LabPlan, make_plan
from paceline.layout import cores
from paceline.report.table import CHARTS
from paceline.spec import FIELDS, OWN, Resolved, resolve
from paceline.strategies import table as strategies

# Keys besides those of the spec: the lab and its nodes, and what a grid needs.
EXTRA = ("lab", "nodes", "needs")
TOP = ("title", "about", "source", "limits", "repeats", "fixed", "grid", "quick", "draw", "paper", "claim")
QUICK = ("about", "limits", "repeats", "fixed", "grid")
CHOSEN = ("name", "output_dir")  # options of a run that bench sets itself
GIVEN = "experiment"  # the source of values from the file
ALL_CORES = "all"  # as the number of threads: all cores of this machine
MOST_RUNS = 5000


@dataclass(frozen=True)
class Point:
    """One setting of a grid, and its lab, as the values of a lab file."""

    resolved: Resolved
    lab: Mapping[str, Any] | None = None
    plan: LabPlan | None = None

    @cached_property
    def setting(self) -> Setting:
        spec = self.resolved.spec
        values = {name: getattr(spec, name) for name in spec.names}
        lab = asdict(self.plan) if self.plan else None
        return setting_from(values, {"lab": lab}, len(self.plan.nodes) if self.plan else 1, spec.grid.replicas)

    def digest(self) -> str:
        """A digest of everything that defines the run."""
        given = self.resolved.spec
        spec = {name: getattr(given, name) for name in given.names if name not in CHOSEN}
        text = json.dumps([spec, self.plan.to_json() if self.plan else ""], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Task:
    """One run: a point, and the number of the repeat."""

    point: Point
    repeat: int
    among: tuple[Setting, ...]  # those of the experiment, which it is named among

    @property
    def name(self) -> str:
        spec = self.point.resolved.spec
        model = "".join(c if c.isalnum() or c in "-_." else "-" for c in spec.model)
        servers = f"-s{self.servers}" if self.servers else ""
        return (
            f"{model}-{spec.strategy}{servers}-w{spec.workers}-b{spec.batch_size}-{self.point.digest()}-{self.repeat}"
        )

    @property
    def servers(self) -> int:
        spec = self.point.resolved.spec
        return spec.method.servers(vars(spec))

    @property
    def seed(self) -> int:
        return self.point.resolved.spec.seed + self.repeat

    def __str__(self) -> str:
        always = ("model", *ALWAYS, "servers", "batch_size")
        return f"{self.point.setting.label(self.among, always=always)}, repeat {self.repeat + 1}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Experiment:
    """A grid of runs. `left_out`: the grids that this machine cannot run, and why."""

    name: str
    title: str
    about: str
    source: str
    limits: tuple[str, ...]
    repeats: int
    points: tuple[Point, ...]
    left_out: tuple[str, ...]
    quick: bool
    draw: tuple[str, ...]
    paper: tuple[dict[str, Any], ...]
    claims: tuple[dict[str, Any], ...]

    def tasks(self) -> list[Task]:
        """Every point once, then every point again, each time in another order, so that drift favours no setting."""
        found = []
        among = tuple(point.setting for point in self.points)
        for repeat in range(self.repeats):
            points = list(self.points)
            random.Random(repeat).shuffle(points)
            found += [Task(point, repeat, among) for point in points]
        return found


def read_experiment(path: Path, *, quick: bool = False, repeats: int | None = None) -> Experiment:
    """Read an experiment; raise an error with its place if anything in it is wrong."""
    refuse_pipe(path, "the experiment")
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the experiment {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    return make_experiment(values, path, quick=quick, repeats=repeats)


def make_experiment(
    values: Mapping[str, Any], path: Path, *, quick: bool = False, repeats: int | None = None
) -> Experiment:
    """The experiment of a file's values; `path` is its name, and its place in error messages."""
    _check_keys(values, TOP, str(path))
    if quick and "quick" not in values:
        raise UsageError(f"{path} has no quick form: leave --quick out, or add a table [quick]")
    over = _table(values.get("quick", {}), f"{path}: quick")
    _check_keys(over, QUICK, f"{path}: quick")
    over = over if quick else {}
    points, left_out = _all_points(values, over, path)
    count = repeats or _whole(over.get("repeats", values.get("repeats", 3)), f"{path}: repeats")
    if any(point.resolved.spec.seed + count > 2**32 for point in points):
        raise UsageError(f"{path}: seed: {count} repeats, each with the next seed, would exceed 4294967295")
    if len(points) * count > MOST_RUNS:
        raise UsageError(f"{path}: {len(points) * count} runs; an experiment can have up to {MOST_RUNS}")
    draw = _texts(values.get("draw", []), f"{path}: draw")
    for name in draw:
        if name not in CHARTS:
            raise UsageError(f"{path}: draw: {unknown('chart', name, CHARTS)}")
    limits = _texts(values.get("limits", []), f"{path}: limits") + _texts(
        over.get("limits", []), f"{path}: quick.limits"
    )
    title, about, source = (
        _text(over.get(key, values.get(key, "")), f"{path}: {key}") for key in ("title", "about", "source")
    )
    claims = values.get("claim", [])
    read_claims(claims, f"{path}: claim")
    return Experiment(path.stem, title, about, source, limits, count, tuple(points), tuple(left_out), quick, draw,
                      read_paper(values.get("paper", []), f"{path}: paper"), tuple(claims))  # fmt: skip


def _all_points(values: Mapping[str, Any], over: Mapping[str, Any], path: Path) -> tuple[list[Point], list[str]]:
    """The points of all grids, each setting once, and the grids that cannot be run here."""
    fixed = _named(values.get("fixed", {}), f"{path}: fixed") | _named(over.get("fixed", {}), f"{path}: quick.fixed")
    where = f"{path}: {'quick.' if 'grid' in over else ''}grid"
    grids = over.get("grid", values.get("grid", [{}]))
    if not isinstance(grids, list) or not grids:
        raise UsageError(f"{where}: {grids!r} is not a list of tables; write [[grid]]")
    found, left_out, used = dict[str, Point](), [], set[str]()
    for number, grid in enumerate(grids, 1):
        place = f"{where} {number}"
        own = _named(grid, place)
        given = _over(fixed, own)
        if why := _lacking(given.pop("needs", "gpu:0"), place):
            left_out.append(f"grid {number} {why}")
            continue
        points = list(_points(given, place, path.parent))
        names = {name for point in points for name in point.resolved.spec.names}
        _check_used(own, names, place)
        used |= names
        for point in points:
            found.setdefault(point.digest(), point)
    if not found:
        raise UsageError(f"{path}: nothing can be run here: {'; '.join(left_out)}")
    if not left_out:  # grids that are left out may use options that others do not
        _check_used(fixed, used, f"{path}: fixed")
    return list(found.values()), left_out


def _check_used(values: Mapping[str, Any], names: Collection[str], where: str) -> None:
    """Refuse an option that none of these runs has, because only other strategies have it."""
    for name in values:
        if name in OWN and name not in names:
            raise UsageError(
                f"{where}: no run uses {name}: leave it out, or use one of the strategies that have it "
                f"({', '.join(strategies.having(name))})"
            )


def _over(fixed: Mapping[str, Any], grid: dict[str, Any]) -> dict[str, Any]:
    """A grid's values override the fixed ones; its batch_size also overrides a fixed global_batch, and vice versa."""
    other = {"batch_size": "global_batch", "global_batch": "batch_size"}
    hidden = {other[key] for key in grid if key in other} - set(grid)
    return {key: value for key, value in fixed.items() if key not in hidden} | grid


def _named(values: Any, where: str) -> dict[str, Any]:
    """A table of values by name; names can have - or _."""
    table = _table(values, where)
    _check_keys(table, (*FIELDS, *EXTRA), where)
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in found:
            raise UsageError(f"{where}: {name} is given twice")
        found[name] = value
    return found


def _lacking(needs: Any, where: str) -> str:
    """What a grid needs and this machine lacks, as text; empty if nothing."""
    found = re.fullmatch(r"gpu(?::(\d{1,4}))?", needs) if isinstance(needs, str) else None
    if not found:
        raise UsageError(f'{where}: needs is {needs!r}; it can be "gpu", or "gpu:4" for four of them')
    wanted, there = int(found[1] or 1), count_gpus()
    if there >= wanted:
        return ""
    return f"needs {_count(wanted, 'GPU')}, and this machine has {there or 'none'}"


def _points(values: Mapping[str, Any], where: str, folder: Path) -> Iterator[Point]:
    """All combinations of a grid's lists; a value that is not a list is the same for all."""
    axes = {key: value if isinstance(value, list) and key != "hidden" else [value] for key, value in values.items()}
    if len(axes.get("seed", [])) > 1:
        raise UsageError(f"{where}: seed is a list; every repeat already has another seed: give the first one")
    if empty := [key for key, axis in axes.items() if not axis]:
        raise UsageError(f"{where}: {empty[0]} is an empty list")
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        varied = ", ".join(f"{key} = {chosen[key]!r}" for key, axis in axes.items() if len(axis) > 1)
        try:
            yield _point(chosen, folder)
        except UsageError as error:
            text = str(error).removeprefix(f"{GIVEN}: ")
            raise UsageError(f"{where}{f' ({varied})' if varied else ''}: {text}") from None


def _point(values: Mapping[str, Any], folder: Path) -> Point:
    spec = _applying({key: value for key, value in values.items() if key not in EXTRA})
    for key in CHOSEN:
        if key in spec:
            raise UsageError(f"{key} is set for every run automatically; leave it out")
    if "global_batch" in spec and "batch_size" in spec:
        raise UsageError("global_batch and batch_size are both given; leave one out")
    if spec.get("threads") == ALL_CORES:
        spec["threads"] = cores()
    resolved = resolve((GIVEN, spec), one_machine="lab" not in values)
    ranks = resolved.spec.ranks
    nodes = values.get("nodes", ranks)
    if "lab" not in values:
        if "nodes" in values:
            raise UsageError('nodes is for runs in a lab: add lab = "1gbit:{nodes}", or leave it out')
        return Point(resolved)
    if type(nodes) is not int or not 1 <= nodes <= ranks:
        raise UsageError(
            f"nodes is {nodes!r}; {_count(resolved.spec.ranks, 'rank')} can be on 1 to {resolved.spec.ranks}"
        )
    lab = _lab(values["lab"], {"ranks": resolved.spec.ranks, "workers": resolved.spec.workers, "nodes": nodes}, folder)
    return Point(resolved, lab, make_plan(lab, "lab"))


def _applying(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The values without options that this point's strategy does not have; other points of its grid may have them."""
    name = spec.get("strategy") or strategies.default(spec.get("workers")).name
    method = strategies.TABLE.get(name) if isinstance(name, str) else None
    if method is None:  # resolving the spec raises the error
        return dict(spec)
    return {key: value for key, value in spec.items() if key not in OWN or key in method.names}


def _lab(given: Any, numbers: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A lab's values: from a preset such as 1gbit:{nodes}, a file next to the experiment, or a table."""
    if isinstance(given, str):
        preset, _, count = given.partition(":")
        if preset in PRESETS:
            given = {"preset": preset} | ({"nodes": count} if count else {})
        else:
            path = folder / given
            try:
                given = tomllib.loads(path.read_text("utf-8"))
            except OSError as error:
                allowed = f"a preset is one of {', '.join(PRESETS)}"
                raise UsageError(f"lab {path}: {error.strerror}{nearest(preset, PRESETS)} ({allowed})") from None
            except (ValueError, RecursionError) as error:
                raise UsageError(f"lab {path}: not valid TOML: {error}") from None
    lab = _table(given, "lab")
    if isinstance(text := lab.get("nodes"), str):
        for name, number in numbers.items():
            text = text.replace(f"{{{name}}}", str(number))
        lab["nodes"] = int(text) if text.isdecimal() and len(text) < 10 else text
    return lab


def _check_keys(values: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for key in values:
        if key.replace("-", "_") not in allowed:
            raise UsageError(f"{where}: {unknown('key', key, allowed)}")


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where}: {value!r} is not a table")
    return dict(value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: {value!r} is not a string")
    return value.strip()


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise UsageError(f"{where}: {value!r} is not a list of strings")
    return tuple(_text(item, where) for item in value)


def _whole(value: Any, where: str) -> int:
    if type(value) is not int or not 1 <= value <= 1000:
        raise UsageError(f"{where}: {value!r} is not a whole number from 1 to 1000")
    return value
