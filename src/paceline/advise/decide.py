"""Decides: is it worth distributing, which setting is best, and for which deadline and budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.advise import words
from paceline.advise.advice import MARGIN, SURE, Advice, BatchPoint, Choice, Learning, LinkPoint, Pricing
from paceline.advise.search import Candidate, Place, batches_of, search
from paceline.advise.steps_needed import StepsLaw, learning_rate
from paceline.analysis.wording import link
from paceline.errors import UsageError
from paceline.predict.cluster import alike
from paceline.predict.forecast import Predictor
from paceline.predict.limits import COMPUTE
from paceline.predict.ranges import Range
from paceline.predict.steps import Array
from paceline.strategies.table import TABLE, default

# Links that are tried, to see which would change the verdict, in bit/s.
RATES = (1e7, 5e7, 1e8, 2e8, 5e8, 1e9, 2e9, 5e9, 1e10, 2.5e10, 1e11)
STAGES = (2, 4, 8, 16, 32)  # of a model that does not fit on one machine


@dataclass(frozen=True)
class Training:
    """What is to be trained: its options, the batch of an update, and how many updates it makes with that."""

    model: str
    data: str
    options: Mapping[str, Any]
    batch: int
    steps: int | None
    samples: int | None  # of the training set
    lr: float
    optimizer: str


@dataclass(frozen=True)
class Question:
    """What is asked: the places that the verdict is about, the numbers of workers, and what is wanted.

    `own` is the machine of the runs, or the machines of their lab.
    """

    training: Training
    own: Place
    asked: Sequence[Place]
    strategies: Sequence[str]
    workers: Sequence[int]
    margin: float = MARGIN
    deadline: float | None = None
    budget: float | None = None
    pricing: Pricing | None = None
    probe_seconds: float = 0.0
    left_out: Sequence[str] = ()


@dataclass
class _Found:
    """Candidates beside the best single process; how they become choices."""

    question: Question
    predictor: Predictor
    law: StepsLaw | None
    alone: Candidate
    choices: dict[int, Choice] = field(default_factory=dict)

    def relative(self, each: Candidate) -> Array:
        return each.spent / self.alone.spent

    def faster(self, relative: Array) -> float:
        """The probability that it is faster than one process by the margin."""
        return float(np.mean(relative <= 1 / (1 + self.question.margin)))

    def choice(self, each: Candidate) -> Choice:
        if id(each) not in self.choices:
            self.choices[id(each)] = self._choice(each)
        return self.choices[id(each)]

    def _choice(self, each: Candidate) -> Choice:
        training, spec, relative = self.question.training, each.found.spec, self.relative(each)
        steps = None if training.steps is None else Range.of(training.steps * each.updates)
        seconds = None if training.steps is None else training.steps * each.spent
        limit, step = each.found.limit(), each.spent / each.updates
        lr = None
        if self.law and each.batch != training.batch:
            lr = learning_rate(training.optimizer, training.lr, training.batch, each.batch, self.law)
        place = each.place
        money = None if seconds is None else self._money(each, seconds)
        return Choice(
            place.name,
            spec.strategy or "",
            each.workers,
            place.machines(spec.ranks),
            each.batch,
            lr,
            each.basis,
            each.beyond,
            Range.of(step),
            steps,
            None if seconds is None else Range.of(seconds),
            Range.of(relative),
            self.faster(relative),
            money,
            each.memory,
            each.fits,
            limit.cause,
            limit.seconds,
            each.found.compute / min(each.found.cluster.nodes[node].speed for node in each.found.places),
            limit.without(COMPUTE) if spec.ranks > 1 else 0.0,
            self.predictor.bytes_sent(spec),
            words.command(training.options, each, lr, training.steps),
        )

    def _money(self, each: Candidate, seconds: Array) -> Range | None:
        """For the training, and for the runs that the advice rests on, on one machine."""
        price, one = each.place.price(each.found.spec.ranks), each.place.price(1)
        if price is None or one is None:
            return None
        return Range.of((seconds * price + self.question.probe_seconds * one) / 3600)


def advise(question: Question, predictor: Predictor, law: StepsLaw | None, learning: Learning) -> Advice:
    """Raises UsageError if the model fits on no machine, or nothing meets the deadline or the budget."""
    training, left_out = question.training, list(question.left_out)
    places = list(dict.fromkeys([*question.asked, question.own]))
    batches = batches_of(training.batch, training.samples)
    everything = search(predictor, places, question.strategies, question.workers, batches, law, left_out)
    asked = [each for each in everything if each.place in question.asked]
    if not any(each.fits for each in asked):
        parts = [name for name in question.strategies if TABLE[name].part]
        more = search(predictor, list(question.asked), parts, STAGES, batches, law, left_out)
        more = [each for each in more if each.key not in {found.key for found in asked}]
        asked, everything = asked + more, everything + more
    singles = [each for each in asked if each.workers == 1]
    if not singles:
        why = next((reason for reason in left_out if reason.startswith(default(1).name)), "no run has one worker")
        raise UsageError(f"no verdict, because nothing is known of one process: {why}")
    alone = min([each for each in singles if each.fits] or singles, key=_at_most)
    found = _Found(question, predictor, law, alone)
    fitting = sorted((each for each in asked if each.fits), key=_at_most)
    if not fitting:
        raise UsageError(words.fits_nowhere([found.choice(each) for each in asked]))
    several = [each for each in fitting if each.workers > 1]
    best = next((each for each in several if each.sure), None) if alone.fits else fitting[0]
    untried = next((each for each in several if not each.sure and found.faster(found.relative(each)) >= SURE), None)
    distribute = not alone.fits or (best is not None and found.faster(found.relative(best)) >= SURE)
    own = [each for each in everything if each.place == question.own and each.fits and each.sure]
    near = _Found(question, predictor, law, min([each for each in own if each.workers == 1] or [alone], key=_at_most))
    here = min(own, key=_at_most) if own else None
    if here is not None and here.workers > 1 and near.faster(near.relative(here)) < SURE:
        here = near.alone
    choices = tuple(found.choice(each) for each in sorted(everything, key=lambda each: each.typical))
    fit = [each for each in choices if each.fits and each.where in {place.name for place in question.asked}]
    advice = Advice(
        training.model,
        training.data,
        words.command(training.options, None, None, training.steps),
        predictor.probes[0].spec.compute if predictor.fit.emulated and not predictor.fit.device else "",
        " or ".join(place.name for place in question.asked),
        question.margin,
        distribute,
        "",
        (),
        found.choice(alone) if alone.fits else None,
        found.choice(best) if best else None,
        near.choice(here) if here else None,
        choices,
        _front(fit),
        _for_deadline(fit, question.deadline) if question.deadline else None,
        _for_budget(fit, question.budget, question.pricing) if question.budget is not None else None,
        question.deadline,
        question.budget,
        tuple(_links(found, batches[0])),
        _with_batches(learning, law, batches),
        question.pricing,
        question.probe_seconds,
        len(predictor.probes),
        tuple(dict.fromkeys(left_out)),
        found.choice(untried) if untried and not distribute else None,
    )
    return words.said(advice, found.choice(alone))


def _at_most(each: Candidate) -> float:
    return each.at_most


def _links(found: _Found, batch: int) -> list[LinkPoint]:
    """The best setting for each number of machines, over links of many speeds."""
    question, fit = found.question, found.predictor.fit
    speed = found.alone.found.cluster.nodes[0].speed
    averaging = [name for name in question.strategies if TABLE[name].averaging]
    names = [name for name in averaging if TABLE[name].averaging in fit.costs] or averaging[:1]
    most = max(question.workers)
    points = []
    for rate in RATES:
        place = Place(link(rate), alike(most + 1, rate, speed), most + 1)
        tried = search(found.predictor, [place], names, question.workers, [batch], None, [])
        alone = next(each for each in tried if each.workers == 1)
        for workers in sorted({each.workers for each in tried if each.workers > 1 and each.sure}):
            best = min((each for each in tried if each.workers == workers), key=_at_most)
            relative = best.spent / alone.spent
            name = best.found.spec.strategy or ""
            points.append(LinkPoint(rate, workers, name, Range.of(relative), found.faster(relative)))
    return points


def _with_batches(learning: Learning, law: StepsLaw | None, batches: Sequence[int]) -> Learning:
    if law is None:
        return learning
    points = tuple(BatchPoint(batch, Range.of(law.ratio(batch, batches[0]))) for batch in batches)
    return Learning(learning.unknown, learning.critical, learning.noise_scale, points)


def _front(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Those of which no other is both faster and cheaper."""
    found: list[Choice] = []
    for each in choices:  # the fastest first
        if each.money and (not found or each.money.value < (found[-1].money or each.money).value):
            found.append(each)
    return tuple(found)


def _for_deadline(choices: Sequence[Choice], deadline: float) -> Choice:
    """The cheapest, or that with the fewest machines, of those that end in time with enough probability."""
    known = [each for each in choices if each.seconds]
    if not known:
        raise UsageError("--deadline: the length of the training is not known: give its --epochs or --steps")
    good = [each for each in known if each.seconds and each.seconds.high <= deadline]
    if not good:
        raise UsageError(words.too_late(known[0], deadline))
    return min(good, key=lambda each: (each.money.value if each.money else 0.0, each.machines, each.relative.value))


def _for_budget(choices: Sequence[Choice], budget: float, pricing: Pricing | None) -> Choice:
    """The fastest that costs no more with enough probability."""
    known = [each for each in choices if each.money]
    if not known or pricing is None:
        raise UsageError("--budget: the length of the training is not known: give its --epochs or --steps")
    good = [each for each in known if each.money and each.money.high <= budget]
    if not good:
        cheapest = min(known, key=lambda each: each.money.value if each.money else 0.0)
        raise UsageError(words.too_dear(cheapest, budget, pricing.currency))
    return min(good, key=lambda each: each.relative.value)
