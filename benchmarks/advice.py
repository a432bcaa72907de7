"""How good verdicts are: `paceline advise` is asked for each scenario, and what it compares is measured.

    python benchmarks/advice.py experiments/advice.toml             about an hour on two idle cores; can be interrupted

A scenario is a training on machines that its short runs were not made on. The best setting of its advice is run there,
also the best one with another number of workers if the verdict is not clear, and so is one process. "Distribute" is
right if the advised setting is faster than one process by the margin, and "do not" is right if none of the measured
settings is; scenarios whose measured 95 % interval includes the margin are undecided. Runs that the lab or other
programs spoilt are left out. Remove the files *.json of a scenario to ask again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from paceline.advise.advice import MARGIN
from paceline.advise.search import measured_draws
from paceline.bench.experiment import make_experiment
from paceline.bench.run import bench
from paceline.bench.store import Store
from paceline.predict.probes import Probe, usable_probes
from paceline.spec import OWN
from paceline.strategies.table import TABLE, default

ALONE, SEVERAL, REAL = 2, 1, 2  # runs of one process and of several in a lab, and of each on this machine
MEASURED, CLEAR = 2, 0.01  # settings that are measured; only the best if its probability is so close to 0 or 1
REAL_STEPS = 40
NODES = 8  # of a scenario


@dataclass(frozen=True)
class Result:
    """A verdict beside what was measured: the time of the best measured setting as a part of one process's."""

    scenario: str
    distribute: bool
    predicted: float
    setting: str
    measured: float
    low: float
    high: float

    @property
    def truth(self) -> bool | None:
        """Whether it is worth it; None if that is undecided."""
        line = 1 / (1 + MARGIN)
        return None if self.low <= line <= self.high else self.high < line


def ask(words: Sequence[str], answer: Path) -> dict[str, Any]:
    """What `paceline advise` says as JSON, kept in a file."""
    if not answer.exists():
        said = subprocess.run(
            [sys.executable, "-m", "paceline", "advise", "--json", *words],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if said.returncode:
            sys.exit(f"advise ended with {said.returncode}: {words}")
        answer.parent.mkdir(parents=True, exist_ok=True)
        answer.write_text(said.stdout)
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def flags(options: Mapping[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def cluster(scenario: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The lab of a scenario; a slow node is the last of all, and is used only if all are."""
    lab = {key: value for key, value in scenario.items() if key not in ("name", "slow")}
    slow = {"speed": scenario["slow"]} if "slow" in scenario else {}
    nodes = [{"name": f"n{number + 1}"} | (slow if number == NODES - 1 else {}) for number in range(ranks)]
    return lab | {"node": nodes}


def run_all(folder: Path, options: Mapping[str, Any], grids: Sequence[Mapping[str, Any]], repeats: int) -> list[Probe]:
    """The usable runs of these settings, made if they are missing. Those of one folder are in turns."""
    used = {name for grid in grids for name in TABLE[grid["strategy"]].names}
    fixed = {name: value for name, value in options.items()
             if name not in ("global_batch", "batch_size") and (name not in OWN or name in used)}  # fmt: skip
    experiment = make_experiment(
        {"fixed": fixed | {"test": False}, "grid": list(grids)}, Path("advice"), repeats=repeats
    )
    if bench(experiment, Store(folder), lambda text, end: print(text, end=end, flush=True)).stopped:
        sys.exit(130)
    found, why = usable_probes([folder / task.name for task in experiment.tasks()])
    for each in why:
        print(f"not used: {each}", file=sys.stderr)
    return found


def settings(advice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The best ones, with different numbers of workers: those that the verdict is about."""
    found: dict[int, dict[str, Any]] = {}
    ranked = [advice["best"], *advice["choices"]] if advice["best"] else advice["choices"]
    for each in ranked:
        if each["workers"] > 1 and each["where"] == advice["where"] and each["fits"]:
            found.setdefault(each["workers"], each)
    clear = not CLEAR < next(iter(found.values()))["faster"] < 1 - CLEAR if found else False
    return list(found.values())[: 1 if clear else MEASURED]


def lab_results(space: Mapping[str, Any], output: Path, only: str) -> Iterator[Result]:
    workers = ",".join(map(str, space["workers"]))
    for each in space["set"]:
        if not each["name"].startswith(only):
            continue
        folder, options = output / each["name"], each["options"] | {"overlap": "on"}
        folder.mkdir(parents=True, exist_ok=True)
        lab = folder / "probe.toml"
        lab.write_text(tomli_w.dumps({"rate": space["probe"], "nodes": "{ranks}"}))
        probing = ["--time-limit", "1s", "--lab", str(lab.absolute()), "--runs-dir", str(folder / "probes"), "--"]
        ask([*probing[:-1], "--", "train", *flags(options), "--workers", workers], folder / "probed.json")
        for scenario in space["scenario"]:
            name = "".join(c if c.isalnum() else "-" for c in scenario["name"])
            file = folder / f"{name}.toml"
            file.write_text(tomli_w.dumps(cluster(scenario, NODES)))
            advice = ask([str(folder / "probes"), "--cluster", str(file), "--workers", workers],
                         folder / f"{name}.json")  # fmt: skip
            yield from compare(f"{each['name']}, {scenario['name']}", advice, folder / name, options,
                               space["steps"], scenario)  # fmt: skip


def folder_of(output: Path, name: str) -> Path:
    """Of a real training."""
    return output / "".join(c if c.isalnum() else "-" for c in f"real {name}")


def real_results(space: Mapping[str, Any], output: Path, only: str) -> Iterator[Result]:
    for each in space["real"]:
        if not each["name"].startswith(only):
            continue
        folder = folder_of(output, each["name"])
        words = ["--runs-dir", str(folder / "probes"), "--", "train", *flags(each["options"]), "--workers", "1,2"]
        advice = ask(words, folder / "advice.json")
        yield from compare(f"{each['name']} on this machine", advice, folder / "measured", each["options"],
                           REAL_STEPS, None)  # fmt: skip


def compare(
    name: str,
    advice: Mapping[str, Any],
    folder: Path,
    options: Mapping[str, Any],
    steps: int,
    scenario: Mapping[str, Any] | None,
) -> Iterator[Result]:
    batch = advice["choices"][0]["batch"]

    def grid(strategy: str, workers: int, machines: int) -> dict[str, Any]:
        lab = {"lab": cluster(scenario, machines)} if scenario else {}
        return {"strategy": strategy, "workers": workers, "global_batch": batch, "steps": steps, **lab}

    chosen = settings(advice)
    grids = [grid(each["strategy"], each["workers"], each["machines"]) for each in chosen]
    one = grid(default(1).name, 1, 1)
    if scenario:
        noise = {key: value for key, value in scenario.items() if key == "noise"}  # links do not matter
        alone = [one | {"lab": cluster({"rate": "120mbit", **noise}, 1)}]
        runs = run_all(folder.parent / "alone", options, alone, ALONE) + run_all(folder, options, grids, SEVERAL)
    else:
        runs = run_all(folder, options, [one, *grids], REAL)
    kinds: dict[tuple[str, int], list[Probe]] = {}
    for run in runs:
        kinds.setdefault((run.run.summary.strategy, run.workers), []).append(run)
    single = kinds.pop((default(1).name, 1), None)
    if not single or not kinds:
        print(f"{name}: not scored: runs were spoilt", file=sys.stderr)
        return
    ratios = {key: measured_draws(own, 1) / measured_draws(single, 2) for key, own in kinds.items()}
    told = (advice["best"]["strategy"], advice["best"]["workers"])
    if advice["distribute"] and told not in ratios:
        print(f"{name}: not scored: runs of the advised setting were spoilt", file=sys.stderr)
        return
    # "Distribute" must be right about its own setting, "do not" about all that were measured.
    chosen_ones = {told: ratios[told]} if advice["distribute"] else ratios
    (strategy, workers), ratio = min(chosen_ones.items(), key=lambda item: float(item[1][0]))
    low, high = np.quantile(ratio, [0.025, 0.975])
    predicted = next(each["relative"]["value"] for each in chosen
                     if (each["strategy"], each["workers"]) == (strategy, workers))  # fmt: skip
    yield Result(name, advice["distribute"], predicted, f"{strategy} x{workers}", float(ratio[0]),
                 float(low), float(high))  # fmt: skip


def show(results: Sequence[Result]) -> None:
    for each in results:
        truth = {None: "undecided", True: "worth it", False: "not worth it"}[each.truth]
        said = "distribute" if each.distribute else "do not"
        right = "" if each.truth is None else "right" if each.truth == each.distribute else "WRONG"
        print(f"{each.scenario:60} {said:11} predicted {each.predicted:5.2f} measured {each.measured:5.2f} "
              f"({each.low:.2f}–{each.high:.2f}) {each.setting:16} {truth:13} {right}")  # fmt: skip
    decided = [each for each in results if each.truth is not None]
    print(json.dumps({
        "scenarios": len(results),
        "do_not": sum(not each.distribute for each in results),
        "undecided": len(results) - len(decided),
        "decided": len(decided),
        "right": sum(each.truth == each.distribute for each in decided),
        "distribute_but_slower": sum(each.distribute and each.measured > 1 for each in results),
        "mean_error": float(np.mean([abs(each.predicted / each.measured - 1) for each in results])),
    }))  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("space", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/advice-scored"))
    parser.add_argument("--sets", default="", help="only those whose names begin so")
    args = parser.parse_args()
    space = tomllib.loads(args.space.read_text())
    results: list[Result] = []
    for found in (lab_results(space, args.output, args.sets), real_results(space, args.output, args.sets)):
        for each in found:
            results.append(each)
            show([each])
    show(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
