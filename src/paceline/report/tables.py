"""The tables of a report, as plain numbers and as cells: all settings, comparison with the paper, missing runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median
from typing import Any

from paceline.analysis.headline import over_one_process
from paceline.analysis.learning import perplexity
from paceline.analysis.resources import preemptions
from paceline.analysis.runs import Run
from paceline.analysis.scaling import Curve, Group, certain, disturbed
from paceline.analysis.setting import in_words_of, shared
from paceline.analysis.statistics import Interval
from paceline.analysis.study import Study
from paceline.report.cells import NOTHING, Cell, TableData, cell, number, percent, table, within
from paceline.report.traces import identity

Row = dict[str, Any]

# CPU time is shown if it differs from wall time by more than this fraction.
DIFFERS = 0.1

# A heat map of more classes would not be readable.
MOST_CLASSES = 20

# Measures that can be compared even if the paper trained on other data, or for longer.
PACE = ("update_seconds", "samples_per_second", "speedup")

# Measures that papers and our runs have: header, and how values are formatted.
MEASURES: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "read_seconds": ("read, s", number),
    "update_seconds": ("update, s", number),
    "epoch_seconds": ("epoch, s", number),
    "samples_per_second": ("samples/s", number),
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
    """A row for each setting; `shared` is what all settings have in common, `commands` are theirs."""

    shared: str
    table: TableData
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class PaperRow:
    """A row of the paper and one of our settings, whose name is empty if there is none."""

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


def value_of(one: Group, name: str) -> Any:
    """The value of a fact or an option; epochs are None if a run was given a number of steps."""
    if name == "epochs":
        return one.first.spec.get("epochs", one.first.summary.epochs) if is_whole(one.first) else None
    found = one.setting.get(name)
    return getattr(one.first.summary, name, None) if found is None else found


def is_whole(run: Run) -> bool:
    """Whether it trained whole epochs instead of a number of steps."""
    return run.spec.get("steps") is None


def measured(one: Group, name: str) -> float | None:
    """The median over repeats; of values per epoch, the median time, and the loss or accuracy of the last epoch."""
    if name == "update_seconds":
        return one.step().value
    if name == "samples_per_second":
        return one.samples_per_second().value
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
    """The speedup over one worker; None without a baseline, or if one of both cannot be ranked."""
    for curve in curves:
        for point in curve.points:
            if point.group is one:
                return point.speedup if point.certain else None
        if curve.baseline is one:
            return Interval(1.0, 1.0, 1.0) if certain(one) else None
    return None


def _order(one: Group) -> tuple[Any, ...]:
    s, setting = one.first.summary, one.setting
    return (s.model, s.data, s.compute, setting.get("links_as_of", 0), not one.method.single, s.strategy, s.servers,
            s.grid.stages, s.grid.shards, setting.text("overlap"), s.workers, setting.get("nodes"),
            s.batch_size)  # fmt: skip


def results(study: Study) -> list[Row]:
    """One row per setting with plain numbers: seconds, samples, bytes; ends of intervals are separate columns."""
    groups = sorted(study.groups, key=_order)
    facts = [(name, fact.text) for one in groups for name, fact in one.setting.facts.items()]
    varied = [name for name in dict(facts) if len({text for each, text in facts if each == name}) > 1]
    rows, metrics = [], metric_names(study)
    for one in groups:
        row: Row = {name: value for name, value in identity(one).items() if name != "runs"}
        row |= {name: one.setting.plain(name) for name in varied if name not in row}
        row["repeats"] = len(one.runs)
        row["read_seconds"] = measured(one, "read_seconds")
        _put(row, "update_seconds", one.step())
        row["epoch_seconds"] = measured(one, "epoch_seconds")
        _put(row, "samples_per_second", one.samples_per_second())
        row["tokens_per_second"] = measured(one, "tokens_per_second")
        _put(row, "speedup_one_process", over_one_process(one, study.groups))
        _put(row, "speedup_strong", _speedup(one, study.strong))
        _put(row, "speedup_weak", _speedup(one, study.weak))
        for name in ("test_loss", "test_accuracy"):
            row[name] = measured(one, name)
        row |= {_column(name): _middle(_metrics(run).get(name) for run in one.runs) for name in metrics}
        row["total_seconds"] = measured(one, "total_seconds")
        row["cpu_seconds"] = _middle(sum(run.summary.cpu_seconds) or None for run in one.runs)
        row["preemptions_per_second"] = _middle(preemptions(run) for run in one.runs)
        row["disturbed"] = "; ".join(dict.fromkeys(disturbed(one))) or None
        row["peak_memory_bytes"] = max(max(run.summary.peak_rss_bytes, default=0) for run in one.runs) or None
        rows.append(row)
    return rows


def metric_names(study: Study) -> list[str]:
    """The figures that tests have beside loss and accuracy."""
    return list(dict.fromkeys(name for one in study.groups for run in one.runs for name in _metrics(run)))


def _metrics(run: Run) -> dict[str, float]:
    """The metrics of its test, with the perplexity of a language model."""
    loss = run.summary.test_loss
    found = perplexity(run, loss) if loss is not None else None
    return run.summary.test_metrics | ({} if found is None else {"perplexity": found})


def _column(metric: str) -> str:
    return f"test_{metric.replace(' ', '_')}"


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _total(row: Row) -> Cell:
    """Wall time, and below it the CPU time of all ranks if it differs."""
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
    """One row per setting; what all settings have in common is separate, and empty columns are omitted.

    A setting is one column of words, so that a phone shows numbers beside it; --csv has a column per option.
    """
    groups = sorted(study.groups, key=_order)
    rows = results(study)
    same = shared([one.setting for one in groups]).given()
    columns = {
        "setting": [
            Cell(one.label(groups), f"disturbed: {row['disturbed']}" if row["disturbed"] else "", number=False)
            for one, row in zip(groups, rows, strict=True)
        ],
        "samples/s": [within(_interval(row, "samples_per_second")) for row in rows],
        "tokens/s": [Cell(number(row["tokens_per_second"])) for row in rows],
        "speedup over one process": [within(_interval(row, "speedup_one_process")) for row in rows],
        "strong speedup": [within(_interval(row, "speedup_strong")) for row in rows],
        "weak speedup": [within(_interval(row, "speedup_weak")) for row in rows],
        "update, ms": [within(_interval(row, "update_seconds"), 1000) for row in rows],
        "epoch, s": [Cell(number(row["epoch_seconds"])) for row in rows],
        "total, s": [_total(row) for row in rows],
        "test accuracy": [Cell(percent(row["test_accuracy"])) for row in rows],
        "test loss": [Cell(number(row["test_loss"])) for row in rows],
        **{f"test {name}": [Cell(number(row[_column(name)])) for row in rows] for name in metric_names(study)},
        "peak MB": [Cell(number((row["peak_memory_bytes"] or 0) / 1e6 or None)) for row in rows],
        "read, s": [Cell(number(row["read_seconds"])) for row in rows],
        "runs": [cell(row["repeats"]) for row in rows],
    }
    columns = {name: cells for name, cells in columns.items() if any(each.text != NOTHING for each in cells)}
    made = table(list(columns), list(zip(*columns.values(), strict=True)), kind="results")
    return Results(same if len(rows) > 1 else "", made)


def classes_table(study: Study) -> TableData | None:
    """Of a single classifier: how much of each class is correct, and what it was taken for, as a heat map."""
    counts = study.runs[0].summary.confusion if len(study.runs) == 1 else None
    if not counts:
        return None
    names, few = [f"{number:,}" for number in range(len(counts))], len(counts) <= MOST_CLASSES
    rows = []
    for name, row in enumerate(counts):
        all_of, wrong = sum(row), [0 if other == name else count for other, count in enumerate(row)]
        worst = wrong.index(max(wrong))
        rows.append([
            Cell(names[name]), Cell(f"{all_of:,}"), Cell(percent(row[name] / all_of if all_of else None)),
            Cell(f"{names[worst]} ({wrong[worst]:,})" if any(wrong) else NOTHING),
            *(Cell(f"{count:,}", shade=sqrt(count / all_of)) if count else Cell("") for count in row if few),
        ])  # fmt: skip
    heads = ["class", "samples", "correct", "most often taken for", *(names if few else ())]
    note = "The columns on the right are predicted classes: the darker, the larger the part of the row's samples."
    return table(heads, rows, kind="classes", note=note if few else "")


def matches(one: Group, wanted: dict[str, Any]) -> bool:
    """Whether a setting matches a row of the paper; a list means any of its values."""
    for name, value in wanted.items():
        allowed = value if isinstance(value, list) else [value]
        if value_of(one, name) not in allowed:
            return False
    return True


def beside_paper(study: Study) -> list[Row]:
    """For each row of the paper and each of our settings that matches it: both values, and ours over the paper's.

    What the row was `of` may differ in ours: the row then says so, and ratios are limited to PACE.
    """
    rows: list[Row] = []
    for given in study.bench.paper if study.bench else ():
        wanted, of, note = given.get("match", {}), given.get("of", {}), str(given.get("note", ""))
        theirs = {name: value for name, value in given.items() if name in MEASURES}
        setting = ", ".join(_named(name, value) for name, value in (wanted | of).items() if value != "real")
        found: list[Group | None] = [one for one in study.groups if matches(one, wanted)]
        for one in found or [None]:
            other = [name for name in of if one and not matches(one, {name: of[name]})]
            said = [_named(name, value_of(one, name)) for name in other] if one else []
            row: Row = {"setting": setting, "ours": one.label(study.groups) if one else "", "note": note,
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
    return "not whole epochs" if name == "epochs" and value is None else in_words_of(name, value)


def paper_table(study: Study) -> PaperTable:
    """The numbers of the paper, ours, and ours over the paper's, or the difference for accuracies."""
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
    """Runs that are not in the report, and why: they failed, cannot be read, or have not run yet."""
    bench = study.bench
    if bench is None:
        return [(str(each.folder), each.why) for each in study.left_out]
    found = {each.folder.name: each.why for each in study.left_out} | bench.failed
    known = {run.folder.name for run in study.runs} | set(found)
    return [*found.items(), *((name, "not run yet") for name in bench.runs if name not in known)]
