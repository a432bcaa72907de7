"""What the steps of a run wait for, in one verdict: a slow rank, input, communication, compute, cores, or stages.

Ranks are compared in the same steps: the time that a rank computes a sample, divided by the median of the other ranks.
Whatever slows all ranks down cancels out. The median of these ratios over steps has a 95 % interval that allows for
autocorrelation, and a rank is named only if the whole interval is above `THRESHOLD`, and if the others wait for it. The
same is done with means of a few consecutive steps: a rank that is slow in every third step holds the others up as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from paceline.analysis.breakdown import Parts, computed, mean, of_steps
from paceline.analysis.statistics import Interval, Series, median
from paceline.analysis.wording import number, percent, seconds, sentence, spread
from paceline.run.clocks import shifted
from paceline.run.folder import rank_file, rank_offsets, read_ranks, read_summary
from paceline.run.lines import read_sound_lines
from paceline.run.records import Step, Summary
from paceline.strategies.table import describe

# A rank is slow if it takes more than this many times as long as the others: the lower end of the interval.
THRESHOLD = 1.2
# By which part of a step the input of a rank, its other work, or its waiting for a core, has to exceed the others': the
# lower end.
DELAY = 0.1
# The others must wait longer by at least this part of the time that a rank computes longer. Otherwise a rank that waits
# for others in its forward, as in synchronised batch-norm, would look slow.
WAITED = 0.3
FEWEST = 20  # steps after the first ones, and means of consecutive steps
TOGETHER = 5  # steps in a mean, if there are enough of them
FIRST_STEPS, FIRST_PART = 3, 0.1  # are left out, as memory is allocated and connections are opened: whichever is more
LAST_BYTES, LAST_STEPS = 1 << 18, 500  # of each rank's file

MUCH = 0.2  # of a step: a larger part is what the run is bound by
SHOWN = 0.05  # of a step: smaller parts are not mentioned
WAITING = ("wait", "push", "send", "average")  # spans
WHAT = {"compute": "computing", "input": "waiting for input", "slowest": "waiting for the slowest worker",
        "bubble": "waiting for other stages", "communication": "communication",
        "optimizer": "updating the weights", "other": "other work", "core": "waiting for a core"}  # fmt: skip

# Kinds of judgements. Those about one rank:
SLOW_RANK, SLOW_INPUT, NO_CORE, UNEVEN_SHARES = "slow rank", "slow input", "rank without a core", "uneven shares"
OTHER_WORK, SLOW_UPDATE = "other work on one rank", "slow update"
# Those about all of them; the largest part of a step, besides computing, decides.
STAGES = "imbalanced stages"
BOUND = {"compute": "compute-bound", "input": "input-bound", "communication": "communication-bound",
         "core": "short of cores", "slowest": "uneven steps", "bubble": "waiting stages",
         "optimizer": "bound by the optimizer", "other": "bound by unmeasured work"}  # fmt: skip


@dataclass(frozen=True)
class Judgement:
    """The verdict on a run: `sentence` says it, `evidence` why, `advice` what to try next, all without a full stop.

    `rank` is the rank that slows the others down, if there is one; `ratio` is how many times as long it computes, or,
    of the other kinds about one rank, by which part of a step it is later than the others.
    """

    kind: str
    sentence: str
    evidence: str
    advice: str
    rank: int | None = None
    ratio: Interval | None = None

    @property
    def text(self) -> str:
        return f"{sentence(self.sentence)}: {self.evidence}. Try {self.advice}."


def judge_folder(folder: Path, summary: Summary | None = None) -> Judgement | None:
    """The verdict on the last few hundred steps of a run that is under way or has ended, from the files that are here.

    None if too few steps or ranks are recorded; damaged lines are left out. `summary` is read unless given.
    """
    summary = summary or read_summary(folder)
    if summary is None or summary.workers < 2:
        return None
    steps, offsets = {}, rank_offsets(folder)
    for rank in range(summary.servers, summary.ranks):
        made = {step.step: step for step in read_sound_lines(rank_file(folder, rank), Step, last=LAST_BYTES)}
        steps[rank] = [shifted(made[at], offsets.get(rank, 0.0)) for at in sorted(made)][-LAST_STEPS:]
    return judge(steps, {row.rank: row.host for row in read_ranks(folder)}, summary)


def judge(steps: Mapping[int, Sequence[Step]], hosts: Mapping[int, str], summary: Summary) -> Judgement | None:
    """The verdict on these steps of each rank; None if too few steps or ranks are recorded."""
    found = _tables(steps, hosts, summary)
    if found is None:
        return None
    about_one = [*_computing(found), *_late(found)]
    if about_one:
        return max(about_one, key=lambda each: each[0])[1]
    return _stages(found) or _bound(found)


@dataclass(frozen=True)
class Tables:
    """Seconds of steps, a row for each rank and a column for each step; NaN where a step is missing."""

    summary: Summary
    hosts: Mapping[int, str]
    ranks: tuple[int, ...]
    compute: Series  # on a core
    core: Series  # ready to compute, without a core
    input: Series
    optimizer: Series
    waiting: Series  # for others, and communicating
    whole: Series
    own: Series  # samples
    parts: dict[int, Parts]

    def name(self, rank: int) -> str:
        several = len(set(self.hosts.values())) > 1
        return f"rank {rank} on {self.hosts[rank]}" if several and rank in self.hosts else f"rank {rank}"

    def others(self, rank: int) -> str:
        """What a rank is compared with."""
        alike = [self.ranks[row] for rows in self.peers() for row in rows if rank in {self.ranks[i] for i in rows}]
        rest = [each for each in alike if each != rank]
        return f"rank {rest[0]}" if len(rest) == 1 else "the median of the other ranks"

    def peers(self) -> list[list[int]]:
        """Rows of ranks that do the same work: all of them, or those with the same stage."""
        by_stage: dict[int, list[int]] = {}
        for row, rank in enumerate(self.ranks):
            by_stage.setdefault(self.summary.grid.spot(rank - self.summary.servers).stage, []).append(row)
        return list(by_stage.values())


def _tables(steps: Mapping[int, Sequence[Step]], hosts: Mapping[int, str], summary: Summary) -> Tables | None:
    """Steps are paired by number; those of workers that do not wait for each other, by their place from the end."""
    workers = {rank: list(made) for rank, made in sorted(steps.items()) if rank >= summary.servers and made}
    if len(workers) < 2:
        return None
    apart = describe(summary.strategy).asynchronous
    least = min(map(len, workers.values()))
    rows = [dict(enumerate(made[-least:])) if apart else {step.step: step for step in made}
            for made in workers.values()]  # fmt: skip
    paired = [at for at in sorted(set[int]().union(*rows)) if sum(at in row for row in rows) > 1]
    skip = max(FIRST_STEPS, int(FIRST_PART * len(paired)))
    most = max((row[at].samples for row in rows for at in paired if at in row), default=0)
    # Fewer samples, as at the end of an epoch, take another time each.
    kept = [at for at in paired[skip:] if any(at in row and 2 * row[at].samples >= most for row in rows)]
    if len(kept) < FEWEST:
        return None
    cells = np.full((7, len(rows), len(kept)), np.nan)
    for i, row in enumerate(rows):
        for j, at in enumerate(kept):
            if step := row.get(at):
                own = step.samples if step.own is None else step.own
                spans = [step.spans.get(name, 0.0) for name in ("input", "optimizer")]
                waited = sum(step.spans.get(name, 0.0) for name in WAITING)
                cells[:, i, j] = *computed(step), *spans, waited, step.seconds, own or np.nan
    compute, core, inputs, optimizer, waiting, whole, own_samples = cells
    if summary.emulated:  # it sleeps: waiting for a core does not make it longer
        compute, core = compute + core, 0 * core
    parts = of_steps(
        {rank: [row[at] for at in kept if at in row] for rank, row in zip(workers, rows, strict=True)}, summary, 0
    )
    return Tables(summary, hosts, tuple(workers), compute, core, inputs, optimizer, waiting, whole, own_samples, parts)


def _means(cells: Series) -> Series:
    """Means of consecutive columns: of TOGETHER each, or of fewer to have enough means."""
    count = cells.shape[-1]
    means = max(min(count, FEWEST), count // TOGETHER)
    starts, known = np.arange(means) * count // means, np.isfinite(cells)
    sums, counts = (np.add.reduceat(each, starts, axis=-1) for each in (np.where(known, cells, 0.0), known.astype(int)))
    found: Series = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return found


def others(table: Series) -> Series:
    """For each rank, the median of the other ranks in the same column; NaN where there is none."""
    ordered = np.sort(table, axis=0)  # NaN last
    place = np.argsort(np.argsort(table, axis=0), axis=0)
    left = (~np.isnan(table)).sum(0) - 1
    ends = []
    for middle in ((left - 1) // 2, left // 2):
        at = np.clip(middle + (middle >= place), 0, len(table) - 1)
        ends.append(np.take_along_axis(ordered, at, axis=0))
    found: Series = np.where((left < 1) | np.isnan(table), np.nan, (ends[0] + ends[1]) / 2)
    return found


def _over(table: Series) -> Series:
    """How many times as long each rank took as the others."""
    with np.errstate(divide="ignore", invalid="ignore"):  # a step in which nothing was computed
        found: Series = table / others(table)
    return found


def _median(series: Series) -> float:
    known = series[np.isfinite(series)]
    return float(np.median(known)) if len(known) else 0.0


def _interval(series: Series, above: float) -> Interval | None:
    """The median of a series with its interval, if all of it is above a bound and it is long enough."""
    known = series[np.isfinite(series) & (series > 0)]
    if len(known) < FEWEST or np.median(known) <= above:
        return None
    found = median([known])
    return found if found.low > above else None


def _computing(t: Tables) -> Iterator[tuple[float, Judgement]]:
    """Ranks that compute slower than those with the same work, or have more samples, by how much they delay a step.

    Shards wait for each other within forward and backward, so their times say nothing about one of them.
    """
    if t.summary.grid.shards > 1:
        return
    for rows in t.peers():
        for steps in (np.asarray, _means):
            compute, own, whole = (steps(table[rows]) for table in (t.compute, t.own, t.whole))
            slower, longer, delays = _over(compute / own), _over(compute), (compute - others(compute)) / whole
            for i, row in enumerate(rows):
                rank, delay = t.ranks[row], _median(delays[i])
                if delay < SHOWN or not _is_waited_for(t, t.compute, rows, i):
                    continue
                if ratio := _interval(slower[i], THRESHOLD):
                    yield delay, _slow_rank(t, rank, ratio)
                elif ratio := _interval(longer[i], THRESHOLD):
                    yield delay, _uneven(t, rank, ratio, _median(_over(own)[i]))


def _is_waited_for(t: Tables, busy: Series, rows: list[int], i: int) -> bool:
    """Whether the others wait for this one of the rows: they wait longer than it, as it is busy for longer."""
    if describe(t.summary.strategy).asynchronous:
        return True
    # For cores, too: where ranks share them, one that is stopped leaves them to the others, which wait for less.
    apart = (table[rows] - others(table[rows]) for table in (busy, t.waiting + t.core))
    longer, waited = (float(np.nansum(each[i])) for each in apart)
    return -waited >= WAITED * longer


def _slow_rank(t: Tables, rank: int, ratio: Interval) -> Judgement:
    said = f"{t.name(rank)} computes {number(ratio.value)} times slower than {t.others(rank)}"
    if len(set(t.hosts.values())) > 1:
        where = t.hosts.get(rank, "its machine")
        advice = f"the same run without {where}, and look there for other programs and a lower clock"
    else:
        advice = "other cores for this rank, and look for other programs on its cores"
    return Judgement(SLOW_RANK, said, f"{_spread(ratio)}{_waiting(t, rank)}", advice, rank, ratio)


def _spread(ratio: Interval) -> str:
    return f"95 % interval {spread(ratio)}"


def _waiting(t: Tables, rank: int) -> str:
    """The rank that the others wait for is the one that waits least."""
    waits = {each: (p.slowest + p.communication + p.bubble) / max(p.total, 1e-12) for each, p in t.parts.items()}
    if describe(t.summary.strategy).asynchronous or rank not in waits:
        return ""
    rest = float(np.median([share for each, share in waits.items() if each != rank]))
    return f"; the others wait and communicate for {percent(rest)} of a step, and it for {percent(waits[rank])}"


def _uneven(t: Tables, rank: int, ratio: Interval, samples: float) -> Judgement:
    said = f"{t.name(rank)} computes {number(ratio.value)} times longer than {t.others(rank)}, but has more samples"
    evidence = f"{number(samples)} times as many{_waiting(t, rank)}"
    return Judgement(UNEVEN_SHARES, said, evidence, "equal parts of each batch for all ranks", rank, ratio)


def _late(t: Tables) -> Iterator[tuple[float, Judgement]]:
    """Ranks that do something else than computing for longer than the others, by how much they delay a step."""
    other = t.whole - t.compute - t.core - t.input - t.optimizer - t.waiting
    kinds: list[tuple[str, Series, str, str]] = [
        (SLOW_INPUT, t.input, "waits for its input", "faster storage or more loader processes for this rank"),
        (SLOW_UPDATE, t.optimizer, "updates its weights", "the same optimizer on all ranks, and no other programs"),
        (OTHER_WORK, other, "does other work", "to do less of it in the loop: printing, logging, saving, evaluating"),
    ]
    if len(set(t.hosts.values())) > 1:  # ranks of one machine take turns: who waits longest is chance
        kinds.append((NO_CORE, t.core, "waits for a core", "fewer programs and ranks on its machine"))
    for kind, table, words, advice in kinds:
        delay = _means((table - others(table)) / t.whole)  # input arrives in bursts
        for row, rank in enumerate(t.ranks):
            late = _interval(1 + np.maximum(-0.9, delay[row]), 1 + DELAY)
            # Other work may be waiting for another rank: at a barrier, or for a sum of the loop's own.
            waits = kind in (OTHER_WORK, SLOW_UPDATE) and not _is_waited_for(t, table, list(range(len(t.ranks))), row)
            if late is None or waits:
                continue
            mine, rest = (float(np.nanmean(each)) for each in (table[row], others(table)[row]))
            times = f"{number(mine / rest)} times as long as" if rest > 0.01 * mine else "much longer than"
            evidence = f"{seconds(mine)} of a step of {seconds(float(np.nanmean(t.whole[row])))}{_waiting(t, rank)}"
            by = Interval(late.value - 1, late.low - 1, late.high - 1)
            said = f"{t.name(rank)} {words} {times} {t.others(rank)}"
            yield by.value, Judgement(kind, said, evidence, advice, rank, by)


def _stages(t: Tables) -> Judgement | None:
    """The stage that computes longest, if the others wait for it."""
    peers = t.peers()
    if len(peers) < 2 or _mean(t).bubble < SHOWN * _mean(t).total:
        return None
    table = np.array([np.max(t.compute[rows], axis=0) for rows in peers])
    ratios = [_interval(row, THRESHOLD) for row in _over(table)]
    found = [(ratio.value, stage, ratio) for stage, ratio in enumerate(ratios) if ratio]
    if not found:
        return None
    _, stage, ratio = max(found)
    who = t.name(t.ranks[peers[stage][0]])
    longer = "the other stage" if len(peers) == 2 else "the median of the other stages"
    each = ", ".join(seconds(_median(row)) for row in table)
    idle = percent(_mean(t).bubble / _mean(t).total)
    return Judgement(
        STAGES,
        f"imbalanced stages: stage {stage} ({who}) computes {number(ratio.value)} times as long as {longer}",
        f"{_spread(ratio)}; the stages compute {each} in a step, and wait for each other for {idle} of it",
        "--cut measured (with --speed, if machines differ), or another number of --stages",
        ratio=ratio,
    )


def _mean(t: Tables) -> Parts:
    return mean(list(t.parts.values()))


def shares(parts: Parts) -> dict[str, float]:
    """Parts of a step."""
    return {part.name: getattr(parts, part.name) / max(parts.total, 1e-12) for part in fields(Parts)}


def largest_loss(share: Mapping[str, float]) -> str:
    """The largest part besides computing, if it takes much of a step; else computing."""
    most = max((key for key in share if key != "compute"), key=lambda key: share[key])
    return most if share[most] >= MUCH else "compute"


def time_of(parts: Parts) -> str:
    """How long a step takes, and its parts that are worth mentioning."""
    share = shares(parts)
    shown = sorted((key for key in share if key != "compute" and share[key] >= SHOWN), key=lambda key: -share[key])
    return ", ".join([f"{seconds(parts.total)}: {percent(share['compute'])} {WHAT['compute']}",
                      *(f"{percent(share[key])} {WHAT[key]}" for key in shown)])  # fmt: skip


def remedy(part: str, summary: Summary, machines: int) -> str:
    """What makes a part of a step shorter; "" if that is not known."""
    if part == "communication" and machines == 1:
        return "fewer workers or a larger batch"
    if part == "communication" and summary.servers:
        return "faster links, more servers or a larger batch"
    return {
        "input": "a faster input pipeline",
        "slowest": "speeding up the slowest worker",
        "bubble": "more micro-batches or better balanced stages",
        "communication": "faster links or a larger batch",
        "core": "one core per thread (fewer workers or threads, no other programs)",
    }.get(part, "")


def _bound(t: Tables) -> Judgement:
    """What most of a step is spent on, if no rank stands out."""
    share, evidence = shares(_mean(t)), f"a step takes {time_of(_mean(t))}"
    part = largest_loss(share)
    # A step needs these, unlike waiting: it is bound by one only if that takes about as long as computing.
    needed = part in ("communication", "optimizer", "other") and share[part] < share["compute"] / 2
    kind = BOUND["compute" if needed else part]
    # Ranks that never wait after backward, as with FSDP, wait for each other in it: nothing is known about one of them.
    known = t.summary.grid.shards == 1 and share["slowest"] + share["communication"] + share["bubble"] > 0.01
    if known and part != "other" and any(len(rows) > 1 for rows in t.peers()):
        evidence += f"; no rank is significantly more than {THRESHOLD} times slower than the others"
    other = {
        "compute": "more workers or faster processors",
        "slowest": "equal work for all ranks, and no other programs",
        "optimizer": "another optimizer, or a larger batch",
        "other": "to find out what the loop does besides training: logging, saving, evaluating",
    }
    advice = other.get(part) or remedy(part, t.summary, len(set(t.hosts.values())) or 1)
    return Judgement(kind, kind, evidence, advice)
