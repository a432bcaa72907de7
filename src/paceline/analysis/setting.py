"""A setting: what was run, fact by fact; how two of them differ; and what one is called among others.

What an option means for a comparison and how it is said is declared where the option is (`paceline.options`); here is
what is known beside the options: the machine, and the nodes and links of a lab.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.analysis.wording import count, link, listing
from paceline.options import DIVISION, LENGTH, NOTHING, PROBLEM, in_words
from paceline.run.records import CLASSIFICATION
from paceline.spec import FIELDS, OWN
from paceline.strategies.table import describe

if TYPE_CHECKING:
    from paceline.analysis.runs import Run

# What facts affect that are no options: the network between the nodes of a lab, the machine and its software.
NETWORK, MACHINE = "network", "machine"
# Of a run's environment, what can make a difference in speed, and how it is said.
MACHINE_FACTS = {"processor": "{}", "cores": "", "gpus": "{}", "torch": "torch {}", "python": "Python {}",
                 "platform": "{}"}  # fmt: skip
# Options that a run's summary has with the value that was used, whether it was given or chosen.
USED = ("model", "data", "strategy", "workers", "batch_size", "transport", "compute", "shrink", "servers")
# What follows from the number of workers, and may differ between settings that differ in that alone.
BY_WORKERS = ("workers", "replicas", "nodes", "lab", "batch_size", "global_batch", "threads")
# What differs between settings that differ in their batch size alone.
BY_BATCH = ("batch_size", "global_batch", "threads")
# The facts that come first in a name; the strategy's own options follow, then the rest.
FIRST = ("model", "data", "strategy", "workers", "servers", "stages", "tensor")
THEN = ("batch_size", "global_batch", "compute", "links_as_of", "nodes", "links", "threads", "transport", "read")
# Said only where nothing else tells two settings apart: the number of workers has it in it.
IN_WORKERS = ("stages", "tensor", "replicas")
ALWAYS = ("strategy", "workers")
USUAL_MTU = 1500


@dataclass(frozen=True)
class Fact:
    """A value to compare by, the same in words (empty: nothing to say), and what it affects.

    One that is `minor` is part of a name only where nothing else tells two settings apart.
    """

    value: Any
    text: str
    affects: str
    minor: bool = False


@dataclass(frozen=True)
class Setting:
    """Facts by their names, in the order in which they are said."""

    facts: Mapping[str, Fact]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a fact."""
        return self.facts[name].value if name in self.facts else default

    def text(self, name: str) -> str:
        return self.facts[name].text if name in self.facts else ""

    def plain(self, name: str) -> Any:
        """An option's value; of what is no option, the words."""
        return self.get(name) if name in FIELDS else self.text(name) or None

    def key(self, affects: Collection[str] = (), *, names: Collection[str] = (), without: Collection[str] = ()) -> str:
        """To compare by: the facts that affect these, or all; also those with these names, and never those without.

        A strategy's own option that affects the problem counts where it is not at its default: others lack it.
        """
        return repr(sorted(
            (name, fact.value) for name, fact in self.facts.items()
            if name not in without and (name in names or not (affects or names) or fact.affects in affects)
            and not (name in OWN and fact.affects == PROBLEM and fact.value == FIELDS[name].default)
        ))  # fmt: skip

    def own_options(self) -> dict[str, Any]:
        """The options of its strategy that are not at their defaults."""
        return {name: fact.value for name, fact in self.facts.items()
                if name in OWN and fact.value != FIELDS[name].default}  # fmt: skip

    def difference(self, other: Setting) -> list[str]:
        """The names of the facts that are not the same."""
        names = dict.fromkeys([*self.facts, *other.facts])
        return [name for name in names if self.get(name) != other.get(name)]

    def only(self, *affects: str) -> Setting:
        return Setting({name: fact for name, fact in self.facts.items() if fact.affects in affects})

    def saying(self, name: str, text: str) -> Setting:
        """The same with other words for a fact."""
        fact = self.facts.get(name) or Fact(text, text, DIVISION)
        return Setting(_ordered({**self.facts, name: replace(fact, value=text, text=text)}))

    def words(self, names: Iterable[str]) -> str:
        """These facts in words."""
        chosen = set(names)
        return ", ".join(dict.fromkeys(fact.text for name, fact in self.facts.items() if name in chosen and fact.text))

    def given(self) -> str:
        """In words, what is not as it is by default; and what every name can have."""
        named, usual = (*FIRST, "batch_size", "compute"), {"task": CLASSIFICATION}
        return self.words(
            name for name, fact in self.facts.items() if fact.affects != MACHINE and fact.value != usual.get(name)
            and (name not in FIELDS or name in named or fact.value != FIELDS[name].default)
        )  # fmt: skip

    def label(
        self, among: Iterable[Setting], *, always: Collection[str] = ALWAYS, without: Collection[str] = ()
    ) -> str:
        """What it is called among others: what is `always` said, and what it differs in from those that it is compared
        with. Nothing is said of facts `without` which it is named, and only settings with the same ones are told apart.
        """
        others = [each for each in among if each is not self and all(each.text(n) == self.text(n) for n in without)]
        mine = {name: fact for name, fact in self.facts.items() if name not in without and fact.text}
        shown = {name for name in mine if name in always or any(self._is_news(name, each) for each in others)}
        rivals = [each for each in others if all(each.text(name) == self.text(name) for name in shown)]
        for name, fact in mine.items():
            if any(each.text(name) != fact.text for each in rivals):
                shown.add(name)
                rivals = [each for each in rivals if each.text(name) == fact.text]
        return self.words(shown)

    def _is_news(self, name: str, other: Setting) -> bool:
        """Whether it differs in a fact, and that does not follow from another: from the model and data set, or from
        the strategy.
        """
        mine, theirs = self.facts[name], other.facts.get(name)
        if theirs is None or mine.minor or theirs.minor or mine.text == theirs.text:
            return False
        within: tuple[str, ...] = ("strategy",) if mine.affects == DIVISION else ("model", "data")
        if name in ("model", "data", "batch_size", "global_batch"):
            within = ()
        elif name == "nodes":
            within = ("model", "data", "compute", "strategy", "workers", "servers")
        return all(self.text(each) == other.text(each) for each in within)


def shared(many: Sequence[Setting]) -> Setting:
    """What all of these have."""
    first, *others = many
    return Setting({
        name: replace(fact, minor=all(each.facts[name].minor for each in many))
        for name, fact in first.facts.items()
        if all(name in each.facts and each.text(name) == fact.text for each in others)
        and all(each.get(name) == fact.value for each in others)
    })  # fmt: skip


def distinguishing(
    many: Sequence[Setting],
    without: Collection[str] = (),
    only: Collection[str] | None = None,
    known: Iterable[str] = (),
) -> list[str]:
    """As few names of facts as tell all of these apart that can be told apart; `known` are chosen already. `only` has
    the names that are allowed, or what the facts have to affect.
    """
    found = _ordered({name: fact for each in many for name, fact in each.facts.items()})
    chosen = list(known)
    for name, fact in found.items():
        allowed = name not in without and (only is None or name in only or fact.affects in only)
        if allowed and kinds(many, [*chosen, name]) > kinds(many, chosen):
            chosen.append(name)
    return sorted(chosen, key=list(found).index)


def kinds(many: Iterable[Setting], names: Sequence[str]) -> int:
    """How many of these differ in what these facts say."""
    return len({tuple(each.text(name) for name in names) for each in many})


def in_words_of(name: str, value: Any) -> str:
    """A fact with a value, as a name has it."""
    return count(value, "node") if name == "nodes" else in_words(name, value, FIELDS.get(name))


def nodes_of(run: Run) -> int:
    """How many machines, of the lab or real."""
    return max(1, len({row["host"] for row in run.environment.get("ranks", [])}))


def setting_of(run: Run) -> Setting:
    """All that makes a run what it is, and nothing that repeats of it may differ in."""
    method, summary = run.method, run.summary
    has = [name for name in FIELDS if name not in OWN or name in method.names]
    given = {name: FIELDS[name].default for name in has}
    given |= {name: value for name, value in run.spec.items() if name in has or not method.installed}
    given |= {name: getattr(summary, name) for name in USED if name in has} | {"task": summary.task}
    if given.get("microbatches") == 1:  # the whole batch
        given["microbatches"] = None
    if given["device"] == "auto":
        given["device"] = "cuda" if run.environment.get("gpus") else "cpu"
    return setting_from(given, run.environment, nodes_of(run), run.replicas)


def setting_from(
    options: Mapping[str, Any], environment: Mapping[str, Any] | None = None, nodes: int = 1, replicas: int = 1
) -> Setting:
    """A setting from the values of its options, the machine and lab that it is on, and how many nodes and replicas."""
    method, facts = describe(options["strategy"]), dict[str, Fact]()
    for name in [*(name for name in FIELDS if name in options), *sorted(options.keys() - FIELDS.keys())]:
        value, affects = options[name], FIELDS[name].metadata["affects"] if name in FIELDS else DIVISION
        if affects != NOTHING:
            facts[name] = Fact(value, in_words_of(name, value), affects, affects == LENGTH or name in IN_WORKERS)
    task = options.get("task") or CLASSIFICATION
    facts["task"] = Fact(task, task, PROBLEM)
    if method.part:
        parts, each = options["workers"] // replicas, count(replicas, "replica")
        whole = count(parts, method.part) if replicas == 1 else f"{each} × {count(parts, method.part)}"
        facts["workers"] = replace(facts["workers"], text=whole)
        facts["replicas"] = Fact(replicas, each, DIVISION, minor=True)
    facts["nodes"] = Fact(nodes, in_words_of("nodes", nodes), DIVISION)
    environment = environment or {}
    facts |= _lab(environment.get("lab") or {}, options, alone=method.servers(options) + options["workers"] == 1)
    if "links_as_of" in facts:  # they say it
        facts |= {name: replace(facts[name], minor=True) for name in ("links", "node_speed", "shrink")}
    for name, form in MACHINE_FACTS.items():
        if (value := environment.get(name)) is not None:
            text = count(value, "core") if name == "cores" else "no GPU" if value == [] else form.format(
                listing([str(each) for each in value]) if isinstance(value, list) else value)  # fmt: skip
            facts[name] = Fact(value, text, MACHINE, minor=True)
    return Setting(_ordered(facts))


def _ordered(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """As they are said: who divides the work how, then with what, on which network; length and machine last."""
    own = [name for name, fact in facts.items() if fact.affects == DIVISION and name not in (*FIRST, *THEN)]
    last = [name for group in (NETWORK, PROBLEM) for name in facts if facts[name].affects == group]
    order = dict.fromkeys([*FIRST, *own, *THEN, *last, *(n for n, f in facts.items() if f.affects != LENGTH), *facts])
    return {name: facts[name] for name in order if name in facts}


def _lab(lab: Mapping[str, Any], options: Mapping[str, Any], *, alone: bool) -> dict[str, Fact]:
    """Its nodes and links, and what else a lab has where it is unusual. A rank that is alone uses no links."""
    nodes = lab.get("nodes", [])
    if not nodes:
        return {}

    def each(key: str) -> list[float]:
        return sorted({node[key] for node in nodes if node.get(key)})

    ends = sorted({(node["up"], node["down"]) for node in nodes})
    uneven = [f"{link(up)} up and {link(down)} down" for up, down in ends]
    speeds = listing([link(up) for up, _ in ends] if all(up == down for up, down in ends) else uneven)
    faults = [f"{fault['node']} {fault['do']} at {fault['at']:g} s" for fault in lab.get("faults") or []]
    racks = sorted({link(rack["up"]) if rack["up"] == rack["down"] else f"{link(rack['up'])} up and "
                    f"{link(rack['down'])} down" for rack in lab.get("racks") or []})  # fmt: skip
    paces, cores, mtu = each("speed"), each("cpu"), lab.get("mtu") or USUAL_MTU
    pace = "" if paces in ([], [1]) else f"devices {listing([f'{pace:g}' for pace in paces])} times as fast"
    facts = {
        "lab": Fact([[node.get(key) for key in ("up", "down", "cpu", "speed", "rack")] for node in nodes], "", NETWORK),
        "links": Fact(ends, f"links of {speeds}", NETWORK, alone),
        "node_speed": Fact(paces, pace, PROBLEM, alone),
        "node_cores": Fact(cores, f"{listing([f'{n:g}' for n in cores])} cores a node" * bool(cores), PROBLEM, alone),
        "mtu": Fact(mtu, f"MTU {mtu}" if mtu != USUAL_MTU else "", NETWORK, alone),
        "racks": Fact(lab.get("racks"), f"{' and '.join(racks)} between racks" if racks else "", NETWORK, alone),
        "faults": Fact(lab.get("faults"), " and ".join(faults), NETWORK, alone),
    }  # fmt: skip
    if known := _stands_for(nodes, options):
        facts["links_as_of"] = Fact(known, f"links as of {link(float(f'{known:.3g}'))}", NETWORK, alone)
    return facts


def _stands_for(nodes: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> float | None:
    """The links, in bit/s, that those of a lab stand for: slower, as gradients are smaller and devices faster.

    None where nothing is scaled, and where devices are not of one speed.
    """
    speeds = {float(node.get("speed") or 1.0) for node in nodes}
    shrink = options["shrink"]
    if options["compute"] == FIELDS["compute"].default or len(speeds) != 1 or (shrink == 1 and speeds == {1.0}):
        return None
    return float(min(node["up"] for node in nodes) * shrink / speeds.pop())
