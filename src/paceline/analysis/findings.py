"""The summary in words: what was run, what is best, where time goes and what is not worth it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.analysis.finding_learning import batch_sizes, best_result, scored, soonest
from paceline.analysis.finding_many import Rows, best_of, cost_of, idle_of, slower_of
from paceline.analysis.finding_pipeline import bubbles
from paceline.analysis.finding_slow import verdicts
from paceline.analysis.finding_speed import best, cost, not_worth, scaling
from paceline.analysis.learning import measure_of
from paceline.analysis.lines import ENOUGH_RUNS
from paceline.analysis.problems import Problem, problems
from paceline.analysis.runs import LeftOut
from paceline.analysis.scaling import Curve, Group
from paceline.analysis.setting import nodes_of
from paceline.analysis.statistics import ENOUGH_SAMPLES
from paceline.analysis.wording import count, link, listing, numbers, ranged, some
from paceline.emulation.table import device


@dataclass(frozen=True)
class Finding:
    """One or a few sentences. If there are several cases, `rows` are a small table whose first row has the headers."""

    kind: str  # ran, best, scaling, cost, verdict, learned, not-worth, missing
    text: str
    rows: Rows = ()


def findings(
    groups: Sequence[Group], strong: Sequence[Curve], weak: Sequence[Curve], left_out: Sequence[LeftOut] = ()
) -> list[Finding]:
    """All findings, in the order of the report."""
    found, curves = problems(groups), [*strong, *weak]
    said = [Finding("ran", ran(groups))] if groups else []
    said += _speed(found, curves, "best")
    for problem in found:
        said += [Finding("learned", t) for part in (soonest, best_result, batch_sizes) for t in part(problem)]
    for kind in ("scaling", "cost", "not-worth"):
        said += _speed(found, curves, kind)
        if kind == "cost":
            said += [Finding(kind, text) for problem in found for text in bubbles(problem)]
            text, rows = verdicts(groups)
            said += [Finding("verdict", text, rows)] if text else []
    said += [Finding("missing", text) for text in missing(groups, curves, left_out)]
    return list(dict.fromkeys(said))


def _speed(found: Sequence[Problem], curves: Sequence[Curve], kind: str) -> list[Finding]:
    """Sentences about one problem; tables about several, whose scaling only the charts show."""
    if len(found) == 1:
        one = {"best": best, "scaling": scaling, "cost": cost, "not-worth": not_worth}[kind]
        return [Finding(kind, text) for text in one(found[0], curves)]
    if kind == "cost":
        return [Finding(kind, text) for text in cost_of(found, curves)]
    tables = {"best": [best_of(found)], "not-worth": [idle_of(found, curves), slower_of(found)]}.get(kind, [])
    return [Finding(kind, text, rows) for text, rows in tables if rows]


def ran(groups: Sequence[Group]) -> str:
    """What was run, by which strategies, with how many workers, on which machines."""
    summaries = [one.first.summary for one in groups]
    emulated = sorted({device(s.compute) for s in summaries if s.compute != "real"})
    real = any(s.compute == "real" for s in summaries)
    verb = "Trained" if real else "Timed"
    runs = [len(one.runs) for one in groups]
    each = f"{count(min(runs), 'run')} each" if min(runs) == max(runs) else f"{min(runs)} to {max(runs)} runs each"
    size = f"{count(len(groups), 'setting')}, {each}" if len(groups) > 1 else count(runs[0], "run")
    servers = {s.servers for s in summaries if s.servers}
    of = " or replica" if any(one.method.part for one in groups) else ""
    words = [
        f"{verb} {_names(s.model for s in summaries)} on {_names(s.data for s in summaries)}",
        f"by {_names(s.strategy for s in summaries)}",
        f"with {numbers({s.workers for s in summaries}, 'worker')}"
        + (f" and {numbers(servers, 'server')}" if servers else ""),
        f"batch {ranged({s.batch_size for s in summaries})} per worker{of}: {size}, {_where(groups)}.",
    ]
    text = ", ".join(words)
    if emulated:
        which = "Some compute was" if real else "Compute was"
        text += (
            f" {which} emulated ({listing(emulated)}): times show communication and waiting, and nothing was trained."
        )
    shrunk = sorted({s.shrink for s in summaries if s.shrink > 1})
    if shrunk:
        real_links = sorted({float(f"{speed:.3g}") for one in groups if (speed := one.setting.get("links_as_of"))})
        stand = f", so that links stand for {listing([link(speed) for speed in real_links])}" if real_links else ""
        text += f" Gradients were {ranged(set(shrunk))} times smaller than the models'{stand}."
    return text


def _names(values: Iterator[str]) -> str:
    return listing(list(dict.fromkeys(values)))


def _where(groups: Sequence[Group]) -> str:
    machines = dict.fromkeys(_machine(run.environment) for one in groups for run in one.runs)
    text = f"on {some(list(machines))}"
    labs = [one for one in groups if one.setting.get("lab")]
    if labs:
        nodes = {nodes_of(run) for one in labs for run in one.runs}
        speeds = {float(speed) for one in labs for ends in one.setting.get("links") for speed in ends if speed}
        some_of = "" if len(labs) == len(groups) else " in part"
        text += f",{some_of} in a lab of {numbers(nodes, 'node')}"
        text += f" with links of {listing([link(speed) for speed in sorted(speeds)])}" if speeds else ""
    elif (most := max(nodes_of(run) for one in groups for run in one.runs)) > 1:
        text += f", {count(most, 'machine')} at most"
    return text


def _machine(environment: dict[str, object]) -> str:
    cores, processor = environment.get("cores"), environment.get("processor")
    gpus = environment.get("gpus") or []
    words = [f"{cores} core{'' if cores == 1 else 's'}" if cores else "", f"of {processor}" if processor else ""]
    named = Counter(str(gpu) for gpu in gpus) if isinstance(gpus, list) else Counter[str]()
    devices = "".join(f" and {number} x {gpu}" for gpu, number in named.items())
    return (" ".join(word for word in words if word) or "an unknown machine") + devices


def missing(groups: Sequence[Group], curves: Sequence[Curve], left_out: Sequence[LeftOut]) -> Iterator[str]:
    """What would have to be run or repaired to find out more."""
    if not groups:
        yield "There is no completed run."
    beside = [point.group for curve in curves for point in curve.points]
    alone = [one for one in groups if one.workers > 1 and not any(one is each for each in beside)]
    if alone:
        names = [problem.label for problem in problems(groups) if problem.label and any(map(problem.has, alone))]
        which = some(names or [one.label(groups) for one in alone])
        yield (
            f"There is no run of one worker to compare {count(len(alone), 'setting')} with ({which}). Run it with "
            f"--strategy sequential --workers 1 and the same batch size."
        )
    brief = [one for one in groups if one.too_short]
    if brief:
        yield (
            f"The runs of {count(len(brief), 'setting')} are too short (fewer than {ENOUGH_SAMPLES} independent steps "
            f"without warm-up) to rank their speed. Make those runs longer."
        )
    few = [one for one in groups if len(one.runs) < ENOUGH_RUNS]
    if few:
        which = "Every setting has" if len(few) == len(groups) else f"{len(few)} of {len(groups)} settings have"
        yield (
            f"{which} fewer than {ENOUGH_RUNS} runs, so it is not known how much runs vary: differences in speed of "
            f"less than 10 % are not significant. Repeat them."
        )
    trained = [one for one in groups if not one.first.emulated]
    if trained and scored(trained)[0] == "training":
        what = " and ".join(dict.fromkeys(measure_of(one).name for one in trained))
        yield f"Not all runs were tested or validated, and training {what} says little about new data."
    if left_out:
        reasons = some([f"{each.folder.name} ({each.why})" for each in left_out], 2)
        yield f"{count(len(left_out), 'folder')} could not be used: {reasons}."
