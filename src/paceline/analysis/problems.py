"""Settings by what they train, and where: only those of one problem can be compared in speed and accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.lines import ENOUGH_RUNS, network
from paceline.analysis.scaling import Curve, Group, Point, machine_of, stands_for, telling, words
from paceline.analysis.wording import count, link, listing, sentence


@dataclass(frozen=True)
class Problem:
    """Its settings; its label says what tells it from the others, and is empty where there is one problem."""

    label: str
    groups: tuple[Group, ...]
    all_few: bool  # settings of all problems have few runs: that is said once, for all

    def has(self, one: Group) -> bool:
        return any(one is each for each in self.groups)

    def say(self, text: str) -> str:
        """A sentence about it."""
        return f"{self.label}: {text}" if self.label else sentence(text)

    def few(self, *groups: Group) -> str:
        """A warning, where it rests on few runs and others do not."""
        runs = min(len(one.runs) for one in groups)
        if runs >= ENOUGH_RUNS or self.all_few:
            return ""
        return f" It rests on {count(runs, 'run')}{' of each setting' if len(groups) > 1 else ''}."

    def points(self, curves: Sequence[Curve]) -> list[tuple[Curve, Point]]:
        """What is known of its settings beside one worker, of more than one worker."""
        return [(c, p) for c in curves if self.has(c.baseline) for p in c.points if p.workers > 1]


def problems(groups: Sequence[Group]) -> list[Problem]:
    """In the order they come."""
    found: dict[tuple[str, ...], list[Group]] = {}
    for one in groups:
        found.setdefault(_key(one), []).append(one)
    shown = telling(found)
    all_few = all(len(one.runs) < ENOUGH_RUNS for one in groups)
    return [Problem(", ".join(key[i] for i in shown), tuple(members), all_few) for key, members in found.items()]


def _key(one: Group) -> tuple[str, ...]:
    """What settings must share so that one can be called the fastest; in words, for where it differs."""
    s, setting, said = one.first.summary, one.setting, words(one)
    smaller = f"gradients {s.shrink} times smaller" if s.shrink > 1 else "gradients of full size"
    if stands := stands_for(one):
        smaller = f"as with links of {link(stands)}"
    image = f"images of {setting['image_size']} pixels" if setting.get("image_size") else "images as they are"
    hidden = f"hidden layers of {listing([f'{each}' for each in setting.get('hidden') or []]) or 'the usual size'}"
    return (s.model, s.data, _compute(s.compute), network(one) or "outside a lab", smaller, image, hidden,
            setting.get("dtype", "float32"), f"augment {setting.get('augment', 'none')}", said["speed"], said["cpu"],
            *machine_of(one))  # fmt: skip


def _compute(given: str) -> str:
    """As people say it: real, or emulated like a device or with so many seconds a batch."""
    kind, _, device = given.partition(":")
    device += " s" if device.replace(".", "", 1).isdigit() else ""
    return f"emulated compute ({device})" if kind == "emulated" else "real compute"
