"""How a run divides its model: replicas of stages or shards, micro-batches, where it is cut; as a setting, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.analysis.runs import Run
from paceline.analysis.wording import count

# Options about that: a run's own summary says it better, and nothing where it has no meaning.
IN_SPEC = ("stages", "tensor", "microbatches", "schedule", "recompute", "averaging", "cut", "memory", "speed")
# Those that say how many parts a replica has.
PARTS = ("stages", "tensor")
# The same of a setting.
KEYS = ("stages", "tensor", "schedule", "microbatches", "recompute", "averaging", "cut", "stage_memory", "stage_speed")
CUTS = {"measured": "cut by measured times", "layers": "cut by layers", "parameters": "cut by parameters"}


def division(run: Run) -> dict[str, Any]:
    """What of a setting is about it."""
    spec, options = run.spec, run.method.names
    found = {key: spec.get(key) for key in (*PARTS, "schedule", "recompute") if key in options}
    if "cut" in options:
        found["cut"] = spec.get("cut", "measured")
    found |= {f"stage_{key}": spec[key] for key in ("memory", "speed") if key in options and spec.get(key)}
    if "schedule" in options or run.microbatches > 1:
        found["microbatches"] = run.microbatches
    if "averaging" in options:
        found["averaging"] = run.spec.get("averaging")
    return found


def words(setting: Mapping[str, Any]) -> dict[str, str]:
    """A setting's division, by KEYS; empty where there is nothing to say."""
    get = setting.get
    cut = str(get("cut", ""))
    return {
        "stages": count(get("stages", 0), "stage") if get("stages") else "",
        "tensor": count(get("tensor", 0), "shard") if get("tensor") else "",
        "schedule": str(get("schedule") or ""),
        "microbatches": micro_batches(get("microbatches", 0)) if get("microbatches") else "",
        "recompute": "recomputing" if get("recompute") else "",
        "averaging": f"averaged by {get('averaging')}" if get("averaging") else "",
        "cut": CUTS.get(cut, f"cut after {cut}") if cut else "",
        "stage_memory": f"stages of at most {get('stage_memory')}" if get("stage_memory") else "",
        "stage_speed": f"stages of speed {get('stage_speed')}" if get("stage_speed") else "",
    }


def micro_batches(number: int) -> str:
    return f"{number:,} micro-batch{'' if number == 1 else 'es'}"


def workers(run: Run) -> str:
    """4 workers; or 2 replicas × 2 stages, 4 shards, where they have a part of the model each."""
    if not run.method.part:
        return count(run.summary.workers, "worker")
    return f"{replicas(run)} × {parts(run)}" if run.replicas > 1 else parts(run)


def parts(run: Run) -> str:
    """Of a replica; empty where it has none."""
    s, part = run.summary, run.method.part
    return count(s.grid.stages * s.grid.shards, part) if part else ""


def replicas(run: Run) -> str:
    return count(run.replicas, "replica") if run.method.part else ""
