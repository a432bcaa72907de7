"""The tables of a report, as plain numbers and as cells: every setting, the paper beside ours, what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline.analysis import division
from paceline.analysis.headline import over_one_process
from paceline.analysis.resources import preemptions
from paceline.analysis.runs import Run
from paceline.analysis.scaling import (
    BY_DIVISION,
    NETWORK,
    Curve,
    Group,
    certain,
    disturbed,
    label,
    nodes_of,
    stands_for,
    words,
)
from paceline.analysis.statistics import Interval
from paceline.analysis.study import Study
from paceline.analysis.wording import count
from paceline.report.cells import NOTHING, Cell, TableData, cell, number, percent, table, within
from paceline.report.series import facets

Row = dict[str, Any]

# Of wall time: processor time that differs by more than this is shown beside it.
DIFFERS = 0.1

# What is comparable also with a paper that trained on other data, or for longer.
PACE = ("update_seconds", "images_per_second", "speedup")

# What a setting is, in the order of the columns; the rest of the spec follows where it differs.
IDENTITY = ("model", "data", "strategy", "transport", "workers", "servers", "nodes", "batch_size", "compute", "device",
            "links", "links_as_of")  # fmt: skip
ALWAYS = ("strategy", "workers", "batch_size")
BY_COMPUTE = ("steps", "epochs", "test", "validation")
FOLLOWS = {"links": "nodes", "shrink": "links_as_of"}
IMPLIED = ("lab", "normalize")
HEADERS = {
    "batch_size": "batch",
    "tensor": "shards",
    "microbatches": "micro-batches",
    "lr": "learning rate",
    "shrink": "gradients, times smaller",
}
# A measure of both, ours and a paper's: its name, and how it is written.
MEASURES: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "read_seconds": ("read, s", number),
    "update_seconds": ("update, s", number),
    "epoch_seconds": ("epoch, s", number),
    "images_per_second": ("images/s", number),
    "speedup": ("speedup", number),
    "train_loss": ("training loss", number),
    "train_accuracy": ("training accuracy", percent),
    "validation_loss": ("validation loss", number),
    "validation_accuracy": ("validation accuracy", percent),
    "test_loss": ("test loss", number),
    "test_accuracy": ("test accuracy", percent),
    "total_seconds": ("total, s", number),
}


@dataclass(frozen=True)
class Results:
    """A row for each setting; `shared` is what all settings have in common."""

    shared: str
    table: TableData


@dataclass(frozen=True)
class PaperRow:
    """One of the paper's rows beside one of our settings, whose name is empty if we have none."""

    setting: str
    note: str
    paper: tuple[str, ...]
    our_setting: str
    ours: tuple[str, ...]
    ratio: tuple[str, ...]


@dataclass(frozen=True)
class PaperTable:
    """The paper's measures, and their values in each row."""

    headers: tuple[str, ...]
    rows: tuple[PaperRow, ...]


def value_of(run: Run, name: str) -> Any:
    """A part of a run's setting by its name: of the summary, the spec or the machine."""
    if name == "nodes":
        return nodes_of(run)
    if name == "device":
        device = run.spec.get("device", "auto")
        return ("cuda" if run.environment.get("gpus") else "cpu") if device == "auto" else device
    if name == "epochs":  # a run that was stopped in an epoch has not trained for so many
        return run.spec.get("epochs", run.summary.epochs) if is_whole(run) else None
    if name == "read":
        return run.spec.get("read", "own")
    return run.spec[name] if name in run.spec else getattr(run.summary, name, None)


def is_whole(run: Run) -> bool:
    """Whether it went to the end of its epochs: one that was given a number of steps stops somewhere."""
    return run.spec.get("steps") is None


def measured(one: Group, name: str) -> float | None:
    """The median over repeats; of a list by epochs, the median epoch's time, and the last epoch's loss or accuracy."""
    if name == "update_seconds":
        return one.step().value
    if name == "images_per_second":
        return one.images_per_second().value
    if name == "epoch_seconds" and not is_whole(one.first):
        return None
    found: list[float] = []
    for run in one.runs:
        value = getattr(run.summary, name, None)
        if isinstance(value, list):
            found += value if name == "epoch_seconds" else value[-1:]
        elif value is not None:
            found.append(value)
    return median(found) if found else None


def _speedup(one: Group, curves: Iterable[Curve]) -> Interval | None:
    """Over one worker; None where there is none, or where one of both cannot be ranked."""
    for curve in curves:
        for point in curve.points:
            if point.group is one:
                return point.speedup if point.certain else None
        if curve.baseline is one:
            return Interval(1.0, 1.0, 1.0) if certain(one) else None
    return None


def _order(one: Group) -> tuple[Any, ...]:
    s, grid = one.first.summary, one.first.summary.grid
    return (s.model, s.data, s.compute, stands_for(one) or 0, not one.method.single, s.strategy, s.servers,
            grid.stages, grid.shards, facets(one)["overlap"], s.workers, nodes_of(one.first), s.batch_size)  # fmt: skip


def _identity(groups: Sequence[Group]) -> list[str]:
    """The names that tell settings apart, and those that are always told."""
    names = list(IDENTITY) + sorted({key for one in groups for key in one.setting} - {*IDENTITY, *IMPLIED})
    return [name for name in names if name in IDENTITY or len(_values(groups, name)) > 1]


def _told(one: Group, name: str) -> Any:
    if name.startswith("links"):
        return facets(one)["link" if name == "links" else "stands"].removeprefix("links as of ") or None
    if name == "overlap" and (one.workers == 1 or not one.first.has(name)):
        return None  # there is nothing to overlap
    if name in NETWORK:
        return words(one)[name] or None
    return value_of(one.first, name) if name in (*IDENTITY, "global_batch") else one.setting.get(name)


def _values(groups: Iterable[Group], name: str) -> set[str]:
    return {repr(_told(one, name)) for one in groups}


def _follows(groups: Sequence[Group], name: str) -> bool:
    """Whether it only repeats another: the strategy, as the transport of servers does, the compute, or the nodes."""
    if name in BY_DIVISION and name not in (*ALWAYS, "servers", *division.PARTS):
        other = "strategy"
    elif name in BY_COMPUTE:
        other = "compute"
    elif name in FOLLOWS:
        other = FOLLOWS[name]
    else:
        return False
    return all(len(_values([o for o in groups if _told(o, other) == _told(one, other)], name)) == 1 for one in groups)


def results(study: Study) -> list[Row]:
    """One row a setting, with plain numbers: seconds, images, bytes; ends of intervals in columns of their own."""
    groups = sorted(study.groups, key=_order)
    names = _identity(groups)
    rows = []
    for one in groups:
        row: Row = {name: _told(one, name) for name in names} | {"repeats": len(one.runs)}
        row["read_seconds"] = measured(one, "read_seconds")
        _put(row, "update_seconds", one.step())
        row["epoch_seconds"] = measured(one, "epoch_seconds")
        _put(row, "images_per_second", one.images_per_second())
        _put(row, "speedup_one_process", over_one_process(one, study.groups))
        _put(row, "speedup_strong", _speedup(one, study.strong))
        _put(row, "speedup_weak", _speedup(one, study.weak))
        for name in ("test_loss", "test_accuracy", "total_seconds"):
            row[name] = measured(one, name)
        row["cpu_seconds"] = _middle(sum(run.summary.cpu_seconds) or None for run in one.runs)
        row["preemptions_per_second"] = _middle(preemptions(run) for run in one.runs)
        row["disturbed"] = "; ".join(dict.fromkeys(disturbed(one))) or None
        row["peak_memory_bytes"] = max(max(run.summary.peak_rss_bytes, default=0) for run in one.runs) or None
        rows.append(row)
    return rows


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _total(row: Row) -> Cell:
    """Wall time; below it, where it is different, the processor time of all ranks."""
    wall, cpu = row["total_seconds"], row["cpu_seconds"]
    differs = wall and cpu and abs(cpu / wall - 1) > DIFFERS
    return Cell(number(wall), f"CPU {number(cpu)}" if differs else "")


def _put(row: Row, name: str, interval: Interval | None) -> None:
    for suffix, end in (("", "value"), ("_low", "low"), ("_high", "high")):
        row[name + suffix] = None if interval is None else getattr(interval, end)


def _interval(row: Row, name: str) -> Interval | None:
    value = row[name]
    return None if value is None else Interval(value, row[f"{name}_low"], row[f"{name}_high"])


def results_table(study: Study) -> Results:
    """What all settings share is said once above the table; a column that is empty in all rows is left out.

    Settings are in one column, in words, so that the numbers are in sight on a phone, too: --csv has them in columns.
    """
    groups = sorted(study.groups, key=_order)
    rows = results(study)
    names = [name for name in _identity(study.groups) if not _follows(study.groups, name)]
    shared = [n for n in names if len({repr(row[n]) for row in rows}) == 1]
    told = [f"{HEADERS.get(n, n.replace('_', ' '))} {rows[0][n]}" for n in shared if rows[0][n] not in (None, 0)]
    columns = {
        "setting": [Cell(label(one, groups), number=False) for one in groups],
        "images/s": [within(_interval(row, "images_per_second")) for row in rows],
        "times one process": [within(_interval(row, "speedup_one_process")) for row in rows],
        "strong speedup": [within(_interval(row, "speedup_strong")) for row in rows],
        "weak speedup": [within(_interval(row, "speedup_weak")) for row in rows],
        "update, ms": [within(_interval(row, "update_seconds"), 1000) for row in rows],
        "epoch, s": [Cell(number(row["epoch_seconds"])) for row in rows],
        "total, s": [_total(row) for row in rows],
        "test accuracy": [Cell(percent(row["test_accuracy"])) for row in rows],
        "test loss": [Cell(number(row["test_loss"])) for row in rows],
        "peak MB": [Cell(number((row["peak_memory_bytes"] or 0) / 1e6 or None)) for row in rows],
        "read, s": [Cell(number(row["read_seconds"])) for row in rows],
        "runs": [cell(row["repeats"]) for row in rows],
        "disturbed": [Cell(row["disturbed"] or NOTHING, number=False) for row in rows],
    }
    columns = {name: cells for name, cells in columns.items() if any(each.text != NOTHING for each in cells)}
    made = table(list(columns), list(zip(*columns.values(), strict=True)), kind="results")
    return Results(", ".join(told) if len(rows) > 1 else "", made)


def matches(one: Group, wanted: dict[str, Any]) -> bool:
    """Whether a setting is the one that a paper's row is about; a list means any of its values."""
    for name, value in wanted.items():
        allowed = value if isinstance(value, list) else [value]
        if value_of(one.first, name) not in allowed:
            return False
    return True


def beside_paper(study: Study) -> list[Row]:
    """For each of the paper's rows and each setting of ours that it is about: both, and ours over the paper's.

    What else the paper's was `of` need not be so of ours: then it is said, and only what is about pace is divided.
    """
    rows: list[Row] = []
    for given in study.bench.paper if study.bench else ():
        wanted, of, note = given.get("match", {}), given.get("of", {}), str(given.get("note", ""))
        theirs = {name: value for name, value in given.items() if name in MEASURES}
        setting = ", ".join(_named(name, value) for name, value in (wanted | of).items() if value != "real")
        found: list[Group | None] = [one for one in study.groups if matches(one, wanted)]
        for one in found or [None]:
            other = [name for name in of if one and not matches(one, {name: of[name]})]
            said = [_named(name, value_of(one.first, name)) for name in other] if one else []
            row: Row = {"setting": setting, "ours": label(one, study.groups) if one else "", "note": note,
                        "ours_is_of": ", ".join(said)}  # fmt: skip
            for name, value in theirs.items():
                ours = _our(study, one, name)
                same = ours is not None and value and (not other or name in PACE)
                row |= {f"{name}_paper": value, f"{name}_ours": ours,
                        f"{name}_ratio": ours / value if ours is not None and same else None}  # fmt: skip
            rows.append(row)
    return rows


def _our(study: Study, one: Group | None, name: str) -> float | None:
    if one is None:
        return None
    if name == "speedup":
        found = _speedup(one, study.strong) or _speedup(one, study.weak)
        return found.value if found else None
    return measured(one, name)


def _named(name: str, value: Any) -> str:
    if isinstance(value, list):
        return " or ".join(_named(name, each) for each in value)
    if name in ("workers", "threads", "nodes", "servers"):
        return f"{value} {name if value != 1 else name[:-1]}"
    if name == "epochs":
        return "not whole epochs" if value is None else count(value, "epoch")
    if name in ("strategy", "model", "data", "device"):
        return str(value)
    return f"{HEADERS.get(name, name.replace('_', ' '))} {value}"


def paper_table(study: Study) -> PaperTable:
    """For each row the paper's numbers, ours, and ours over the paper's; accuracies are subtracted."""
    rows = beside_paper(study)
    names = [name for name in MEASURES if any(f"{name}_paper" in row for row in rows)]
    return PaperTable(tuple(MEASURES[name][0] for name in names), tuple(_paper_row(row, names) for row in rows))


def _paper_row(row: Row, names: Sequence[str]) -> PaperRow:
    paper, ours = (
        tuple(MEASURES[name][1](row.get(f"{name}_{which}")) for name in names) for which in ("paper", "ours")
    )
    ratio = tuple(_difference(name, row) for name in names)
    which = f"{row['ours']}; {row['ours_is_of']}" if row["ours_is_of"] else row["ours"]
    return PaperRow(row["setting"], row["note"], paper, which, ours, ratio)


def _difference(name: str, row: Row) -> str:
    paper, ours, ratio = (row.get(f"{name}_{which}") for which in ("paper", "ours", "ratio"))
    if ratio is None or paper is None or ours is None:
        return NOTHING
    if name.endswith("accuracy"):
        return f"{100 * (ours - paper):+.2f}\u00a0points".replace("-", "−")
    return f"×\u00a0{number(ratio)}"


def missing(study: Study) -> list[tuple[str, str]]:
    """Runs that are not in the report, by name, and why: they failed, cannot be read, or were never made."""
    bench = study.bench
    if bench is None:
        return [(str(each.folder), each.why) for each in study.left_out]
    found = {each.folder.name: each.why for each in study.left_out} | bench.failed
    known = {run.folder.name for run in study.runs} | set(found)
    return [*found.items(), *((name, "not run yet") for name in bench.runs if name not in known)]
