"""The advice in words: the verdict in one sentence, the reasons, the command to run, and what cannot be done."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.advise.advice import EXTRAPOLATED, MEASURED, OWN_MACHINE, SURE, Advice, Choice, LinkPoint
from paceline.analysis.wording import count, link, number, percent, seconds, size
from paceline.predict.limits import MEANING
from paceline.predict.ranges import Range
from paceline.spec import OWN

if TYPE_CHECKING:
    from paceline.advise.search import Candidate

MOST_OF_FRONT = 5  # settings in a sentence
MOST_PROBES = 0.05  # of the time of the training
# Options that the advice decides about, and those that say where a run is.
DECIDED = ("strategy", "workers", "batch_size", "global_batch", "scale_lr", "name", "output_dir")


def command(options: Mapping[str, Any], chosen: Candidate | None, lr: float | None, steps: int | None) -> str:
    """What runs a setting; without one, the training as it was given. `lr` is another learning rate, for another batch,
    which needs another number of updates as well.
    """
    if chosen is None:
        return shlex.join(["paceline", "train", *(word for each in options.items() for word in _flag(*each))])
    spec, own, words = chosen.found.spec, chosen.place.cluster is None, list[str]()
    left_out = {*DECIDED, *(OWN.keys() - set(spec.method.names)), *(() if lr is None else ("lr", "steps", "epochs"))}
    for name, value in options.items():
        words += [] if name in left_out else _flag(name, value)
    words += _flag("strategy", spec.strategy)
    words += _flag("workers", spec.workers) if spec.ranks > 1 and own else []
    words += _flag("global_batch", chosen.batch)
    if lr is not None:
        words += _flag("lr", float(f"{lr:.3g}"))
        words += _flag("steps", max(1, round(steps * float(chosen.updates[0])))) if steps else []
    launcher = [] if own or spec.ranks == 1 else ["srun", "-n", str(spec.ranks)]
    return shlex.join([*launcher, "paceline", "train", *words])


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)]


def within(value: Range, form: Any = number) -> str:
    """1.31 (1.12–1.58)"""
    return f"{form(value.value)} ({form(value.low)}–{form(value.high)})"


def said(advice: Advice, alone: Choice) -> Advice:
    """With the verdict in words. `alone` is the single process, whether it fits or not."""
    return replace(advice, sentence=_verdict(advice, alone), reasons=tuple(filter(None, _reasons(advice))))


def setting(each: Choice) -> str:
    """2 machines over 1 Gbit/s links with ring"""
    if each.workers == 1:
        return "one process" if each.where == OWN_MACHINE else f"one of the {each.where}"
    servers = each.machines - each.workers
    besides = f" and {count(servers, 'server')}" if servers > 0 else ""
    return f"{each.workers:,} {each.where} with {each.strategy}{besides}"


def _verdict(advice: Advice, alone: Choice) -> str:
    best = advice.best
    if advice.alone is None:
        assert best is not None
        return (
            f"Distribute, because the model does not fit on one machine (it needs {within(alone.memory, size)} of "
            f"memory): {setting(best)} is the fastest setting that fits."
        )
    if best is None:
        return "Do not distribute: no setting with several workers fits in memory, or could be measured or predicted."
    start = "Distribute" if advice.distribute else "Do not distribute"
    took = "take" if best.basis == MEASURED else "would take"
    longer = "times as long as" if best.relative.value >= 1 else "of the time of"
    one = "one" if best.machines > 1 and alone.where == best.where else setting(alone)
    basis = best.basis.upper() if best.basis == EXTRAPOLATED else best.basis
    return f"{start}: {setting(best)} {took} {within(best.relative)} {longer} {one} ({basis}); {_cost(best)}."


def _cost(best: Choice) -> str:
    """Where the time of a step goes."""
    if best.communication_seconds < 0.02 * best.step_seconds.value:
        return f"a step takes {seconds(best.step_seconds.value)}, and communication is not what limits it"
    return (
        f"sending {size(best.bytes_sent)} takes {seconds(best.communication_seconds)} per step, computing "
        f"{seconds(best.compute_seconds)}"
    )


def _reasons(advice: Advice) -> list[str]:
    best = advice.best
    found = []
    if best and advice.alone:
        found.append(
            f"Probability that it is at least {percent(advice.margin)} faster than one process: {_probability(best)} "
            f"({'at least' if advice.distribute else 'less than'} the {percent(SURE)} required)."
        )
        found.append(
            f"What limits it: {MEANING.get(best.limit, best.limit)}; without that, a step would take "
            f"{seconds(max(0.0, best.step_seconds.value - best.limit_seconds))} instead of "
            f"{seconds(best.step_seconds.value)}."
        )
        if best.beyond:
            found.append(f"Beyond what was measured: {'; '.join(best.beyond)}.")
    found += [_untried(advice), _changes(advice)]
    found.append(_length(advice))
    found.append(_learning(advice))
    found += [_memory(advice), _here(advice)]
    if best and advice.distribute and not (advice.here and advice.here.command == best.command):
        found.append(f"To distribute: `{best.command}`")
    for what, chosen in (("the deadline", advice.for_deadline), ("the budget", advice.for_budget)):
        if chosen:
            found.append(f"Best for {what}: {setting(chosen)}, {_taking(chosen, advice)}: `{chosen.command}`")
    return [*found, _front(advice), _prices(advice), _probes(advice)]


def _untried(advice: Advice) -> str:
    each = advice.untried
    if each is None:
        return ""
    return (
        f"{setting(each)} might be worth it: {within(each.relative)} of the time of one process ({each.basis}). But no "
        f"run had {each.strategy}, and no verdict rests on such a prediction: try it, or ask again with "
        f"`--strategy {each.strategy}` after `-- train`."
    )


def _probability(each: Choice) -> str:
    return "over 99 %" if each.faster > 0.99 else "under 1 %" if each.faster < 0.01 else percent(each.faster)


def _changes(advice: Advice) -> str:
    """Which links would change the verdict, or keep it."""
    if not advice.links:
        return ""
    worth = [point for point in advice.links if point.faster >= SURE]
    start = "On separate machines" if advice.distribute else "What would change it: with a machine for each worker,"
    if not worth:
        fastest, most = max(point.rate for point in advice.links), max(point.workers for point in advice.links)
        best = min((point for point in advice.links if point.rate == fastest), key=lambda point: point.relative.value)
        return (
            f"On up to {most} separate machines it would not be worth it with any link up to {link(fastest)}: at best "
            f"{within(best.relative)} times as long as one (predicted)."
        )
    first = min(worth, key=lambda point: (point.rate, point.relative.value))
    more = [point for point in worth if point.workers > first.workers]
    then = f", {_from(min(more, key=lambda point: (point.rate, -point.workers)))}" if more else ""
    return f"{start} it is worth it {_from(first)}{then} (predicted for links that were not measured)."


def _from(point: LinkPoint) -> str:
    return (
        f"from {link(point.rate)} on with {count(point.workers, 'machine')} ({within(point.relative)} of the time "
        "of one)"
    )


def _length(advice: Advice) -> str:
    alone = advice.alone or advice.best
    if alone is None or alone.seconds is None:
        return ""
    if advice.alone is None:
        return f"The whole training takes {_time(alone)} with {setting(alone)}."
    other = advice.best if advice.distribute and advice.best else None
    then = f", and {_time(other)} with {setting(other)}" if other else ""
    return f"The whole training takes {_time(alone)} with one process{then}."


def _time(each: Choice) -> str:
    return within(each.seconds, seconds) if each.seconds else "an unknown time"


def _learning(advice: Advice) -> str:
    known = advice.learning
    if known.unknown:
        batch = advice.choices[0].batch if advice.choices else 0
        return (
            f"All settings have the same global batch of {batch:,}, so that all train the same model. How many updates "
            f"other batches need is unknown: {known.unknown}."
        )
    if known.critical is None:
        return ""
    return (
        f"Beyond a global batch of about {within(known.critical)} (the critical batch), larger ones save few updates."
    )


def _memory(advice: Advice) -> str:
    best = advice.best or advice.alone
    if best is None:
        return ""
    return f"Memory: {within(best.memory, size)} in the process that needs most."


def _here(advice: Advice) -> str:
    here = advice.here
    if here is None:
        return ""
    how = "measured" if here.basis == MEASURED else "predicted"
    return (
        f"Best here and now: {setting(here)}, a step of {within(here.step_seconds, seconds)} ({how}): `{here.command}`"
    )


def _taking(each: Choice, advice: Advice) -> str:
    money = f", {within(each.money)} {advice.pricing.currency}" if each.money and advice.pricing else ""
    return f"{_time(each)}{money}"


def _front(advice: Advice) -> str:
    if len(advice.front) < 2:
        return ""
    each = [f"{setting(choice)}: {_taking(choice, advice)}" for choice in advice.front[:MOST_OF_FRONT]]
    more = f"; and {len(advice.front) - MOST_OF_FRONT} cheaper ones" if len(advice.front) > MOST_OF_FRONT else ""
    return f"No setting is both faster and cheaper than these: {'; '.join(each)}{more}."


def _prices(advice: Advice) -> str:
    known = advice.pricing
    if known is None:
        return ""
    mark = "EXAMPLE prices, not offers: " if known.example else ""
    return f"Prices: {mark}{known.source}, of {known.dated}."


def _probes(advice: Advice) -> str:
    if not advice.probe_seconds:
        return ""
    took = f"The {count(advice.runs, 'run')} behind this advice took {seconds(advice.probe_seconds)}"
    whole = advice.alone or advice.best
    if whole is None or whole.seconds is None:
        return f"{took}."
    part = advice.probe_seconds / whole.seconds.value
    more = f", more than {percent(MOST_PROBES)}: so short a training can simply be run" if part > MOST_PROBES else ""
    return f"{took}, {number(100 * part)} % of the time of the training{more}."


def fits_nowhere(choices: Sequence[Choice]) -> str:
    least = min(choices, key=lambda each: each.memory.high)
    return (
        f"the model fits on no machine: even {setting(least)} needs {within(least.memory, size)} of memory in one "
        "process; give machines with more memory, more of them, or a smaller --batch-size"
    )


def too_late(fastest: Choice, deadline: float) -> str:
    return (
        f"--deadline: nothing ends within {seconds(deadline)}: the fastest setting, {setting(fastest)}, takes "
        f"{_time(fastest)}; give a later deadline, more or faster machines, or a shorter training"
    )


def too_dear(cheapest: Choice, budget: float, currency: str) -> str:
    assert cheapest.money is not None
    return (
        f"--budget: nothing costs at most {number(budget)} {currency}: the cheapest setting, {setting(cheapest)}, "
        f"costs {within(cheapest.money)} {currency}; give a larger budget, cheaper machines, or a shorter training"
    )
