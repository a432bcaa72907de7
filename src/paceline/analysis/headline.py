"""The verdict of a study: is distributing worth it, how certain is that, and what was it compared with?

A distributed setting is compared with the fastest single process that does the same work on the same hardware, with any
number of threads. Its speedup over one of its own workers is a second figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.analysis.checks import RunWarning
from paceline.analysis.learning import measure_of
from paceline.analysis.lines import ENOUGH_RUNS, MATTERS, faster, is_faster, speed
from paceline.analysis.problems import Problem, problems
from paceline.analysis.scaling import Curve, Group, certain, disturbed, family, size
from paceline.analysis.statistics import Interval
from paceline.analysis.trust import MAY_NEED_MORE, allow, asynchronous, inexact
from paceline.analysis.wording import count, listing, number, percent, sentence, some, spread, within

# Verdicts on a problem or a setting.
WORTH, PROBABLY = "worth it", "probably worth it"
NOT, PROBABLY_NOT = "not worth it", "probably not worth it"
OPEN, NO_BASELINE, WITHHELD = "no significant speedup", "not known", "not ranked"
UNFAIR = "not known: one process had fewer cores"
SPOILED = "not known: one process with all cores was not ranked"
# The same in a sentence over several cases: "distributing ... in 3".
SAID = {
    "is worth it": (WORTH,),
    "is probably worth it": (PROBABLY,),
    "is not worth it": (NOT,),
    "is probably not worth it": (PROBABLY_NOT,),
    "shows no significant speedup": (OPEN,),
    "cannot be judged": (UNFAIR, SPOILED, NO_BASELINE, WITHHELD),
}
# Kinds of warnings about implausible speeds, and how a verdict that is based on such a speed is qualified.
IMPOSSIBLE = {
    "superlinear": "that is more than its workers can explain",
    "efficiency": "that contradicts the speed with other numbers of workers",
}


@dataclass(frozen=True)
class Contender:
    """A distributed setting compared with the best single process; `speedup` is None if it is not ranked."""

    name: str
    verdict: str
    speedup: Interval | None


@dataclass(frozen=True)
class Case:
    """One problem, with the verdict on its best contender, which is the first one."""

    name: str  # empty where the study has one problem
    verdict: str
    best: str  # the setting, or the leaders that cannot be distinguished
    leaders: int
    over: str  # what it is compared with
    speedup: Interval | None
    efficiency: Interval | None  # relative to one of its own workers
    contenders: tuple[Contender, ...] = ()
    notes: tuple[str, ...] = ()
    runs: int = 0  # of each setting, at least
    caveat: str = ""  # why the speedup cannot be right as it is


@dataclass(frozen=True)
class Headline:
    """What a reader has to know first: `sentence` is the answer, `notes` qualify it, `chart` names the chart of it."""

    sentence: str
    notes: tuple[str, ...]
    cases: tuple[Case, ...]
    chart: str

    @property
    def text(self) -> str:
        """For a terminal: the sentence, the notes, and many cases as a table."""
        rows = [("case", "best", "verdict", "speedup over one process"), *map(_cells, self.cases)]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.sentence, *self.notes, *(table if len(self.cases) > 1 else [])])


def _cells(case: Case) -> tuple[str, str, str, str]:
    return case.name, case.best, case.verdict, within(case.speedup) if case.speedup else "–"


def headline(groups: Sequence[Group], curves: Sequence[Curve], warnings: Sequence[RunWarning] = ()) -> Headline:
    """The verdict that these settings support."""
    if not groups:
        return Headline("There is no completed run.", (), (), "")
    cases = [case for problem in problems(groups) if (case := _case(problem, groups, curves, warnings))]
    out = _unusable(groups)
    if out.nothing:
        return Headline(out.before, (), (), "utilisation" if any(map(disturbed, groups)) else "throughput")
    if not cases:
        return Headline(f"{out.before}{_alone(groups)}", out.after, (), "throughput")
    drawn = "worth" if any(case.speedup for case in cases) else "throughput"
    if len(cases) == 1:
        return Headline(f"{out.before}{_answer(cases[0])}", (*cases[0].notes, *out.after), tuple(cases), drawn)
    return Headline(f"{out.before}{_answers(cases)}", (*_shared_notes(cases), *out.after), tuple(cases), drawn)


def one_process(one: Group, groups: Sequence[Group]) -> list[Group]:
    """Settings with one process that do the same work as this one: with its global batch or its batch per worker."""
    return [
        each
        for each in groups
        if not is_distributed(each)
        and family(each) == family(one)
        and any(size(each, kind) == size(one, kind) for kind in ("strong", "weak"))
        and each.setting.get("faults") in (None, one.setting.get("faults"))
    ]


def is_distributed(one: Group) -> bool:
    return one.workers + one.first.summary.servers > 1


def best_process(one: Group, groups: Sequence[Group]) -> Group | None:
    """The fastest single process with the same work, of those that can be ranked."""
    return max((each for each in one_process(one, groups) if certain(each)), key=speed, default=None)


def over_one_process(one: Group, groups: Sequence[Group]) -> Interval | None:
    """The speedup over the best single process; None if there is none, or one of both is not ranked."""
    base = best_process(one, groups)
    if base is None or not certain(one):
        return None
    return Interval(1.0, 1.0, 1.0) if base is one else allow(faster(one, base), one, base)


def _case(
    problem: Problem, groups: Sequence[Group], curves: Sequence[Curve], warnings: Sequence[RunWarning]
) -> Case | None:
    """The verdict on one problem; None if nothing was distributed."""
    every = [one for one in problem.groups if is_distributed(one)]
    if not every:
        return None
    # Oversubscribed and asynchronous settings count only if there are no others.
    chosen = every
    for unlike in (lambda one: one.crowded, asynchronous):
        chosen = [one for one in chosen if not unlike(one)] or chosen
    usable = [one for one in chosen if certain(one)]
    based = [(one, base) for one in usable if (base := best_process(one, groups))]
    if not based:
        lost = not usable or any(one_process(one, groups) for one in usable)
        top = max(usable, key=speed, default=None)
        who = _called(top, problem.groups) if top else "–"
        verdict = WITHHELD if lost else NO_BASELINE
        return Case(problem.label, verdict, who, 1, "", None, None, notes=_advice(problem, lost))
    known = [(one, base, faster(one, base)) for one, base in based]
    ranked = sorted(known, key=lambda each: (is_faster(each[2], *each[:2]) is not True, -speed(each[0])))
    best, base, _ = ranked[0]
    contenders = [
        Contender(
            _called(one, problem.groups),
            _verdict(one, over, ratio, groups, _impossible(warnings, one, over)),
            allow(ratio, one, over),
        )
        for one, over, ratio in ranked
    ]
    contenders += [Contender(_called(one, problem.groups), WITHHELD, None) for one in every if not certain(one)]
    efficiency = _per_worker(best, curves)
    leaders = [one for one, *_ in ranked if one is best or is_faster(faster(best, one), best, one) is None]
    wrong = _impossible(warnings, best, base)
    notes = (*(sentence(f"{each.about}: {each.text}.") for each in wrong),
             *_notes(best, base, leaders, problem, groups, efficiency))  # fmt: skip
    return Case(
        problem.label, contenders[0].verdict, _leading(leaders, problem), len(leaders), _process(base, groups),
        contenders[0].speedup, efficiency[0] if efficiency else None, tuple(contenders),
        notes, min(len(best.runs), len(base.runs)), IMPOSSIBLE[wrong[0].kind] if wrong else "",
    )  # fmt: skip


def _impossible(warnings: Sequence[RunWarning], *groups: Group) -> list[RunWarning]:
    """The warnings that the speeds of these settings are implausible."""
    return [
        each for each in warnings if each.kind in IMPOSSIBLE and any(one is g for one in groups for g in each.groups)
    ]


def _verdict(one: Group, base: Group, ratio: Interval, groups: Sequence[Group], wrong: Sequence[RunWarning]) -> str:
    few = min(len(one.runs), len(base.runs)) < ENOUGH_RUNS
    found = is_faster(ratio, one, base)
    if found and idle_cores(one, groups):
        return SPOILED if _not_ranked(one, groups) else UNFAIR
    if found:
        return PROBABLY if few or wrong else WORTH
    if found is False or allow(ratio, one, base).high < 1 + MATTERS:
        return PROBABLY_NOT if few else NOT
    return OPEN


def idle_cores(one: Group, groups: Sequence[Group]) -> tuple[int, int] | None:
    """The most threads of a single process that can be ranked, and how many it could have used; None if it used all."""
    run = one.first
    cores, threads = run.environment.get("cores"), run.summary.threads
    on_gpu = bool(run.environment.get("gpus")) and run.spec.get("device", "auto") != "cpu"
    alone = [each.first.summary.threads for each in one_process(one, groups) if certain(each)]
    known = [each for each in alone if each]
    if run.emulated or on_gpu or not cores or not threads or len(known) < len(alone) or not known:
        return None
    wanted = min(cores, one.workers * threads)
    return (max(known), wanted) if max(known) < wanted else None


def _not_ranked(one: Group, groups: Sequence[Group]) -> list[Group]:
    """Single processes with enough threads whose runs were disturbed or too short."""
    found = idle_cores(one, groups)
    rivals = [each for each in one_process(one, groups) if not certain(each)]
    return [each for each in rivals if found and (each.first.summary.threads or 0) >= found[1]]


def _process(base: Group, groups: Sequence[Group]) -> str:
    """The baseline in words."""
    alike = [one for one in groups if not is_distributed(one) and family(one) == family(base)]
    threads = count(base.first.summary.threads or 0, "thread")
    if base.first.emulated or not base.first.summary.threads:
        return "the best single process" if len(alike) > 1 else "one process"
    return f"the best single process, with {threads}" if len(alike) > 1 else f"one process with {threads}"


def _called(one: Group, among: Sequence[Group]) -> str:
    return one.label(among).replace(", ", " with ", 1)


def _leading(leaders: Sequence[Group], problem: Problem) -> str:
    return some([_called(one, problem.groups) for one in leaders])


def _per_worker(best: Group, curves: Sequence[Curve]) -> tuple[Interval, Interval, Group] | None:
    """Efficiency and speedup relative to one of its own workers, and that worker."""
    for curve in curves:
        for point in curve.points:
            if point.group is best and point.workers > 1 and point.certain:
                pair = best, curve.baseline
                return allow(point.efficiency, *pair), allow(point.speedup, *pair), curve.baseline
    return None


def _notes(best: Group, base: Group, leaders: Sequence[Group], problem: Problem, groups: Sequence[Group],
           per_worker: tuple[Interval, Interval, Group] | None) -> Iterator[str]:  # fmt: skip
    found = idle_cores(best, groups)
    if spoiled := _not_ranked(best, groups):
        yield (
            f"One process with {count(spoiled[0].first.summary.threads or 0, 'thread')} was run, but its runs were "
            f"disturbed or too short, and part of the speedup may come from cores that it could have used: repeat them."
        )
    elif found:
        had, wanted = found
        yield (
            f"No run of one process used more than {count(had, 'thread')}, and {_called(best, problem.groups)} used "
            f"{count(wanted, 'core')}: part of the speedup may come from cores that one process could have used. To "
            f"find out, run the same with --strategy sequential --threads {wanted}."
        )
    if len(leaders) > 1:
        yield f"These settings cannot be distinguished: {_leading(leaders, problem)}."
    if per_worker:
        efficiency, speedup, worker = per_worker
        part = f"{percent(efficiency.value)} of the ideal for {count(best.workers, 'worker')}"
        threads = count(worker.first.summary.threads or 1, "thread")
        beside = f"Compared with one worker with {threads}, it is {within(speedup)} times as fast: {part}."
        yield f"That is {part}." if worker is base else beside
    ours, theirs = best.first.summary.global_batch, base.first.summary.global_batch
    if ours != theirs and not asynchronous(best) and not best.first.emulated:
        yield (
            f"Each update uses {ours:,} samples instead of {theirs:,}, so an epoch has fewer updates: compare the "
            f"{measure_of(best).plural}, too."
        )
    if not best.method.exact:
        yield f"{inexact(best)}: {MAY_NEED_MORE}."
    if best.crowded:
        yield f"{count(best.workers, 'worker')} shared fewer cores: the result holds only for this machine."


def _advice(problem: Problem, lost: bool) -> tuple[str, ...]:
    where = f" of {problem.label}" if problem.label else ""
    if lost:
        return (f"The runs{where} that a verdict needs were disturbed or too short.",)
    return (f"No run{where} of one process does the same work: run it with --strategy sequential --workers 1.",)


@dataclass(frozen=True)
class Unusable:
    """What to say about runs that are not ranked: `before` the answer if they were disturbed, `after` it if too short.

    `nothing` means that no setting is left to compare.
    """

    before: str = ""
    after: tuple[str, ...] = ()
    nothing: bool = False


def _unusable(groups: Sequence[Group]) -> Unusable:
    runs = sum(len(one.runs) for one in groups)
    reasons = [why for one in groups for why in disturbed(one)]
    brief = sum(len(one.runs) for one in groups if one.too_short and not disturbed(one))
    left = [one for one in groups if certain(one)]
    parted = [one for one in groups if is_distributed(one)]
    lost = [one for one in parted if one_process(one, groups)]  # had something to compare with
    nothing = len(left) < min(2, len(groups))
    unjudged = bool(lost) and not any(certain(one) and best_process(one, groups) for one in lost)
    busy = f"The machine was busy during {len(reasons)} of {count(runs, 'run')} ({_why(reasons)})" if reasons else ""
    short = f"{brief} of {count(runs, 'run')} {'is' if brief == 1 else 'are'} too short" if brief else ""
    said = " and ".join(text for text in (busy, short) if text)
    if said and (nothing or unjudged):
        do = " and ".join([*(["on an idle machine"] if busy else []), *(["for longer"] if short else [])])
        what = "nothing is ranked" if nothing else "whether distributing is worth it cannot be judged"
        return Unusable(f"{said}: {what}. Run again {do}.", nothing=True)
    before = f"{busy}: {'its setting is' if len(reasons) == 1 else 'their settings are'} not ranked. " if busy else ""
    after = f"{short}: {'its setting is' if brief == 1 else 'their settings are'} not ranked." if short else ""
    return Unusable(before, (after,) if after else ())


def _why(reasons: Sequence[str]) -> str:
    """The reason; if there are several, the first as an example."""
    return reasons[0] if len(set(reasons)) == 1 else f"for example, {reasons[0]}"


def _answer(case: Case) -> str:
    """The sentence for a study of one problem."""
    if case.speedup is None:
        return "Whether distributing is worth it is not known: no run of one process does the same work."
    who, verb = ("the fastest settings", "are") if case.leaders > 1 else (case.best, "is")
    runs = f"{'only ' if case.runs < ENOUGH_RUNS else ''}{count(case.runs, 'run')} each"
    times = f"{number(case.speedup.value)} times as fast as {case.over}"
    how = f"{who} {verb} {times} (95 % interval {spread(case.speedup)}, {runs})"
    return {
        WORTH: f"Distributing is worth it: {how}.",
        PROBABLY: f"Distributing is probably worth it: {how}{f', but {case.caveat}' if case.caveat else ''}.",
        NOT: f"Distributing is not worth it: {how}.",
        PROBABLY_NOT: f"Distributing is probably not worth it: {how}.",
        OPEN: f"No significant speedup over one process: {how}.",
        UNFAIR: f"Whether distributing is worth it is not known: {how}, but one process did not use all the cores.",
        SPOILED: f"Whether distributing is worth it is not known: {how}, but the runs of one process with all the "
        f"cores were disturbed or too short.",
    }[case.verdict]


def _answers(cases: Sequence[Case]) -> str:
    """The sentence for several problems: how many have each verdict."""
    said = []
    for words, verdicts in SAID.items():
        found = [case for case in cases if case.verdict in verdicts]
        if found:
            known = [case.speedup.value for case in found if case.speedup and case.verdict in (WORTH, PROBABLY)]
            low, high = (number(end(known)) for end in (min, max)) if known else ("", "")
            times = f" ({low if low == high else f'{low} to {high}'} times as fast as one process)" if known else ""
            said.append(f"{words} in {len(found)}{times}")
    runs = [case.runs for case in cases if case.speedup]
    few = f", from only {count(min(runs), 'run')} each" if runs and min(runs) < ENOUGH_RUNS else ""
    return f"Of {len(cases)} cases, distributing {listing(said)}{few}."


def _shared_notes(cases: Sequence[Case]) -> Iterator[str]:
    """Notes that apply to several cases; the rest is in the table."""
    unfair = [case.name for case in cases if case.verdict == UNFAIR]
    if unfair:
        yield (
            f"In {count(len(unfair), 'case')} no run of one process used all the cores, so part of the speedup may "
            f"come from cores that one process could have used. Run the same with --strategy sequential and --threads "
            f"set to the number of cores: {some(unfair)}."
        )
    spoiled = [case.name for case in cases if case.verdict == SPOILED]
    if spoiled:
        yield (
            f"In {count(len(spoiled), 'case')} the runs of one process with all the cores were disturbed or too short: "
            f"repeat them ({some(spoiled)})."
        )
    unlikely = [case.name for case in cases if case.caveat and case.speedup]
    if unlikely:
        yield (
            f"In {count(len(unlikely), 'case')} the speedup is more than the workers can explain: {some(unlikely)}. "
            f"The warnings say which runs to repeat."
        )
    alone = [case.name for case in cases if case.verdict == NO_BASELINE]
    if alone:
        yield (
            f"{count(len(alone), 'case')} {'has' if len(alone) == 1 else 'have'} no run of one process that does the "
            f"same work: {some(alone)}. Run it with --strategy sequential --workers 1."
        )


def _alone(groups: Sequence[Group]) -> str:
    """The sentence for a study in which nothing was distributed."""
    usable = [one for one in groups if certain(one)]
    if len(groups) == 1:
        rate = f"{within(groups[0].samples_per_second())} samples/s"
        return f"One setting was run, {_called(groups[0], groups)}: {rate}; there is nothing to compare it with."
    if len(problems(groups)) > 1:
        return "Nothing was distributed: all runs used one process."
    best = max(usable, key=speed)
    leaders = [one for one in usable if one is best or is_faster(faster(best, one), best, one) is None]
    if len(leaders) > 1:
        who = some([_called(one, groups) for one in leaders])
        return f"Nothing was distributed, and the fastest settings cannot be distinguished: {who}."
    rate = f"{within(best.samples_per_second())} samples/s"
    return f"Nothing was distributed; the fastest setting with one process is {_called(best, groups)}: {rate}."
