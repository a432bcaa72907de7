"""The parts of a report in words: what it is about, what was found, what is doubtful, how it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

from paceline.analysis.checks import RunWarning
from paceline.analysis.claims import Claim
from paceline.analysis.finding_many import Rows
from paceline.analysis.headline import Case
from paceline.analysis.lines import network
from paceline.analysis.runs import MACHINE
from paceline.analysis.study import Study
from paceline.analysis.wording import count, percents
from paceline.report.markup import NOTHING, Cell, bullets, details, paragraphs, prose, table, within
from paceline.report.traces import scaled_by

# The summary, by the kinds of its findings.
SUMMARY = {
    "What was run": ("ran",),
    "What is best for what": ("best", "learned"),
    "How it scales": ("scaling",),
    "Where the time goes": ("cost",),
    "What is not worth it": ("not-worth",),
    "What cannot be said": ("missing",),
}
# By the kind of a warning: what is wrong, and what to do about it.
WARNINGS = {
    "disturbed": (
        "Other programs used the processors",
        "Repeat these runs on a machine that does nothing else: differences between their times mean nothing.",
    ),
    "two-humped": ("The machine was in two states", "Repeat these on a machine that does nothing else."),
    "drift": ("Steps that had not settled", "Make these runs longer; hot or busy machines slow down."),
    "sum": ("Epochs that are longer than their run", "One of the clocks is wrong: do not use these times."),
    "oversubscribed": ("More workers than cores", "These times are of workers that take turns, not of more machines."),
    "emulated": ("Emulated compute", "Times are of communication and waiting; nothing was trained."),
    "lab": ("Links that this machine cannot drive", "Choose slower links, fewer nodes, or a faster machine."),
    "repeats": ("Too few repeats", "Make three or more: only then is it known how much runs differ by chance."),
    "spread": ("Repeats that differ", "Differences that are smaller than these are not real."),
    "baseline": ("A baseline with fewer cores", "A part of the speedup is cores that one worker could have used."),
    "superlinear": ("Faster than possible", "n workers cannot be more than n times as fast as one: repeat that one."),
    "efficiency": ("Efficiencies that contradict each other", "Some point is wrong: repeat these runs, interleaved."),
    "short": ("Runs that are too short", "They are not ranked: make them longer."),
    "mixed": ("Several machines or versions", "Compare only runs of one: make all of them again on one machine."),
    "differ": ("Replicas that are not the same model", "Training is wrong, or not the same: do not compare these."),
}
VERDICTS = {"holds": "✓", "fails": "✗", "holds in part": "◐", "cannot be told": "?"}
SHOWN_AT_ONCE = 3
SAID_AT_ONCE = 6
MOST_ROWS = 8  # of a table in the summary that is open at once


def title(study: Study) -> str:
    if study.bench:
        return study.bench.title or study.bench.name
    parents = {run.folder.resolve().parent.name for run in study.runs}
    runs = count(len(study.runs), "run")
    return f"{parents.pop()}: {runs}" if len(parents) == 1 else f"Report of {runs}"


def badges(study: Study) -> str:
    emulated = sum(run.emulated for run in study.runs)
    found = ["quick form"] if study.bench and study.bench.quick else []
    if emulated == len(study.runs):
        found.append("emulated compute: nothing was trained")
    elif emulated:
        found.append(f"emulated compute in {emulated} of {len(study.runs)} runs: nothing was trained there")
    return "".join(f'<span class="badge">{escape(text)}</span> ' for text in found)


def about(study: Study) -> str:
    bench = study.bench
    if bench is None:
        return ""
    source = f'<p class="source">After {prose(bench.source)}.</p>\n' if bench.source else ""
    return paragraphs(bench.about) + source


def verdict(study: Study, chart: str) -> str:
    """The answer, what qualifies it, the picture, and many cases as a table."""
    found = study.headline
    notes = "".join(f'<p class="note">{escape(note)}</p>\n' for note in found.notes)
    rows = [[each.name, within(each.speedup), Cell(each.verdict, number=False), each.best, _percents(each)]
            for each in found.cases]  # fmt: skip
    heads = ["case", "times one process", "verdict", "best setting", "of the ideal"]
    cases = table(heads, rows, kind="cases") if len(rows) > 1 else ""
    return f'<p class="answer">{escape(found.sentence)}</p>\n{notes}{chart}{cases}'


def _percents(case: Case) -> Cell:
    return Cell(percents(case.efficiency)) if case.efficiency else Cell(NOTHING)


def summary(study: Study) -> str:
    known = {kind for kinds in SUMMARY.values() for kind in kinds}
    text = ""
    for heading, kinds in SUMMARY.items():
        chosen = [each for each in study.findings if each.kind in kinds]
        found = [each.text for each in chosen if not each.rows]
        text += f"<h3>{heading}</h3>\n" if chosen else ""
        for each in chosen:
            text += f"<p>{escape(each.text)}</p>\n{_rows(each.rows)}" if each.rows else ""
        if found:
            text += bullets(found[:SAID_AT_ONCE])
        if more := found[SAID_AT_ONCE:]:
            text += details(f"{len(more)} more", bullets(more))
    others = [each.text for each in study.findings if each.kind not in known]
    return text + (bullets(others) if others else "")


def _rows(rows: Rows) -> str:
    heads, *below = rows
    made = table(heads, below)
    return made if len(below) <= MOST_ROWS else details(count(len(below), "case"), made)


def claims(study: Study) -> str:
    return "".join(_claim(claim) for claim in study.claims)


def _claim(claim: Claim) -> str:
    kind = claim.verdict.replace(" ", "-")
    mark = f'<span class="verdict {escape(kind)}">{VERDICTS.get(claim.verdict, "")} {escape(claim.verdict)}</span>'
    source = f' <span class="source">{escape(claim.source)}</span>' if claim.source else ""
    words = {True: "holds", False: "fails", None: "cannot be told"}
    rows = [[each.label, Cell(words[each.holds], number=False), each.why] for each in claim.cases]
    cases = details(count(len(rows), "case"), table(["case", "", "why"], rows)) if rows else ""
    return (
        f'<div class="claim"><p class="said">{mark} {escape(claim.text)}{source}</p>\n<p>{escape(claim.why)}</p>\n'
        f"{cases}</div>\n"
    )


def warnings(found: Sequence[RunWarning]) -> str:
    """One entry for each kind, however many runs have it."""
    by_kind: dict[str, list[RunWarning]] = {}
    for warning in found:
        by_kind.setdefault(warning.kind, []).append(warning)
    order = sorted(by_kind, key=lambda kind: kind == "emulated")  # the badge has said it already
    return "".join(_kind(kind, by_kind[kind]) for kind in order)


def _kind(kind: str, found: Sequence[RunWarning]) -> str:
    """One line; of several runs the rest is behind it."""
    heading, advice = WARNINGS.get(kind, (kind.replace("-", " ").capitalize(), ""))
    texts = {each.text for each in found}
    if len(found) == 1:
        line = f"<b>{escape(heading)}</b> ({escape(found[0].about)}: {escape(found[0].text)}). {escape(advice)}"
        return f'<p class="warning">{line}</p>\n'
    items = "".join(f"<li><b>{escape(each.about)}</b>: {escape(each.text)}</li>\n" for each in found)
    if len(texts) == 1:
        items = f"<li>{escape(texts.pop())}: {escape('; '.join(each.about for each in found))}</li>\n"
    line = f'<span class="count">{len(found)} ×</span> <b>{escape(heading)}.</b> {escape(advice)}'
    return f'<details class="warning"><summary>{line}</summary>\n<ul>{items}</ul></details>\n'


def missing(found: Sequence[tuple[str, str]]) -> str:
    """Runs that are not here, by their reasons; what many share is said once."""
    by_reason: dict[str, list[str]] = {}
    for name, why in found:
        by_reason.setdefault(why, []).append(name)
    few = [[name, why] for why, names in by_reason.items() if len(names) <= SHOWN_AT_ONCE for name in names]
    text = table(["run", "why"], few) if few else ""
    for why, names in by_reason.items():
        if len(names) > SHOWN_AT_ONCE:
            text += f"<p>{count(len(names), 'run')}: {escape(why)}.</p>\n{details('which', bullets(names))}"
    return text


METHOD = """
<p>The first steps of each run are left out for as long as they are still warming up (the cut that makes the mean of
the rest most certain). A step is the whole step, from the end of the one before to the end of its optimizer. What is
shown is the median step of the middle repeat, with the interval in which it lies with 95 % confidence: from how much
repeats differ (Student's t), or, of one run alone, from its steps and their autocorrelation, which does not tell how
another run would be. Speedup is images per second beside one worker: <em>strong</em> of the
same global batch, <em>weak</em> of the same batch for each worker. Two settings whose intervals overlap are not shown
to differ. More is in docs/reports.md of Paceline.</p>
"""


def method(study: Study) -> str:
    rows = [[name.replace("_", " "), " and ".join(values)] for name, values in _machines(study).items()]
    if links := {network(one) for one in study.groups} - {""}:
        sizes = sorted({len(one.setting["lab"]) for one in study.groups if one.setting["lab"]})
        many = count(sizes[0], "node") if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} nodes"
        rows.append(["lab", f"{many}, {'; '.join(sorted(links))}"])
    if scaled := scaled_by(study.groups):
        rows.append(["scaled", "; ".join(scaled)])
    times = [steps[-1].time for run in study.runs for steps in run.steps.values() if steps]
    first, last = (datetime.fromtimestamp(end, UTC) for end in (min(times), max(times)))
    until = f"{last:%H:%M}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M}"
    rows.append(["made", f"{first:%Y-%m-%d %H:%M} to {until} UTC"])
    several = any(len(values) > 1 for values in _machines(study).values())
    return METHOD + table(["", "the machines" if several else "the machine"], rows)


def _machines(study: Study) -> dict[str, list[str]]:
    """What the runs were made on, as each of them says, and what only the experiment knows of it; each value once."""
    here = study.bench.here if study.bench else {}
    found = {name: [str(value)] for name, value in here.items()}
    for name in dict.fromkeys([*here, *MACHINE]):
        told = [run.environment[name] for run in study.runs if run.environment.get(name) is not None]
        if told or name not in here:
            found[name] = sorted({str(value) if value != [] else "none" for value in told}) or ["unknown"]
    return found
