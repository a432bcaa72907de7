"""The sections of a report as data: what it is about, what was found, what is doubtful, how it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from paceline.analysis.checks import RunWarning
from paceline.analysis.findings import Finding
from paceline.analysis.headline import Case
from paceline.analysis.setting import MACHINE_FACTS
from paceline.analysis.study import Study
from paceline.analysis.verdicts import CONTRADICTED, IN_PART, OPEN, SUPPORTED, WORDS, Claim
from paceline.analysis.wording import count, percents
from paceline.report.cells import NOTHING, Cell, TableData, table, table_of, within
from paceline.report.figure import Chart
from paceline.report.traces import scaled_by
from paceline.strict_json import finite

# Headings of the summary, with the kinds of findings below each.
SUMMARY = {
    "What was run": ("ran",),
    "Best settings": ("best", "learned"),
    "Scaling": ("scaling",),
    "Where the time goes": ("cost", "verdict"),
    "What is not worth it": ("not-worth",),
    "What these runs do not show": ("missing",),
}
# For each kind of warning: what is wrong, and what to do about it.
WARNINGS = {
    "disturbed": (
        "Other programs used the CPUs",
        "Repeat these runs on an idle machine: their times cannot be compared.",
    ),
    "bimodal": ("Step times are bimodal", "Repeat these runs on an idle machine."),
    "drift": ("Step times drift", "Make these runs longer. A machine that is hot or busy slows down."),
    "sum": ("Epochs take longer than their run", "A clock is wrong: do not use these times."),
    "oversubscribed": (
        "More workers than cores",
        "Workers shared cores: these times do not show what more machines would do.",
    ),
    "emulated": ("Emulated compute", "Times show communication and waiting; nothing was trained."),
    "lab": ("Links too fast for this machine", "Choose slower links, fewer nodes, or a faster machine."),
    "repeats": ("Too few repeats", "Run each setting at least three times to see how much runs vary."),
    "spread": ("Repeats differ", "Smaller differences between settings are not significant."),
    "baseline": ("Baseline with fewer cores", "Part of the speedup comes from cores that one worker could have used."),
    "superlinear": (
        "Superlinear speedup",
        "n workers should not be more than n times as fast as one: repeat the baseline.",
    ),
    "efficiency": ("Inconsistent efficiencies", "At least one measurement is wrong: repeat these runs, interleaved."),
    "short": ("Runs too short", "They are not ranked. Make them longer."),
    "mixed": ("Several machines or versions", "Compare only runs of the same machine and versions; repeat the others."),
    "differ": ("Losses differ", "Training is incorrect, or the runs trained different things: do not compare them."),
}
SIGNS = {SUPPORTED: "✓", CONTRADICTED: "✗", IN_PART: "◐", OPEN: "?"}
SHOWN_AT_ONCE = 3  # names with the same reason; more are folded
SAID_AT_ONCE = 6  # sentences under a heading; more are folded
MOST_ROWS = 8  # a longer table in the summary is folded


@dataclass(frozen=True)
class Drawing:
    """A chart on the page: what page.js draws at both widths, and its numbers as a table."""

    chart: Chart
    figure: dict[str, Any]
    numbers: TableData | None


@dataclass(frozen=True)
class Verdict:
    """The answer, what qualifies it, the chart that shows it, several cases as a table, and reasons as a list."""

    sentence: str
    notes: tuple[str, ...]
    drawing: Drawing | None
    cases: TableData | None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class FindingTable:
    """A finding about several cases; a long table is `folded`."""

    text: str
    table: TableData
    folded: bool


@dataclass(frozen=True)
class Topic:
    """Findings of some kinds under one heading; those in `more` are folded."""

    heading: str
    tables: tuple[FindingTable, ...]
    sentences: tuple[str, ...]
    more: tuple[str, ...]


@dataclass(frozen=True)
class Overview:
    """What the experiment is about, its source, and the findings; those of unknown kinds are in `others`."""

    about: tuple[str, ...]
    source: str
    topics: tuple[Topic, ...]
    others: tuple[str, ...]


@dataclass(frozen=True)
class CheckedClaim:
    """A claim with the sign of its verdict and its cases."""

    claim: Claim
    sign: str
    cases: TableData | None


@dataclass(frozen=True)
class WarningKind:
    """All warnings of one kind; `same` is their text if they all have the same."""

    heading: str
    advice: str
    warnings: tuple[RunWarning, ...]
    same: str


@dataclass(frozen=True)
class Missing:
    """Runs that are not in the report: in a table, and, where many have the same reason, names by reason."""

    table: TableData | None
    by_reason: tuple[tuple[str, tuple[str, ...]], ...]
    left_out: tuple[str, ...]


def title(study: Study) -> str:
    if study.bench:
        return study.bench.title or study.bench.name
    parents = {run.folder.resolve().parent.name for run in study.runs}
    runs = count(len(study.runs), "run")
    return f"{parents.pop()}: {runs}" if len(parents) == 1 else f"Report of {runs}"


def badges(study: Study) -> tuple[str, ...]:
    emulated = sum(run.emulated for run in study.runs)
    found = ["quick form"] if study.bench and study.bench.quick else []
    if emulated == len(study.runs):
        found.append("emulated compute: nothing was trained")
    elif emulated:
        found.append(f"emulated compute in {emulated} of {len(study.runs)} runs: nothing was trained there")
    return tuple(found)


def drawing(chart: Chart) -> Drawing:
    figure = finite(chart.figure | {"narrow": chart.narrow or chart.figure["layout"]})
    return Drawing(chart, figure, table_of(chart.rows) if chart.rows else None)


def verdict(study: Study, chart: Chart | None) -> Verdict:
    found = study.headline
    rows = [[each.name, within(each.speedup), Cell(each.verdict, number=False), each.best, _percents(each)]
            for each in found.cases]  # fmt: skip
    heads = ["case", "speedup over one process", "verdict", "best setting", "efficiency"]
    cases = table(heads, rows, kind="cases") if len(rows) > 1 else None
    return Verdict(found.sentence, found.notes, drawing(chart) if chart else None, cases)


def _percents(case: Case) -> Cell:
    return Cell(percents(case.efficiency)) if case.efficiency else Cell(NOTHING)


def overview(study: Study) -> Overview:
    bench = study.bench
    paragraphs = [" ".join(part.split()) for part in bench.about.split("\n\n")] if bench else []
    known = {kind for kinds in SUMMARY.values() for kind in kinds}
    topics = []
    for heading, kinds in SUMMARY.items():
        if chosen := [each for each in study.findings if each.kind in kinds]:
            topics.append(_topic(heading, chosen))
    return Overview(
        about=tuple(part for part in paragraphs if part),
        source=bench.source if bench else "",
        topics=tuple(topics),
        others=tuple(each.text for each in study.findings if each.kind not in known),
    )


def _topic(heading: str, found: Sequence[Finding]) -> Topic:
    tables = tuple(
        FindingTable(each.text, table(each.rows[0], each.rows[1:]), len(each.rows) - 1 > MOST_ROWS)
        for each in found
        if each.rows
    )
    sentences = tuple(each.text for each in found if not each.rows)
    return Topic(heading, tables, sentences[:SAID_AT_ONCE], sentences[SAID_AT_ONCE:])


def claims(study: Study) -> tuple[CheckedClaim, ...]:
    return tuple(_claim(claim) for claim in study.claims)


def _claim(claim: Claim) -> CheckedClaim:
    rows = [[each.name, Cell(WORDS[each.holds], number=False), each.why] for each in claim.cases]
    return CheckedClaim(claim, SIGNS.get(claim.verdict, ""), table(["case", "", "why"], rows) if rows else None)


def warnings(found: Sequence[RunWarning]) -> tuple[WarningKind, ...]:
    """One entry for each kind of warning, however many runs have it."""
    by_kind: dict[str, list[RunWarning]] = {}
    for warning in found:
        by_kind.setdefault(warning.kind, []).append(warning)
    order = sorted(by_kind, key=lambda kind: kind == "emulated")  # last, as a badge says it already
    return tuple(_kind(kind, by_kind[kind]) for kind in order)


def _kind(kind: str, found: Sequence[RunWarning]) -> WarningKind:
    heading, advice = WARNINGS.get(kind, (kind.replace("-", " ").capitalize(), ""))
    same = found[0].text if len({each.text for each in found}) == 1 else ""
    return WarningKind(heading, advice, tuple(found), same)


def missing(found: Sequence[tuple[str, str]], left_out: Sequence[str] = ()) -> Missing | None:
    """Runs that are not in the report, by name and reason, and grids that were left out; None if there are none."""
    names: dict[str, list[str]] = {}
    for name, why in found:
        names.setdefault(why, []).append(name)
    few = [[name, why] for why, several in names.items() if len(several) <= SHOWN_AT_ONCE for name in several]
    many = tuple((why, tuple(several)) for why, several in names.items() if len(several) > SHOWN_AT_ONCE)
    if not found and not left_out:
        return None
    return Missing(table(["run", "why"], few) if few else None, many, tuple(left_out))


def machines(study: Study) -> TableData:
    """What the runs were made on, and when."""
    found = _machines(study)
    rows = [[name.replace("_", " "), " and ".join(values)] for name, values in found.items()]
    if links := {one.setting.text("links") for one in study.groups} - {""}:
        sizes = sorted({len(nodes) for one in study.groups if (nodes := one.setting.get("lab"))})
        many = count(sizes[0], "node") if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} nodes"
        rows.append(["lab", f"{many}, {'; '.join(sorted(links))}"])
    if scaled := scaled_by(study.groups):
        rows.append(["scaled", "; ".join(scaled)])
    times = [steps[-1].time for run in study.runs for steps in run.steps.values() if steps]
    first, last = (datetime.fromtimestamp(end, UTC) for end in (min(times), max(times)))
    until = f"{last:%H:%M}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M}"
    rows.append(["made", f"{first:%Y-%m-%d %H:%M} to {until} UTC"])
    several = any(len(values) > 1 for values in found.values())
    return table(["", "the machines" if several else "the machine"], rows)


def _machines(study: Study) -> dict[str, list[str]]:
    """What the runs were made on, as each of them says, and what only the experiment knows of it; each value once."""
    here = study.bench.here if study.bench else {}
    found = {name: [str(value)] for name, value in here.items()}
    for name in dict.fromkeys([*here, *MACHINE_FACTS]):
        told = [run.environment[name] for run in study.runs if run.environment.get(name) is not None]
        if told or name not in here:
            found[name] = sorted({str(value) if value != [] else "none" for value in told}) or ["unknown"]
    return found
